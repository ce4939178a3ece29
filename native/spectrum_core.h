// The arguments of the kernels of spectra. Included after sparse_core.h.
#pragma once
#include "sparse_core.h"

namespace thinwire {

constexpr int64_t kLeastBlock = 64, kMostBlock = 16384;
constexpr int64_t kTogether = 16; // blocks of one piece of work, transformed a vector's lanes at a time

// Blocks of `block` elements, a power of two, of a span that is completed with zeros. Each has block / 2 + 1 components,
// numbered through all blocks; the transform is orthonormal.
struct Blocked {
  Span span; // of what is transformed, or of what is written
  int64_t block = kLeastBlock;
  const float* roots = nullptr; // `block` complex numbers exp(-2 pi i k / block)

  int64_t blocks() const { return (span.numel + block - 1) / block; }
  int64_t components() const { return block / 2 + 1; }
  int64_t total() const { return blocks() * components(); }
  int64_t pieces() const { return (blocks() + kTogether - 1) / kTogether; }
  // Bytes of memory that a call of a kernel works in.
  int64_t scratch() const { return 64 + 4 * (32 * block + 16 * kTogether * 4) + 16 * (block / 2 + 64); }
};

// The spectra of all blocks of a small job, and the squares of their magnitudes: three rows a block, of the components and
// some room.
struct Stored {
  float* rows;
  int64_t pitch;

  static int64_t pitch_of(const Blocked& job) { return job.block / 2 + 16; }
  static int64_t bytes(const Blocked& job) { return 64 + 12 * pitch_of(job) * job.blocks(); }
  float* real(int64_t block) const { return rows + 3 * pitch * block; }
  float* imaginary(int64_t block) const { return real(block) + pitch; }
  float* squares(int64_t block) const { return real(block) + 2 * pitch; }
};

// Keys of at least `low` and below `high`, and the number of those from `high` on.
struct Split {
  uint32_t low, high;
  uint32_t* keys; // with room for all
  int64_t used, above; // merged atomically
};

// The components that are chosen: all whose key is above `kth`, and of each block the first `ties` that have it.
struct Chosen {
  uint32_t kth;
  int64_t *above, *ties; // of each block: how many of either there are
  int64_t* start;        // where its components begin
  int32_t* indices;
  float* parts;
};

// A message's components: ascending indices, each with its real and imaginary part.
struct Sent {
  const int32_t* indices;
  const float* parts;
  int64_t count;
};

struct SpectrumKernels {
  // Keys of the squared magnitudes of `count` blocks, `stride` apart.
  void (*sample)(const Blocked&, int64_t stride, int64_t count, uint32_t* keys, void* scratch);
  // Candidates by squared magnitude, a place for each block, and their parts: pieces [begin, end).
  void (*collect)(const Blocked&, Candidates&, float* parts, int64_t begin, int64_t end, void* scratch);
  // The same for a job whose spectra are stored, blocks of pieces [begin, end): storing them, returning whether all are
  // finite; splitting by key; counting what is chosen; writing it.
  bool (*store)(const Blocked&, const Stored&, int64_t begin, int64_t end, void* scratch);
  void (*split)(const Blocked&, const Stored&, Split&, int64_t begin, int64_t end, void* scratch);
  void (*count)(const Blocked&, const Stored&, const Chosen&, int64_t begin, int64_t end);
  void (*choose)(const Blocked&, const Stored&, const Chosen&, int64_t begin, int64_t end, void* scratch);
  // y = scale * signal of the sum of messages, or y += that: pieces [begin, end).
  void (*restore)(const Blocked&, const Sent*, int64_t messages, float scale, bool add, int64_t begin, int64_t end,
                  void* scratch);
};

} // namespace thinwire
