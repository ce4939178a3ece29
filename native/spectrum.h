// Spectra of blocks: their largest components, and values again.
#pragma once
#include "floats.h"
#include "sparse.h"

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

#if defined(THINWIRE_LEVEL)

namespace THINWIRE_LEVEL {
namespace {

#include "fourier.h"

// Keys of components.
static inline Words keys_of(Floats real, Floats imaginary) {
  return least(bits_of<Words>(real * real + imaginary * imaginary) & 0x7FFFFFFF, splat(kNanKey));
}

// Appends those of n components that have a key of at least `least`, whose indices count from `first`. There is room for
// a vector more than n of either. Returns their number.
static inline int64_t compact(const float* real, const float* imaginary, int64_t n, uint32_t least, uint32_t first,
                              const Components& to, Words& seen) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats re = load<Floats>(real + i), im = load<Floats>(imaginary + i);
    const Words key = keys_of(re, im);
    const uint32_t inside = n - i < kLanes ? (1u << (n - i)) - 1 : (1u << kLanes) - 1;
#if defined(__AVX512F__)
    const __mmask16 is = _mm512_mask_cmpge_epi32_mask((__mmask16)inside, (__m512i)key, _mm512_set1_epi32((int)least));
    seen |= (Words)_mm512_maskz_mov_epi32((__mmask16)inside, (__m512i)(key + 0x00800000));
    const Words index = lane_numbers() + (first + (uint32_t)i);
    _mm512_storeu_si512(to.keys + found, _mm512_maskz_compress_epi32(is, (__m512i)key));
    _mm512_storeu_si512(to.indices + found, _mm512_maskz_compress_epi32(is, (__m512i)index));
    _mm512_storeu_ps(to.real + found, _mm512_maskz_compress_ps(is, (__m512)re));
    _mm512_storeu_ps(to.imaginary + found, _mm512_maskz_compress_ps(is, (__m512)im));
    found += __builtin_popcount(is);
#else
    if (inside + 1 == 1u << kLanes) {
      seen |= key + 0x00800000;
    } else {
      for (int j = 0; inside >> j; j++) seen |= splat(key[j] + 0x00800000);
    }
    for (uint32_t is = lanes_above(key, splat(least - 1)) & inside; is; is &= is - 1, found++) {
      const int j = __builtin_ctz(is);
      to.keys[found] = key[j], to.indices[found] = first + (uint32_t)(i + j);
      to.real[found] = real[i + j], to.imaginary[found] = imaginary[i + j];
    }
#endif
  }
  return found;
}

// Appends what is chosen of n candidates: those whose key is above `kth`, and the first `ties` that have it. Returns
// their number.
static inline int64_t choose(const Components& from, int64_t n, uint32_t kth, int64_t ties, int32_t* indices,
                             float* parts) {
  int64_t chosen = 0, i = 0;
#if defined(__AVX512F__)
  for (; !ties && i < n; i += 16) {
    const __mmask16 inside = n - i < 16 ? (__mmask16)((1u << (n - i)) - 1) : (__mmask16)0xFFFF;
    const __m512i key = _mm512_maskz_loadu_epi32(inside, from.keys + i);
    const __mmask16 is = _mm512_mask_cmpgt_epi32_mask(inside, key, _mm512_set1_epi32((int)kth));
    const __m512i index = _mm512_maskz_loadu_epi32(is, from.indices + i);
    const Floats re = (Floats)_mm512_maskz_compress_ps(is, _mm512_maskz_loadu_ps(is, from.real + i));
    const Floats im = (Floats)_mm512_maskz_compress_ps(is, _mm512_maskz_loadu_ps(is, from.imaginary + i));
    _mm512_storeu_si512(indices + chosen, _mm512_maskz_compress_epi32(is, index));
    store_pairs<16>(parts + 2 * chosen, Lanes<16>::Complex{re, im});
    chosen += __builtin_popcount(is);
  }
#endif
  for (; i < n; i++) {
    const bool tie = from.keys[i] == kth && ties > 0;
    indices[chosen] = (int32_t)from.indices[i];
    parts[2 * chosen] = from.real[i], parts[2 * chosen + 1] = from.imaginary[i];
    chosen += from.keys[i] > kth || tie, ties -= tie;
  }
  return chosen;
}

