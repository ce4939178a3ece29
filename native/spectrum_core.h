// The arguments of the kernels of spectra. Included after sparse_core.h.
#pragma once
#include <cstring>

#include "floats_core.h"
#include "sparse_core.h"

namespace thinwire {

constexpr int64_t kLeastBlock = 64, kMostBlock = 16384;

constexpr int64_t kGroupElements = 2048; // of a group, at least
constexpr int64_t kOneIn = 8;            // groups of which one is sampled

// Blocks of `block` elements, a power of two, of a span that is completed with zeros. Each has block / 2 + 1 components,
// numbered through all blocks; the transform is orthonormal. Groups of whole blocks are what threads share.
struct Blocked {
  Span span; // of what is transformed, or of what is written
  int64_t block = kLeastBlock;
  const float* roots = nullptr; // exp(-2 pi i k / block): `block` real parts, then the imaginary ones

  int64_t blocks() const { return (span.numel + block - 1) / block; }
  int64_t components() const { return block / 2 + 1; }
  int64_t total() const { return blocks() * components(); }
  // Blocks of a group; the last may have fewer.
  int64_t group() const { return block < kGroupElements ? kGroupElements / block : 1; }
  int64_t groups() const { return (blocks() + group() - 1) / group(); }
  int64_t components_of(int64_t group) const {
    const int64_t all = this->group() * components(), rest = total() - group * all;
    return rest < all ? rest : all;
  }
  // Which group is the sample's i-th. They are not all equally far apart: gradients have periods, of rows of a matrix
  // for instance.
  int64_t sampled(int64_t i) const { return i * kOneIn + i * 5 % kOneIn; }
};

// The components of groups, each with a row of their real parts and one of their imaginary parts. Rows have room for a
// vector behind the last component, and a length that is no power of two, so that they do not share places in caches.
struct GroupRows {
  float* at;
  int64_t pitch;

  static int64_t pitch_of(const Blocked& job) { return (job.group() * job.components() + 31) / 16 * 16; }
  float* real(int64_t row) const { return at + 2 * pitch * row; }
  float* imaginary(int64_t row) const { return real(row) + pitch; }
};

// Components, each with a key that orders as its squared magnitude, as that of an element does.
struct Components {
  uint32_t *keys, *indices;
  float *real, *imaginary;

  static constexpr int64_t kBytes = 16; // of each
  // With room for so many in four parts of memory.
  static Components in(void* memory, int64_t room) {
    uint32_t* const words = static_cast<uint32_t*>(memory);
    float* const floats = static_cast<float*>(memory);
    return {words, words + room, floats + 2 * room, floats + 3 * room};
  }
  Components operator+(int64_t at) const { return {keys + at, indices + at, real + at, imaginary + at}; }
  void copy(const Components& from, int64_t n) const {
    std::memcpy(keys, from.keys, 4 * n), std::memcpy(indices, from.indices, 4 * n);
    std::memcpy(real, from.real, 4 * n), std::memcpy(imaginary, from.imaginary, 4 * n);
  }
};

// Which components are the largest: all whose key is above `kth`, and of each group the first `ties` that have it.
// Candidates are those whose key is at least `least`, group by group, each group's at a place of its own; those that do
// not fit into `capacity` are only counted.
struct Largest {
  uint32_t least, kth;
  int64_t capacity;
  Components candidates;
  Place* places;     // of each group, as the next two
  int64_t* ties;
  int64_t* start;    // where its components begin
  int64_t used;      // merged atomically, as the next two
  int32_t nonfinite; // whether a key is that of Inf or NaN
  uint32_t top;      // key of the largest of the chosen components' parts
  int32_t* indices;  // of what is chosen
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
  // Rows of the sampled groups [begin, end), and how many of their components have which key, by its first 11 bits.
  void (*sample)(const Blocked&, const GroupRows&, int32_t* counts, int64_t begin, int64_t end, void* scratch);
  // Candidates of groups [begin, end), of which the sample's rows are there.
  void (*collect)(const Blocked&, const GroupRows&, Largest&, int64_t begin, int64_t end, void* scratch);
  // The largest of these candidates.
  void (*choose)(const Blocked&, Largest&, int64_t begin, int64_t end, void* scratch);
  // y = scale * signal of the sum of messages, or y += that: blocks [begin, end). `next` has room for a number of each.
  void (*restore)(const Blocked&, const Sent*, int64_t messages, float scale, bool add, int64_t begin, int64_t end,
                  int64_t* next, void* scratch);
};

} // namespace thinwire
