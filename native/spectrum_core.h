// The arguments of the kernels of spectra. Included after sparse_core.h.
#pragma once
#include "floats_core.h"
#include "sparse_core.h"

namespace thinwire {

constexpr int64_t kLeastBlock = 64, kMostBlock = 16384;

// Blocks of `block` elements, a power of two, of a span that is completed with zeros. Each has block / 2 + 1 components,
// numbered through all blocks; the transform is orthonormal.
struct Blocked {
  Span span; // of what is transformed, or of what is written
  int64_t block = kLeastBlock;
  const float* roots = nullptr; // `block` complex numbers exp(-2 pi i k / block)

  int64_t blocks() const { return (span.numel + block - 1) / block; }
  int64_t components() const { return block / 2 + 1; }
  int64_t total() const { return blocks() * components(); }
};

// The components of blocks, each with a row of their real parts and one of their imaginary parts. Rows have room for a
// vector behind the last component, and a length that is no power of two, so that they do not share places in caches.
struct BlockRows {
  float* at;
  int64_t pitch;

  static int64_t pitch_of(const Blocked& job) { return job.block / 2 + 16; }
  float* real(int64_t block) const { return at + 2 * pitch * block; }
  float* imaginary(int64_t block) const { return real(block) + pitch; }
};

// Which components are the largest, by their squared magnitudes: all whose key is above `kth`, and of each block the
// first `ties` that have it. The k-th largest is looked for among keys of at least `low` and below `high`.
struct Largest {
  uint32_t low, high, kth;
  uint32_t* keys;         // between them, with room for all: block by block, each block's at a place of its own
  int64_t used;           // merged atomically, as the next two
  int32_t nonfinite;      // whether a key is that of Inf or NaN
  uint32_t top;           // key of the largest of the components' parts
  Place* places;          // of each block, as the next three
  int64_t *above, *ties;
  int64_t* start;         // where its components begin
  int32_t* indices;
  float* parts;
};

// A message's components: ascending indices, each with its real and imaginary part.
struct Sent {
  const int32_t* indices;
  const float* parts;
  int64_t count;
};

// Segments whose spectra are sent. Those of less than a block are left out.
struct SpectrumJob : Job {
  int64_t block = kLeastBlock;
  const float* roots = nullptr;
  const int64_t* kept = nullptr;           // components of each row that are sent
  float* parts = nullptr;                  // two of each component, row by row: of those that are encoded
  const float* const* received = nullptr;  // and of each message, decoded
  float* tops = nullptr;                   // the largest magnitude of a row's parts; NaN: not all is finite

  bool transforms(int64_t row) const { return rows[row].numel >= block; }
  Blocked blocked(int64_t row, const void* x, Dtype dtype) const {
    return {{x, dtype, rows[row].start, rows[row].numel}, block, roots};
  }
  int64_t first_part(int64_t row) const {
    int64_t before = 0;
    for (int64_t r = 0; r < row; r++) before += 2 * kept[r];
    return before;
  }
};

struct SpectrumKernels {
  // Bytes of memory that each of the others works in.
  int64_t (*scratch_bytes)(const Blocked&);
  // The rows of blocks [begin, end); of a sample, how many components have which key, by its first 11 bits.
  void (*store)(const Blocked&, const BlockRows&, int32_t* counts, int64_t begin, int64_t end, void* scratch);
  // Of such blocks the keys from `low` on and below `high`, and how many are above.
  void (*split)(const Blocked&, const BlockRows&, Largest&, int64_t begin, int64_t end, void* scratch);
  // Of such blocks the largest components.
  void (*choose)(const Blocked&, const BlockRows&, Largest&, int64_t begin, int64_t end, void* scratch);
  // y = scale * signal of the sum of messages, or y += that: blocks [begin, end).
  void (*restore)(const Blocked&, const Sent*, int64_t messages, float scale, bool add, int64_t begin, int64_t end,
                  void* scratch);
};

} // namespace thinwire