// The scratch memory of a call: a transform, one block's values, a group's components, and what is chosen of them.
struct Spectra {
  const Fourier fourier;
  const int64_t half;
  float* const block;
  const GroupRows rows;
  const Components found;
  float* const parts;

  Spectra(const Blocked& job, void* scratch)
      : fourier(job.block, job.roots, scratch), half(job.block / 2),
        block(reinterpret_cast<float*>(static_cast<char*>(scratch) + Fourier::bytes(job.block))),
        rows{block + job.block, GroupRows::pitch_of(job)}, found(Components::in(rows.real(1), rows.pitch)),
        parts(rows.real(3)) {}

  // Writes the components of a group into a row.
  void analyze(const Blocked& job, int64_t group, const GroupRows& to, int64_t row) const {
    const int64_t first = group * job.group(), last = first + job.group(), blocks = job.blocks();
    float *re = to.real(row), *im = to.imaginary(row);
    for (int64_t b = first; b < last && b < blocks; b++, re += half + 1, im += half + 1) {
      const int64_t at = b * job.block, start = job.span.start + at;
      const int64_t n = job.span.numel - at < job.block ? job.span.numel - at : job.block;
      const float* x = static_cast<const float*>(job.span.x) + start;
      if (n < job.block || job.span.dtype != kFloat32) {
        read_floats(job.span.x, job.span.dtype, start, n, block);
        std::memset(block + n, 0, 4 * (job.block - n));
        x = block;
      }
      fourier.analyze(x, re, im);
    }
  }

  // Sets a block of y to the values of the scratch memory's row, or adds them.
  void synthesise(const Blocked& job, int64_t number, float scale, bool add) const {
    void* const y = const_cast<void*>(job.span.x);
    const int64_t at = number * job.block, start = job.span.start + at;
    const int64_t n = job.span.numel - at < job.block ? job.span.numel - at : job.block;
    const bool direct = n == job.block && job.span.dtype == kFloat32 && !add;
    fourier.synthesise(rows.real(0), rows.imaginary(0), scale, direct ? static_cast<float*>(y) + start : block);
    if (direct) return;
    if (add) {
      float* const before = rows.real(0);
      read_floats(y, job.span.dtype, start, n, before);
      for (int64_t i = 0; i < n; i++) block[i] += before[i];
    }
    write_floats(block, n, y, job.span.dtype, start);
  }
};

static int64_t scratch_bytes(const Blocked& job) {
  return Fourier::bytes(job.block) + 4 * (job.block + 8 * GroupRows::pitch_of(job));
}

static void sample_spectra(const Blocked& job, const GroupRows& stored, int32_t* counts, int64_t begin, int64_t end,
                           void* scratch) {
  const Spectra s(job, scratch);
  int32_t own[kBins] = {};
  alignas(64) uint32_t bins[kLanes];
  for (int64_t i = begin; i < end; i++) {
    s.analyze(job, job.sampled(i), stored, i);
    const int64_t n = job.components_of(job.sampled(i));
    const float *re = stored.real(i), *im = stored.imaginary(i);
    for (int64_t k = 0; k + kLanes <= n; k += kLanes) {
      store(bins, keys_of(load<Floats>(re + k), load<Floats>(im + k)) >> 20);
      for (int j = 0; j < kLanes; j++) own[bins[j]]++;
    }
  }
  for (int k = 0; k < kBins; k++) {
    if (own[k]) __atomic_fetch_add(counts + k, own[k], __ATOMIC_RELAXED);
  }
}

