#include "dispatch.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace thinwire {

#if defined(THINWIRE_X86_LEVELS)
namespace x86_64_v2 { extern const Kernels kernels; }
namespace x86_64_v3 { extern const Kernels kernels; }
namespace x86_64_v4 { extern const Kernels kernels; }
#endif
namespace generic { extern const Kernels kernels; }

namespace {

constexpr int64_t kParallelElements = 131072; // below this, waking threads costs more than it saves
constexpr int64_t kTaskElements = 65536;      // elements of a thread, at least

// Subnormal values are kept (torch.set_flush_denormal would flush them and change bytes).
class FloatMode {
#if defined(__SSE2__)
  const unsigned saved = _mm_getcsr();

public:
  FloatMode() { _mm_setcsr(saved & ~0xE040u); } // round to nearest, no flush to zero, no denormals as zero
  ~FloatMode() { _mm_setcsr(saved); }
#endif
};

template <class Work>
bool run(const Machine& machine, int64_t pieces, int64_t elements, Work& work) {
  if (pieces == 0) return true;
  if (!machine.parallel_for || elements < kParallelElements || pieces == 1) {
    [[maybe_unused]] const FloatMode mode;
    work(0, pieces);
    return true;
  }
  const int64_t grain = ceil_div(pieces * kTaskElements, elements);
  const Body body = [](int64_t begin, int64_t end, void* context) {
    [[maybe_unused]] const FloatMode mode;
    (*static_cast<Work*>(context))(begin, end);
  };
  return machine.parallel_for(0, pieces, grain, body, &work) == 0;
}

Status encode_wide(const Machine& machine, const Job& job, const Row& row) {
  const int64_t buckets = num_buckets(row.numel, job.form.bucket), pieces = ceil_div(row.numel, kLoaded);
  void* memory = std::malloc(buckets * (2 * sizeof(int32_t) + 3 * sizeof(float)));
  if (!memory) return kNoMemory;
  int32_t* keys = static_cast<int32_t*>(memory);
  float* floats = reinterpret_cast<float*>(keys + 2 * buckets);
  const Wide wide{keys, keys + buckets, floats, floats + buckets, floats + 2 * buckets};
  for (int64_t k = 0; k < buckets; k++) wide.low_key[k] = INT32_MAX, wide.high_key[k] = INT32_MIN;
  auto extrema = [&](int64_t begin, int64_t end) { machine.kernels->wide_extrema(job, row, wide, begin, end); };
  auto scales = [&](int64_t, int64_t) { machine.kernels->wide_scales(job, row, wide); };
  auto codes = [&](int64_t begin, int64_t end) { machine.kernels->wide_codes(job, row, wide, begin, end); };
  auto sums = [&](int64_t begin, int64_t end) { machine.kernels->wide_sums(job, row, wide, begin, end); };
  const bool found =
      job.form.summed() ? run(machine, buckets, row.numel, sums) : run(machine, pieces, row.numel, extrema);
  const bool done = found && run(machine, 1, buckets, scales) &&
                    run(machine, pieces, row.numel, codes);
  std::free(memory);
  return done ? kDone : kThreadsFailed;
}

// Of rows, or of other parts that have a number of elements.
struct Size {
  int64_t elements = 0, tiles = 0;

  template <class Part>
  Size(const Part* parts, int64_t count) {
    for (int64_t i = 0; i < count; i++) elements += parts[i].numel, tiles += ceil_div(parts[i].numel, kTile);
  }
  explicit Size(const Job& job) : Size(job.rows, job.num_rows) {}
};

template <class Work>
Status on_tiles(const Machine& machine, const Work& job, void (*kernel)(const Work&, int64_t, int64_t)) {
  const Size size(job);
  auto work = [&](int64_t begin, int64_t end) { kernel(job, begin, end); };
  return run(machine, size.tiles, size.elements, work) ? kDone : kThreadsFailed;
}

} // namespace

const Kernels* const* levels() {
  static const Kernels* found[5] = {};
  if (found[0]) return found;
  int n = 0;
#if defined(THINWIRE_X86_LEVELS)
  // Features that are not tested come with those that are, on every existing CPU (lzcnt with bmi2, for instance).
  const bool v2 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
  const bool v3 =
      v2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
  if (v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found[n++] = &x86_64_v4::kernels;
  }
  if (v3) found[n++] = &x86_64_v3::kernels;
  if (v2) found[n++] = &x86_64_v2::kernels;
#endif
  found[n] = &generic::kernels;
  return found;
}

Status encode(const Machine& machine, const Job& job) {
  const Blocks blocks(job);
  int64_t pieces = 0, elements = 0;
  for (int64_t r = 0; r < job.num_rows; r++) {
    const Row& row = job.rows[r];
    if (blocks.wide(row.numel)) {
      if (const Status status = encode_wide(machine, job, row); status != kDone) return status;
    } else {
      pieces += blocks.count(row.numel), elements += row.numel;
    }
  }
  auto work = [&](int64_t begin, int64_t end) { machine.kernels->encode_blocks(job, begin, end); };
  return run(machine, pieces, elements, work) ? kDone : kThreadsFailed;
}

Status decode(const Machine& machine, const Job& job) { return on_tiles(machine, job, machine.kernels->decode_tiles); }

Status sum(const Machine& machine, const Job& job) { return on_tiles(machine, job, machine.kernels->sum_tiles); }

Status raw_encode(const Machine& machine, const Job& job) {
  return on_tiles(machine, job, machine.kernels->raw_encode_tiles);
}

Status raw_decode(const Machine& machine, const Job& job) {
  return on_tiles(machine, job, machine.kernels->raw_decode_tiles);
}

Status raw_sum(const Machine& machine, const Job& job) { return on_tiles(machine, job, machine.kernels->raw_sum_tiles); }

Status rows_add(const Machine& machine, const RowJob& job) { return on_tiles(machine, job, machine.kernels->add_tiles); }

Status rows_scale(const Machine& machine, const RowJob& job) {
  return on_tiles(machine, job, machine.kernels->scale_tiles);
}

Status checksum(const Machine& machine, const uint8_t* message, int64_t num_bytes, uint64_t& result) {
  const int64_t words = num_bytes / 4, pieces = ceil_div(words, kTaskElements);
  result = 0;
  auto work = [&](int64_t begin, int64_t end) {
    const int64_t last = end * kTaskElements < words ? end * kTaskElements : words;
    const uint64_t part = machine.kernels->checksum(message, begin * kTaskElements, last);
    __atomic_fetch_add(&result, part, __ATOMIC_RELAXED);
  };
  return run(machine, pieces, words, work) ? kDone : kThreadsFailed;
}

Status adam_normalize(const Machine& machine, const Normalize* layers, int64_t count) {
  const Size size(layers, count);
  auto work = [&](int64_t begin, int64_t end) { machine.kernels->adam->normalize(layers, count, begin, end); };
  return run(machine, size.tiles, size.elements, work) ? kDone : kThreadsFailed;
}

Status adam_apply(const Machine& machine, const Apply* layers, int64_t count) {
  const Size size(layers, count);
  auto work = [&](int64_t begin, int64_t end) { machine.kernels->adam->apply(layers, count, begin, end); };
  return run(machine, size.tiles, size.elements, work) ? kDone : kThreadsFailed;
}

#include "floats_dispatch.h"
#include "sparse_dispatch.h"
#include "spectrum_dispatch.h"
#include "factors_dispatch.h"
#include "norms_dispatch.h"

} // namespace thinwire
