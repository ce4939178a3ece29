// The kernels, compiled once per instruction-set level (THINWIRE_LEVEL names it); dispatch.cpp picks one at run time.
// The arithmetic is normative (thinwire/kernels/reference.py): no contraction, one rounding per operation.
#include "adam_core.h"
#include "core.h"
#include "factors_core.h"
#include "floats_core.h"
#include "sparse_core.h"
#include "spectrum_core.h"

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
#include "masks.h"
#include "floats.h"
#include "levels.h"
#include "magnitudes.h"
#include "sparse.h"
#include "fourier.h"
#include "spectrum.h"
#include "adam.h"
#include "factors.h"

const AdamKernels adam_kernels = {normalize, apply};
const FactorKernels factor_kernels = {factor_rows, factor_columns, factor_product, factor_basis};
const FloatKernels float_kernels = {
    natural_encode, natural_decode, range_encode, range_decode, levels_decode, int_round, int_decode, levels_encode,
    magnitudes_encode, magnitudes_decode,
};
const SparseKernels sparse_kernels = {sample, collect, histogram, find, narrow, gather, scatter};
const SpectrumKernels spectrum_kernels = {
    scratch_bytes, sample_spectra, collect_spectra, choose_components, restore,
};
} // namespace

extern const Kernels kernels;
const Kernels kernels = {
    THINWIRE_LEVEL_NAME, &adam_kernels, &factor_kernels, &float_kernels, &sparse_kernels, &spectrum_kernels,
    encode_blocks, wide_extrema, wide_sums, wide_scales, wide_codes, decode_tiles, sum_tiles, raw_encode_tiles,
    raw_decode_tiles, raw_sum_tiles, add_tiles, scale_tiles, checksum,
};
} // namespace THINWIRE_LEVEL
} // namespace thinwire