static void collect_spectra(const Blocked& job, const GroupRows& stored, Largest& to, int64_t begin, int64_t end,
                            void* scratch) {
  const Spectra s(job, scratch);
  const int64_t width = job.group() * job.components();
  const bool alone = end - begin == job.groups(); // then what is written behind the last candidate harms none
  Words seen = {};
  for (int64_t g = begin; g < end; g++) {
    const int64_t i = g / kOneIn;
    const bool is_stored = job.sampled(i) == g;
    const float *re = is_stored ? stored.real(i) : s.rows.real(0), *im = re + s.rows.pitch;
    if (!is_stored) s.analyze(job, g, s.rows, 0);
    const int64_t n = job.components_of(g);
    const bool direct = alone && to.used + n + kLanes <= to.capacity;
    const Components room = direct ? to.candidates + to.used : s.found;
    const int64_t found = compact(re, im, n, to.least, (uint32_t)(g * width), room, seen);
    const int64_t at = __atomic_fetch_add(&to.used, found, __ATOMIC_RELAXED);
    if (at + found > to.capacity) continue;
    to.places[g] = Place{at, found};
    if (!direct) (to.candidates + at).copy(s.found, found);
  }
  uint32_t bad = 0;
  for (int i = 0; i < kLanes; i++) bad |= seen[i] >> 31;
  if (bad) __atomic_store_n(&to.nonfinite, 1, __ATOMIC_RELAXED);
}

static void choose_components(const Blocked& job, Largest& of, int64_t begin, int64_t end, void* scratch) {
  const Spectra s(job, scratch);
  Ints top = {};
  for (int64_t g = begin; g < end; g++) {
    int32_t* const indices = reinterpret_cast<int32_t*>(s.found.indices);
    const int64_t n =
        choose(of.candidates + of.places[g].at, of.places[g].count, of.kth, of.ties[g], indices, s.parts);
    std::memcpy(of.indices + of.start[g], indices, 4 * n);
    std::memcpy(of.parts + 2 * of.start[g], s.parts, 8 * n);
    int64_t i = 0;
    for (; i + kLanes <= 2 * n; i += kLanes) top = greater_int(top, magnitude(load<Floats>(s.parts + i)));
    for (; i < 2 * n; i++) top = greater_int(top, magnitude(splat(s.parts[i])));
  }
  uint32_t own = 0, before = __atomic_load_n(&of.top, __ATOMIC_RELAXED);
  for (int i = 0; i < kLanes; i++) own = (uint32_t)top[i] > own ? (uint32_t)top[i] : own;
  while (own > before && !__atomic_compare_exchange_n(&of.top, &before, own, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// The number of indices below `bound`.
static inline int64_t count_below(const Sent& message, int64_t bound) {
  int64_t low = 0, high = message.count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    message.indices[middle] < bound ? low = middle + 1 : high = middle;
  }
  return low;
}

static void restore(const Blocked& job, const Sent* messages, int64_t count, float scale, bool add, int64_t begin,
                    int64_t end, int64_t* next, void* scratch) {
  const Spectra s(job, scratch);
  const int64_t width = job.components();
  for (int64_t m = 0; m < count; m++) next[m] = count_below(messages[m], begin * width);
  for (int64_t b = begin; b < end; b++) {
    const int64_t base = b * width;
    float *real = s.rows.real(0), *imaginary = s.rows.imaginary(0);
    for (int64_t k = 0; k < width; k += kLanes) store(real + k, Floats{}), store(imaginary + k, Floats{});
    for (int64_t m = 0; m < count; m++) {
      const Sent& message = messages[m];
      int64_t j = next[m];
      for (; j < message.count && message.indices[j] < base + width; j++) {
        const int64_t at = message.indices[j] - base;
        real[at] += message.parts[2 * j], imaginary[at] += message.parts[2 * j + 1];
      }
      next[m] = j;
    }
    imaginary[0] = imaginary[s.half] = 0.0f; // those of real values
    s.synthesise(job, b, scale, add);
  }
}

const SpectrumKernels spectrum_kernels = {
    scratch_bytes, sample_spectra, collect_spectra, choose_components, restore,
};

} // namespace
} // namespace THINWIRE_LEVEL

#else

