// Products of matrices with narrow ones, as the binding calls them. Included in dispatch.cpp, after sparse_dispatch.h.

namespace {

// `job` for one of its matrices.
Factored one_of(const Factored& job, int64_t which) {
  Factored one = job;
  one.matrix += which * job.stride;
  if (one.left) one.left += which * job.rows * job.rank;
  if (one.right) one.right += which * job.columns * job.rank;
  return one;
}

// The power of two that makes the largest of so many values about 1, or as much of that as fp32 holds.
float power_to_one(const float* values, int64_t n) {
  constexpr int kLargestExponent = 100;
  float most = 0.0f;
  for (int64_t i = 0; i < n; i++) most = std::max(most, std::fabs(values[i]));
  int exponent = 0;
  if (std::isfinite(most)) std::frexp(most, &exponent);
  return std::ldexp(1.0f, -std::clamp(exponent, -kLargestExponent, kLargestExponent));
}

// NaN if any of so many values is not finite, else 0.
float not_finite(const float* values, int64_t n) {
  float sum = 0.0f;
  for (int64_t i = 0; i < n; i++) sum += values[i] * 0.0f;
  return sum;
}

// Runs work(job of a matrix, its right factor transposed and padded with zeros) for every matrix. A product that is set
// is NaN as a whole where a right factor is not finite.
template <class Work>
Status with_wide(const Factored& job, Work work) {
  const Memory memory(4 * job.padded() * job.columns);
  if (!memory.at) return kNoMemory;
  float* const wide = memory.as<float>();
  std::fill(wide, wide + job.padded() * job.columns, 0.0f);
  for (int64_t which = 0; which < job.count; which++) {
    const Factored one = one_of(job, which);
    const int64_t values = job.columns * job.rank;
    const float power = job.normalized ? power_to_one(one.right, values) : 1.0f;
    const bool is_set = !job.out && !job.add;
    const float poison = is_set ? not_finite(one.right, values) : 0.0f;
    for (int64_t c = 0; c < job.columns; c++) {
      for (int64_t k = 0; k < job.rank; k++) wide[k * job.columns + c] = one.right[c * job.rank + k] * power + poison;
    }
    if (!work(one, which, wide)) return kThreadsFailed;
  }
  return kDone;
}

} // namespace

Status factor_rows(const Machine& machine, const Factored& job) {
  return with_wide(job, [&](Factored one, int64_t which, const float* wide) {
    one.out += which * job.rows * job.rank;
    auto work = [&](int64_t begin, int64_t end) { machine.kernels->factors->rows(one, wide, begin, end); };
    return run(machine, job.rows, job.rows * job.columns, work);
  });
}

Status factor_columns(const Machine& machine, const Factored& job) {
  for (int64_t which = 0; which < job.count; which++) {
    Factored one = one_of(job, which);
    one.out += which * job.columns * job.rank;
    auto work = [&](int64_t begin, int64_t end) { machine.kernels->factors->columns(one, begin, end); };
    if (!run(machine, ceil_div(job.columns, kBlockColumns), job.rows * job.columns, work)) return kThreadsFailed;
  }
  return kDone;
}

Status factor_product(const Machine& machine, const Factored& job) {
  return with_wide(job, [&](const Factored& one, int64_t, const float* wide) {
    auto work = [&](int64_t begin, int64_t end) { machine.kernels->factors->product(one, wide, begin, end); };
    return run(machine, job.rows, job.rows * job.columns, work);
  });
}

Status factor_basis(const Machine& machine, const Factored& job) {
  const int64_t rows = job.rows, rank = job.rank, pitch = ceil_div(rows, kBasisLanes) * kBasisLanes;
  const Memory memory(4 * rank * (2 * pitch + 1));
  if (!memory.at) return kNoMemory;
  float *const columns = memory.as<float>(), *const basis = columns + rank * pitch;
  for (int64_t which = 0; which < job.count; which++) {
    const float* const from = job.left + which * rows * rank;
    float* const to = job.out + which * rows * rank;
    const float poison = not_finite(from, rows * rank);
    for (int64_t k = 0; k < rank; k++) {
      float* const column = columns + k * pitch;
      for (int64_t i = 0; i < pitch; i++) column[i] = i < rows ? from[i * rank + k] : 0.0f;
      const float power = power_to_one(column, rows); // no square overflows or vanishes
      for (int64_t i = 0; i < rows; i++) column[i] *= power;
    }
    machine.kernels->factors->basis(columns, basis, basis + rank * pitch, pitch, rank);
    for (int64_t i = 0; i < rows; i++) {
      for (int64_t k = 0; k < rank; k++) to[i * rank + k] = basis[k * pitch + i] + poison;
    }
  }
  return kDone;
}
