// The kernels, compiled once per instruction-set level (THINWIRE_LEVEL names it); dispatch.h picks one at run time.
// The arithmetic is normative (thinwire/kernels/reference.py): no contraction, one rounding per operation.
#include "core.h"

#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace thinwire {
namespace THINWIRE_LEVEL {
namespace {
#include "simd.h"
#include "convert.h"
#include "planes.h"
#include "rounding.h"
#include "scales.h"
#include "sums.h"
#include "decode.h"
#include "rows.h"
#include "encode.h"
#include "wide.h"
} // namespace
} // namespace THINWIRE_LEVEL
} // namespace thinwire

#include "adam.h"
#include "factors.h"
#include "floats.h"
#include "sparse.h"
#include "spectrum.h"

namespace thinwire {
namespace THINWIRE_LEVEL {
extern const Kernels kernels;
const Kernels kernels = {
    THINWIRE_LEVEL_NAME, &adam_kernels, &factor_kernels, &float_kernels, &sparse_kernels, &spectrum_kernels,
    encode_blocks, wide_extrema, wide_sums, wide_scales, wide_codes, decode_tiles, sum_tiles, raw_encode_tiles,
    raw_decode_tiles, raw_sum_tiles, add_tiles, scale_tiles, checksum,
};
} // namespace THINWIRE_LEVEL
} // namespace thinwire