namespace {

constexpr int64_t kCachedElements = int64_t(1) << 20; // of a segment whose spectra stay in a cache
constexpr int64_t kCheapness = 64;                    // of a pass over candidates, beside transforms

// Runs work(begin, end, scratch) over `count` parts of a job, with memory for each call, and `extra` bytes behind it. It
// costs as much as transforms of `elements`: threads are not woken for little.
template <class Work>
Status run_spectra(const Machine& machine, const Blocked& job, int64_t count, int64_t elements, int64_t extra,
                   Work work) {
  int32_t failed = 0;
  auto with_memory = [&](int64_t begin, int64_t end) {
    const Memory scratch(machine.kernels->spectrum->scratch_bytes(job) + extra);
    if (scratch.at) return work(begin, end, scratch.at);
    __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
  };
  if (!run(machine, count, elements, with_memory)) return kThreadsFailed;
  return failed ? kNoMemory : kDone;
}

// Counts of the keys of a sample's components, by their first 11 bits.
struct Sample {
  int32_t counts[kBins] = {};
  int64_t groups = 0;

  // Keys that the k-th largest of `total` components is not below, and is below, all but certainly: where it lies in the
  // sample, and so many standard errors more, and a share, because groups differ.
  void guess(int64_t total, int64_t k, uint32_t from, double share, uint32_t& low, uint32_t& high) const {
    constexpr int64_t kFewest = 1024;
    low = from, high = kNanKey + 1;
    int64_t num = 0;
    for (int bin = (int)(from >> 20); bin < kBins; bin++) num += counts[bin];
    if (num < kFewest) return;
    const double expected = (double)k * (double)num / (double)total;
    const double margin = 4.0 * std::sqrt(expected) + expected * share / std::sqrt((double)groups) + 4.0;
    int64_t first = (int64_t)(expected - margin), last = (int64_t)(expected + margin);
    if (first > 0) high = std::min((uint32_t)(bin_of(counts, first) + 1) << 20, high);
    if (last < num) low = std::min((uint32_t)bin_of(counts, last) << 20, kNanKey);
  }
};

// Writes the k largest candidates, by index.
Status choose_largest(const Machine& machine, const Blocked& job, int64_t k, const Sample& sample, uint32_t* room,
                      Largest& of) {
  const uint32_t* const keys = of.candidates.keys;
  uint32_t low, high;
  sample.guess(of.used, k, of.least, 0.25, low, high); // in groups that differ keys are distributed alike
  int64_t above = 0, ties = 0, n = 0;
  const int64_t between = machine.kernels->sparse->narrow(keys, of.used, low, high, room, above), rank = k - above;
  of.kth = rank > 0 && rank <= between ? kth_of(machine, room, between, low, high, rank, room, ties)
                                       : kth_of(machine, keys, of.used, of.least, kNanKey + 1, k, room, ties);
  for (int64_t g = 0; g < job.groups(); g++) {
    const int32_t *key = reinterpret_cast<const int32_t*>(keys + of.places[g].at), *end = key + of.places[g].count;
    int32_t more = 0, same = 0;
    for (; key < end; key++) more += *key > (int32_t)of.kth, same += *key == (int32_t)of.kth;
    of.ties[g] = std::min<int64_t>(same, ties), ties -= of.ties[g];
    of.start[g] = n, n += more + of.ties[g];
  }
  auto choose = [&](int64_t begin, int64_t end, void* scratch) {
    machine.kernels->spectrum->choose(job, of, begin, end, scratch);
  };
  return run_spectra(machine, job, job.groups(), of.used / kCheapness, 0, choose);
}

// The k components of largest magnitude, and the largest magnitude among their parts; NaN: a component is not finite.
Status pick_components(const Machine& machine, const Blocked& job, int64_t k, int32_t* indices, float* parts,
                       float& top) {
  const int64_t groups = job.groups(), total = job.total(), pitch = GroupRows::pitch_of(job);
  const int64_t numel = job.span.numel;
  Sample counted;
  while (job.sampled(counted.groups) < groups) counted.groups++;
  const Memory sampled(64 + 8 * pitch * counted.groups), table((16 + (int64_t)sizeof(Place)) * groups);
  if (!sampled.at || !table.at) return kNoMemory;
  const GroupRows rows{reinterpret_cast<float*>(((uintptr_t)sampled.at + 63) / 64 * 64), pitch};
  auto sample = [&](int64_t begin, int64_t end, void* scratch) {
    machine.kernels->spectrum->sample(job, rows, counted.counts, begin, end, scratch);
  };
  Status status = run_spectra(machine, job, counted.groups, numel / kOneIn, 0, sample);
  if (status != kDone) return status;
  uint32_t high;
  Largest of{};
  counted.guess(total, k, 0, 1.0, of.least, high);
  of.ties = table.as<int64_t>(), of.start = of.ties + groups, of.places = reinterpret_cast<Place*>(of.start + groups);
  of.indices = indices, of.parts = parts;
  auto collect = [&](int64_t begin, int64_t end, void* scratch) {
    machine.kernels->spectrum->collect(job, rows, of, begin, end, scratch);
  };
  for (of.capacity = of.least ? std::min(total, 2 * k + kGroupElements) : total;; of.capacity = total) {
    const Memory candidates(Components::kBytes * of.capacity), keys(4 * of.capacity);
    if (!candidates.at || !keys.at) return kNoMemory;
    of.candidates = Components::in(candidates.at, of.capacity), of.used = 0;
    status = run_spectra(machine, job, groups, numel, 0, collect);
    if (status != kDone) return status;
    if (of.used < k) {
      of.least = 0; // the sample was unlike the rest
    } else if (of.used <= of.capacity) {
      if (k) status = choose_largest(machine, job, k, counted, keys.as<uint32_t>(), of);
      if (status != kDone) return status;
      break;
    }
  }
  if (of.nonfinite) of.top = 0x7FC00000;
  std::memcpy(&top, &of.top, 4);
  return kDone;
}

Status restore_signal(const Machine& machine, const Blocked& job, const Sent* messages, int64_t count, float scale,
                      bool add) {
  const int64_t room = (machine.kernels->spectrum->scratch_bytes(job) + 7) / 8 * 8, extra = 8 * count + 8;
  auto restore = [&](int64_t begin, int64_t end, void* scratch) {
    int64_t* const next = reinterpret_cast<int64_t*>(static_cast<char*>(scratch) + room);
    machine.kernels->spectrum->restore(job, messages, count, scale, add, begin, end, next, scratch);
  };
  return run_spectra(machine, job, job.blocks(), job.span.numel, extra, restore);
}

// Runs work(machine, row) for all rows that are transformed: those that are much of all, or too large for a cache, by all
// threads together, and then the others by a thread each, the largest first.
template <class Work>
Status for_spectra(const Machine& machine, const SpectrumJob& job, Work work) {
  const Memory memory(8 * job.num_rows);
  int64_t* const others = memory.as<int64_t>();
  if (!others) return kNoMemory;
  int64_t elements = 0, count = 0, next = 0;
  int32_t worst = kDone;
  for (int64_t r = 0; r < job.num_rows; r++) elements += job.transforms(r) ? job.rows[r].numel : 0;
  for (int64_t r = 0; r < job.num_rows; r++) {
    if (!job.transforms(r)) continue;
    if (job.rows[r].numel <= kCachedElements && 4 * job.rows[r].numel <= elements) {
      others[count++] = r;
    } else if (const Status status = work(machine, r); status != kDone) {
      return status;
    }
  }
  std::sort(others, others + count, [&](int64_t a, int64_t b) { return job.rows[a].numel > job.rows[b].numel; });
  auto share = [&](int64_t, int64_t) {
    const Machine alone{machine.kernels, nullptr};
    for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count;) {
      const Status status = work(alone, others[i]);
      if (status != kDone) __atomic_store_n(&worst, status, __ATOMIC_RELAXED);
    }
  };
  if (!run(machine, count, elements, share)) return kThreadsFailed;
  return static_cast<Status>(worst);
}


