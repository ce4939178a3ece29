// The kernels as the binding calls them: the instruction-set level is selected and work is distributed over threads.
#pragma once
#include "adam_core.h"
#include "core.h"
#include "factors_core.h"
#include "floats_core.h"
#include "norms_core.h"
#include "sparse_core.h"
#include "spectrum_core.h"

namespace thinwire {

// torch_parallel_for of PyTorch's stable C interface: runs body(from, to, context) over [begin, end) on its threads, in
// pieces of at least `grain`, and returns 0.
using Body = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);

enum Status { kDone, kNoMemory, kThreadsFailed };

// Levels of this build that this CPU supports, best first; null-terminated.
const Kernels* const* levels();

// The level and threads of a call. Set while the interpreter's lock is held, copied before it is released.
struct Machine {
  const Kernels* kernels;
  ParallelFor parallel_for; // null: the calling thread alone
};

Status encode(const Machine&, const Job&);
Status decode(const Machine&, const Job&);
Status sum(const Machine&, const Job&);
// The same without a code: payloads hold values of the dtype of `own` (raw_encode) or of `y`.
Status raw_encode(const Machine&, const Job&);
Status raw_decode(const Machine&, const Job&);
Status raw_sum(const Machine&, const Job&);
Status rows_add(const Machine&, const RowJob&);
Status rows_scale(const Machine&, const RowJob&);
Status checksum(const Machine&, const uint8_t* message, int64_t num_bytes, uint64_t& result);

Status adam_normalize(const Machine&, const Normalize* layers, int64_t count);
Status adam_apply(const Machine&, const Apply* layers, int64_t count);

// factors_dispatch.h
Status factor_rows(const Machine&, const Factored&);
Status factor_columns(const Machine&, const Factored&);
Status factor_product(const Machine&, const Factored&);
Status factor_basis(const Machine&, const Factored&); // out = an orthonormal basis of the columns of left

// norms_dispatch.h
Status square_sums(const Machine&, const SquareSum* vectors, int64_t count);
Status sketches(const Machine&, const Sketch* vectors, int64_t count);

// floats_dispatch.h
Status natural_encode(const Machine&, const FloatJob&);
Status natural_decode(const Machine&, const FloatJob&);
Status range_encode(const Machine&, const FloatJob&);
Status range_decode(const Machine&, const FloatJob&);
Status levels_encode(const Machine&, const FloatJob&);
Status levels_decode(const Machine&, const FloatJob&);
Status magnitudes_encode(const Machine&, const FloatJob&);
Status magnitudes_decode(const Machine&, const FloatJob&);
Status int_round(const Machine&, const FloatJob&, int64_t* clipped); // one count a row
Status int_decode(const Machine&, const FloatJob&);

// sparse_dispatch.h
Status pick(const Machine&, const Span&, const Pick&, Picked&);
Status abs_histogram(const Machine&, const Span&, int32_t* counts);
bool are_inside(const int32_t* indices, int64_t count, int64_t numel);
void scatter(const Machine&, void* y, Dtype, int64_t start, const int32_t* indices, const void* values, int64_t count,
             float scale);
bool pack_indices(const int32_t* indices, int64_t count, const IndexList&, uint8_t* bytes); // false: not ascending
void put_indices(const int32_t* indices, int64_t count, const IndexList&, uint8_t* bytes);  // that are known to ascend
int64_t unpack_indices(const uint8_t* bytes, const IndexList&, int32_t* indices);

// spectrum_dispatch.h
Status spectrum_encode(const Machine&, const SpectrumJob&);
Status spectrum_decode(const Machine&, const SpectrumJob&);

} // namespace thinwire
