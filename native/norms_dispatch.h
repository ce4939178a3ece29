// Norms and sketches with the same bits on every machine, as the binding calls them. One addition after another in an
// order of their own, by the calling thread. Included in dispatch.cpp, after sparse_dispatch.h.

namespace {

// The sum of `count` lanes, a power of two, halves upon halves, until `size` are left.
template <class Float>
void fold(Float* lanes, int64_t count, int64_t size) {
  while (count > size) {
    count /= 2;
    for (int64_t i = 0; i < count; i++) lanes[i] += lanes[count + i];
  }
}

} // namespace

Status square_sum(const Machine&, const float* x, int64_t numel, int64_t count, double& sum) {
  const Memory memory(8 * count);
  if (!memory.at) return kNoMemory;
  [[maybe_unused]] const FloatMode mode;
  double* const lanes = memory.as<double>();
  std::fill(lanes, lanes + count, 0.0);
  for (int64_t begin = 0; begin < numel; begin += count) {
    const int64_t run = std::min(count, numel - begin);
    for (int64_t i = 0; i < run; i++) {
      const double value = x[begin + i];
      lanes[i] += value * value; // exact products: fused or not, the same bits
    }
  }
  fold(lanes, count, 1);
  sum = lanes[0];
  return kDone;
}

Status sketch(const Machine&, const Sketch& job) {
  const Memory memory(8 * job.lanes);
  if (!memory.at) return kNoMemory;
  [[maybe_unused]] const FloatMode mode;
  float *const sums = memory.as<float>(), *const mixed = sums + job.lanes;
  std::fill(sums, sums + job.lanes, 0.0f);
  for (int64_t r = 0; r < job.num_runs(); r++) {
    const float* run = job.vector + r * job.lanes;
    const int64_t numel = std::min(job.lanes, job.numel - r * job.lanes), shift = job.runs[2 * r + 1];
    const float sign = static_cast<float>(job.runs[2 * r]);
    const int64_t first = std::min(numel, job.lanes - shift);
    for (int64_t i = 0; i < first; i++) sums[shift + i] += sign * run[i];
    for (int64_t i = first; i < numel; i++) sums[i - first] += sign * run[i];
  }
  for (int64_t i = 0; i < job.lanes; i++) mixed[i] = sums[job.order[i]] * job.signs[job.order[i]];
  fold(mixed, job.lanes, job.size);
  std::copy(mixed, mixed + job.size, job.out);
  return kDone;
}