Status spectrum_encode(const Machine& machine, const SpectrumJob& job) {
  return for_spectra(machine, job, [&](const Machine& threads, int64_t r) {
    const Blocked blocked = job.blocked(r, job.own, job.own_dtype);
    const int64_t k = job.kept[r];
    const Memory memory(4 * k);
    int32_t* const indices = memory.as<int32_t>();
    if (!indices) return kNoMemory;
    float* const parts = job.parts + job.first_part(r);
    const Status status = pick_components(threads, blocked, k, indices, parts, job.tops[r]);
    if (status != kDone) return status;
    uint8_t* const payload = job.out + job.rows[r].payload;
    std::memset(payload, 0, kHeader);
    payload[0] = std::isnan(job.tops[r]);
    put_indices(indices, k, IndexList::shorter(blocked.total(), k), payload + kHeader);
    return kDone;
  });
}

Status spectrum_decode(const Machine& machine, const SpectrumJob& job) {
  return for_spectra(machine, job, [&](const Machine& threads, int64_t r) {
    const Blocked blocked = job.blocked(r, job.y, job.y_dtype);
    const int64_t k = job.kept[r], first = job.first_part(r), width = 4 * k + (int64_t)sizeof(Sent);
    const Memory memory(width * job.num_messages);
    Sent* const sent = memory.as<Sent>();
    if (!sent) return kNoMemory;
    int32_t* const indices = reinterpret_cast<int32_t*>(sent + job.num_messages);
    bool finite = true;
    for (int64_t m = 0; m < job.num_messages; m++) {
      const uint8_t* payload = job.messages[m] + job.rows[r].payload;
      uint32_t nonfinite;
      std::memcpy(&nonfinite, payload, 4);
      finite &= !nonfinite;
      const IndexList list = IndexList::shorter(blocked.total(), k);
      const int64_t count = unpack_indices(payload + kHeader, list, indices + m * k);
      sent[m] = Sent{indices + m * k, job.received[m] + first, count};
    }
    job.tops[r] = finite ? 0.0f : __builtin_nanf("");
    return finite ? restore_signal(threads, blocked, sent, job.num_messages, job.scale, job.add) : kDone;
  });
}

