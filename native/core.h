// What the kernels of one instruction-set level offer, and what they are told. No Python, no torch, no exceptions.
#pragma once
#include <cstdint>

namespace thinwire {

constexpr int64_t kGroup = 128;        // codes are packed in groups of this many
constexpr int64_t kHalf = 64;          // each half of a group takes one 16-bit half of the same random words
constexpr int64_t kTile = 2048;        // elements worked on at a time: 8 KB of fp32, well inside the L1 cache
constexpr int64_t kAhead = 4096;       // elements from what is worked on to what is fetched into the L2 cache meanwhile
constexpr int64_t kLoaded = 16384;     // elements of a block that must be converted or summed first, in L2 meanwhile
constexpr int64_t kDirect = 131072;    // elements of a block that is read in place, twice: the second time from L2
constexpr int64_t kMaxBuckets = kTile; // buckets of one block

// The layout of thinwire.kernels.Table.rows.
struct Row {
  int64_t start, numel, index0, payload, site;
};

enum Dtype : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// One call. Every operation reads `scale * (own + sum of messages)` and writes `out` and/or `y`.
struct Job {
  const Row* rows = nullptr;
  int64_t num_rows = 0;
  int bits = 0;
  int64_t bucket = 0;
  const void* own = nullptr; // null: zeros
  Dtype own_dtype = kFloat32;
  const uint8_t* const* messages = nullptr;
  int64_t num_messages = 0;
  float scale = 1.0f;
  uint8_t* out = nullptr; // the message that is written; null: none
  void* y = nullptr;      // null: none
  Dtype y_dtype = kFloat32;
  bool add = false; // decode only: y += scale * v
  uint64_t key = 0;
  bool nearest = false;
};

// Minimum and maximum of the buckets of a row too wide for one block, found piece by piece; then their scales.
struct Wide {
  int32_t* low_key;  // ordered keys of the minima, merged atomically
  int32_t* high_key; // and of the maxima
  float* low;
  float* unit;
  float* inverse;
};

struct FloatKernels;
struct SparseKernels;

struct Kernels {
  const char* level;
  const FloatKernels* floats;
  const SparseKernels* sparse;
  // Blocks [begin, end) of all rows that are not wide, in table order.
  void (*encode_blocks)(const Job&, int64_t begin, int64_t end);
  // A wide row: extrema of the pieces [begin, end) of kLoaded elements, then all scales, then codes of such pieces.
  void (*wide_extrema)(const Job&, const Row&, const Wide&, int64_t begin, int64_t end);
  void (*wide_scales)(const Job&, const Row&, const Wide&);
  void (*wide_codes)(const Job&, const Row&, const Wide&, int64_t begin, int64_t end);
  // Tiles [begin, end) of kTile elements of all rows, in table order.
  void (*decode_tiles)(const Job&, int64_t begin, int64_t end);
  void (*sum_tiles)(const Job&, int64_t begin, int64_t end);
  // Partial checksum of the 32-bit words [begin, end).
  uint64_t (*checksum)(const uint8_t* message, int64_t begin, int64_t end);
};

// Everything below has internal linkage: each level compiles its own copy.
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t align64(int64_t n) { return ceil_div(n, 64) * 64; }

inline int64_t num_buckets(int64_t numel, int64_t bucket) {
  return bucket >= numel ? (numel > 0) : ceil_div(numel, bucket);
}

inline int64_t codes_at(int64_t numel, int64_t bucket) { return align64(8 * num_buckets(numel, bucket)); }

// How the rows of one job are cut into blocks: multiples of the grain, near a tile, or a single grain or row where that
// still fits a cache; 0 blocks means the row is wide.
struct Blocks {
  bool direct;   // values are encoded where they are: neither converted nor summed first
  int64_t limit; // the largest block
  int64_t size;  // elements of a block of a long row; 0 if one grain is over the limit

  explicit Blocks(const Job& job) {
    direct = job.own && job.own_dtype == kFloat32 && job.num_messages == 0 && job.scale == 1.0f;
    limit = direct ? kDirect : kLoaded;
    size = 0;
    if (job.bucket > limit) return;
    int64_t twos = 1;
    while (twos < kGroup && job.bucket % (2 * twos) == 0) twos *= 2;
    const int64_t grain = job.bucket * (kGroup / twos);
    if (grain <= limit) size = grain >= kTile ? grain : kTile / grain * grain;
  }
  int64_t count(int64_t numel) const {
    if (size) return ceil_div(numel, size);
    return numel == 0 ? 0 : numel <= limit;
  }
  bool wide(int64_t numel) const { return !size && numel > limit; }
};

} // namespace
} // namespace thinwire
