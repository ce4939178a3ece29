// The interface of the kernels of one instruction-set level. No Python, no torch, no exceptions.
#pragma once
#include <cstdint>

namespace thinwire {

constexpr int64_t kGroup = 128;        // codes are packed in groups of this many
constexpr int64_t kHalf = 64;          // each half of a group takes one 16-bit half of the same random words
constexpr int64_t kTile = 2048;        // elements processed at a time: 8 KB of fp32, well inside the L1 cache
constexpr int64_t kAhead = 2048;       // prefetch distance, in elements: 8 KB, of which the L1 cache holds several
constexpr int64_t kLoaded = 16384;     // elements of a block that is converted or summed first, and stays in L2
constexpr int64_t kDirect = 131072;    // elements of a block that is read in place twice, the second time from L2
constexpr int64_t kMaxBuckets = kTile; // buckets of one block

// The layout of thinwire.kernels.Table.rows.
struct Row {
  int64_t start, numel, index0, payload, site;
};

enum Dtype : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

enum Scheme : int { kMinMax, kMaxAbs, kNorm, kSides, kSign };
enum Rounding : int { kStochastic, kNearest, kShift };

// thinwire.kernels.Format.
struct Format {
  int bits = 4;
  int64_t bucket = kGroup;
  Scheme scheme = kMinMax;
  Rounding rounding = kStochastic;
  int steps = 0;      // units from -a to 0, or from minimum to maximum
  bool midrise = false;
  float clip = 0.0f;

  int num_scales() const { return scheme == kMinMax || scheme == kSides ? 2 : 1; }
  // The code of 0 where there is one scale.
  float offset() const { return scheme == kSign ? 0.5f : midrise ? (1 << (bits - 1)) - 0.5f : (float)steps; }
  float max_code() const { return num_scales() == 2 ? (float)steps : 2.0f * offset(); }
  // Whether values may lie beyond the outermost codes.
  bool saturates() const { return midrise || clip > 0.0f; }
  // Whether scales are computed from sums over a bucket, whose order is fixed.
  bool summed() const { return scheme >= kNorm || clip > 0.0f; }
};

// One call. Every operation reads `scale * (own + sum of messages)`, plus
// `loss_scale * now`, and writes `out`, `y` and `next`, where they are not null.
struct Job {
  const Row* rows = nullptr;
  int64_t num_rows = 0;
  Format form;
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
  const float* now = nullptr; // null: no error feedback
  float* next = nullptr;      // set to (encoded values - decoded values) / loss_scale; may be `now`
  float loss_scale = 1.0f;
};

// Arithmetic on the rows of flat tensors: y = own + by * other, or y = own * by / over.
struct RowJob : Job {
  const void* other = nullptr;
  Dtype other_dtype = kFloat32;
  float by = 1.0f, over = 1.0f;
};

// For the buckets of a row that is too wide for one block: extrema or sums, accumulated piece by piece; then the
// scales.
struct Wide {
  int32_t* low_key;  // ordered keys of the minima, merged atomically
  int32_t* high_key; // and of the maxima
  float* low;
  float* unit;
  float* inverse;
};

struct Kernels {
  const char* level;
  const struct AdamKernels* adam;
  const struct FactorKernels* factors;
  const struct FloatKernels* floats;
  const struct SparseKernels* sparse;
  const struct SpectrumKernels* spectrum;
  // Blocks [begin, end) of all rows that are not wide, in table order.
  void (*encode_blocks)(const Job&, int64_t begin, int64_t end);
  // A wide row: extrema of the pieces [begin, end) of kLoaded elements, or sums of the buckets [begin, end); then all
  // scales, then codes of such pieces.
  void (*wide_extrema)(const Job&, const Row&, const Wide&, int64_t begin, int64_t end);
  void (*wide_sums)(const Job&, const Row&, const Wide&, int64_t begin, int64_t end);
  void (*wide_scales)(const Job&, const Row&, const Wide&);
  void (*wide_codes)(const Job&, const Row&, const Wide&, int64_t begin, int64_t end);
  // Tiles [begin, end) of kTile elements of all rows, in table order.
  void (*decode_tiles)(const Job&, int64_t begin, int64_t end);
  void (*sum_tiles)(const Job&, int64_t begin, int64_t end);
  void (*raw_encode_tiles)(const Job&, int64_t begin, int64_t end);
  void (*raw_decode_tiles)(const Job&, int64_t begin, int64_t end);
  void (*raw_sum_tiles)(const Job&, int64_t begin, int64_t end);
  void (*add_tiles)(const RowJob&, int64_t begin, int64_t end);
  void (*scale_tiles)(const RowJob&, int64_t begin, int64_t end);
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

// The elements of the fewest whole buckets that are whole groups.
inline int64_t grain_of(int64_t bucket) {
  int64_t twos = 1;
  while (twos < kGroup && bucket % (2 * twos) == 0) twos *= 2;
  return bucket * (kGroup / twos);
}

inline int64_t codes_at(int64_t numel, const Format& form) {
  return align64(4 * form.num_scales() * num_buckets(numel, form.bucket));
}

inline bool taken_as_is(const Job& job) {
  return job.own && job.own_dtype == kFloat32 && !job.num_messages && job.scale == 1.0f;
}

// How the rows of one job are cut into blocks: multiples of the grain, near a tile, or a single grain or row where that
// still fits a cache; 0 blocks means the row is wide.
struct Blocks {
  bool direct;   // values are encoded where they are: neither converted nor summed first
  int64_t limit; // the largest block
  int64_t size;  // elements of a block of a long row; 0 if one grain is over the limit

  explicit Blocks(const Job& job) {
    direct = taken_as_is(job) && !job.now && !job.y;
    limit = direct ? kDirect : kLoaded;
    size = 0;
    const int64_t bucket = job.form.bucket;
    if (bucket > limit) return;
    const int64_t grain = grain_of(bucket);
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