// block, roots, kept, tops
void read_spectra(Arguments& in, SpectrumJob& job) {
  job.block = in.integer(), job.roots = in.address<const float>();
  job.kept = in.address<const int64_t>(), job.tops = in.address<float>();
  in.require(job.block >= kLeastBlock && job.block <= kMostBlock && !(job.block & (job.block - 1)),
             "a block has a power of two of elements, 64 to 16384");
  for (int64_t r = 0; r < job.num_rows && !in.is_bad(); r++) {
    const int64_t total = job.blocked(r, nullptr, kFloat32).total();
    in.require(total <= kMaxIndex, "there are at most 2**31 - 1 components");
    in.require(job.kept[r] >= 0 && job.kept[r] <= total, "of a row's components 0 to all are kept");
  }
}

PyObject* py_spectrum_encode(Arguments& in) {
  SpectrumJob job;
  in.source(job), job.out = in.address<uint8_t>(), job.parts = in.address<float>();
  read_spectra(in, job);
  return run_rows(in, job, [&](const Machine& now) { return spectrum_encode(now, job); });
}

PyObject* py_spectrum_decode(Arguments& in) {
  SpectrumJob job;
  const uint8_t* messages[kMaxMessages];
  const float* received[kMaxMessages];
  in.target(job);
  read_spectra(in, job);
  job.add = in.flag(), job.scale = in.real();
  const Py_ssize_t left = in.num_left();
  job.messages = messages, job.received = received, job.num_messages = left / 2;
  in.require(left % 2 == 0 && job.num_messages <= kMaxMessages, "up to 4096 messages and their parts");
  for (int64_t m = 0; m < job.num_messages && !in.is_bad(); m++) {
    messages[m] = in.address<const uint8_t>(), received[m] = in.address<const float>();
  }
  return run_rows(in, job, [&](const Machine& now) { return spectrum_decode(now, job); });
}

} // namespace

#endif

} // namespace thinwire
