// Norms and sketches of vectors with the same bits on every machine: one addition after another in an order of their
// own, by the calling thread. See thinwire.kernels.norms.
#pragma once
#include "dispatch.h"

namespace thinwire {

constexpr int64_t kMostSquareLanes = 1 << 16;

// The sum of a vector's squares, in so many lanes.
struct SquareSum {
  const float* vector = nullptr;
  int64_t numel = 0;
  int64_t lanes = 0; // a power of two, up to kMostSquareLanes
  double* out = nullptr;
};

// Random signs of a vector's elements, added up.
struct Sketch {
  const float* vector = nullptr;
  int64_t numel = 0;
  int64_t lanes = 0, size = 0;     // powers of two
  const int64_t* runs = nullptr;   // of `lanes` elements each: a sign, and the lane of the first one
  const int64_t* order = nullptr;  // of the lanes
  const float* signs = nullptr;    // of the lanes
  double* out = nullptr;           // [size]

  int64_t num_runs() const { return ceil_div(numel, lanes); }
};

namespace {

constexpr int64_t kChunkLanes = 512; // that are added up at a time, in the cache
constexpr int kMostWaiting = 8;      // sums of chunks: one for each bit of a chunk's number, and the next chunk
static_assert(kChunkLanes << (kMostWaiting - 1) == kMostSquareLanes);

// The sum of `count` lanes, a power of two, halves upon halves, until `size` are left.
template <class Float>
void fold(Float* lanes, int64_t count, int64_t size) {
  while (count > size) {
    count /= 2;
    for (int64_t i = 0; i < count; i++) lanes[i] += lanes[count + i];
  }
}

// The squares in lanes [first, first + count).
void add_squares(const SquareSum& job, int64_t first, int64_t count, double* lanes) {
  std::fill(lanes, lanes + count, 0.0);
  for (int64_t begin = first; begin < job.numel; begin += job.lanes) {
    const int64_t run = std::min(count, job.numel - begin);
    for (int64_t i = 0; i < run; i++) {
      const double value = job.vector[begin + i];
      lanes[i] += value * value; // exact products: fused or not, the same bits
    }
  }
}

void add_squares(const SquareSum& job) {
  // Folding pairs a chunk of lanes with the one half of them further on, so that in the order of their numbers' bits
  // read backwards neighbors are added, neighbors of sums, and so on: as many sums wait as a number has bits.
  double waiting[kMostWaiting][kChunkLanes];
  const int64_t lanes = std::min(job.lanes, kChunkLanes), chunks = job.lanes / lanes;
  int depth = 0;
  for (int64_t k = 0; k < chunks; k++) {
    int64_t chunk = 0;
    for (int64_t bit = 1, reversed = chunks / 2; bit < chunks; bit *= 2, reversed /= 2)
      if (k & bit) chunk |= reversed;
    add_squares(job, chunk * lanes, lanes, waiting[depth++]);
    for (int64_t done = k; done & 1; done >>= 1) {
      depth--;
      for (int64_t i = 0; i < lanes; i++) waiting[depth - 1][i] += waiting[depth][i];
    }
  }
  fold(waiting[0], lanes, 1);
  *job.out = waiting[0][0];
}

void add_signed(const Sketch& job, float* sums, float* mixed) {
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
}


bool is_power_of_two(int64_t value) { return value >= 1 && !(value & (value - 1)); }

// vector, numel, lanes, out
void read_part(Arguments& in, SquareSum& job) {
  job.vector = in.address<const float>(), job.numel = in.numel();
  job.lanes = in.integer(), job.out = in.address<double>();
  in.require(is_power_of_two(job.lanes) && job.lanes <= kMostSquareLanes, "lanes are a power of two, up to 65536");
}

// vector, numel, lanes, size, runs, order, signs, out
void read_part(Arguments& in, Sketch& job) {
  job.vector = in.address<const float>(), job.numel = in.numel();
  job.lanes = in.integer(), job.size = in.integer();
  in.require(is_power_of_two(job.lanes) && is_power_of_two(job.size), "lanes and sizes are powers of two");
  job.runs = in.address<const int64_t>(), job.order = in.address<const int64_t>();
  job.signs = in.address<const float>(), job.out = in.address<double>();
}

PyObject* py_square_sums(Arguments& in) {
  return on_parts<SquareSum, 4>(in, [](const Machine&, const SquareSum* vectors, int64_t count) {
    [[maybe_unused]] const FloatMode mode;
    for (int64_t i = 0; i < count; i++) add_squares(vectors[i]);
    return kDone;
  });
}

PyObject* py_sketches(Arguments& in) {
  return on_parts<Sketch, 8>(in, [](const Machine&, const Sketch* vectors, int64_t count) {
    int64_t lanes = 0;
    for (int64_t i = 0; i < count; i++) lanes = std::max(lanes, vectors[i].lanes);
    const Memory memory(8 * lanes);
    if (!memory.at) return kNoMemory;
    [[maybe_unused]] const FloatMode mode;
    float* const sums = memory.as<float>();
    for (int64_t i = 0; i < count; i++) add_signed(vectors[i], sums, sums + lanes);
    return kDone;
  });
}

} // namespace

} // namespace thinwire
