// The arguments of the kernels of sparse selection. Included after core.h.
#pragma once
#include "core.h"

namespace thinwire {

// Elements [start, start + numel) of x. A key orders as |x|: its bits without the sign, all NaNs alike.
struct Span {
  const void* x = nullptr;
  Dtype dtype = kFloat32;
  int64_t start = 0, numel = 0;
};

constexpr uint32_t kInfiniteKey = 0x7F800000, kNanKey = kInfiniteKey + 1;
constexpr int kBins = 2048;

// Candidates: elements whose key is at least `least`, block by block of kTile elements, each block's at a place of its
// own; those that do not fit into `capacity` are only counted.
struct Place {
  int64_t at, count;
};

struct Candidates {
  uint32_t least;
  int64_t capacity;
  uint32_t* indices;
  float* values;
  Place* places; // one a block
  int64_t used;  // merged atomically, as the next two
  int64_t total;
  int32_t nonfinite;
};

// Counts of the bins (key >> shift) % bins of keys for which key >> above == prefix; of the bare bits if not `clamped`.
struct Histogram {
  int shift, above;
  uint32_t prefix;
  bool clamped;
  int32_t* counts; // kBins, merged atomically
};

// The selection: the k largest whose key is at least `least`, or the key of the rank-th of a sample; rank 0: no sample.
struct Pick {
  int64_t k = 0;
  uint32_t least = 1;
  bool partial = false; // fewer than k are a valid result: always, or if the sampled key leads to that
  bool sampled = false;
  int64_t offset = 0, stride = 1, num_samples = 0, rank = 0;
};

struct Picked {
  int32_t* indices; // k, as the values
  float* values;
  int64_t count, total; // selected; at or above the threshold
  bool finite;
};

constexpr int64_t kIndexBlock = 65536;

struct IndexList {
  int64_t numel, k;
  bool bitmap;
  int64_t blocks() const { return (numel + kIndexBlock - 1) / kIndexBlock; }
  int64_t num_bytes() const { return ((bitmap ? (numel + 7) / 8 : 4 * blocks() + 2 * k) + 63) / 64 * 64; }
  static IndexList shorter(int64_t numel, int64_t k) {
    const IndexList bits{numel, k, true}, offsets{numel, k, false};
    return bits.num_bytes() <= offsets.num_bytes() ? bits : offsets;
  }
};

struct SparseKernels {
  void (*sample)(const Span&, int64_t offset, int64_t stride, int64_t count, uint32_t* keys);
  void (*collect)(const Span&, Candidates&, int64_t begin, int64_t end);       // blocks
  void (*histogram)(const Span&, const Histogram&, int64_t begin, int64_t end); // blocks
  // The first `count` elements with this key; returns how many there are, if fewer.
  int64_t (*find)(const Span&, uint32_t key, int64_t count, uint32_t* indices);
  // Writes those of n keys that are at least `low` and below `high`, in order, to room for n, which may be the keys
  // themselves; adds how many are not below `high`. Returns their number.
  int64_t (*narrow)(const uint32_t* keys, int64_t n, uint32_t low, uint32_t high, uint32_t* to, int64_t& above);
  void (*gather)(const Span&, const int32_t* indices, int64_t count, float* values);
  // y[start + i] += value * scale; null values: y[start + i] = 0.
  void (*scatter)(void* y, Dtype, int64_t start, const int32_t* indices, const void* values, int64_t count,
                  float scale);
};

} // namespace thinwire
