// Sparse selection: keys, candidates, histograms; and packed indices.
#pragma once
#include "dispatch.h"

namespace thinwire {

// Elements [start, start + numel) of x. A key orders as |x|: its bits without the sign, all NaNs alike.
struct Span {
  const void* x = nullptr;
  Dtype dtype = kFloat32;
  int64_t start = 0, numel = 0;
};

constexpr uint32_t kInfiniteKey = 0x7F800000, kNanKey = kInfiniteKey + 1;
constexpr int kBins = 2048;

namespace {

inline uint32_t key_of(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  bits &= 0x7FFFFFFF;
  return bits < kNanKey ? bits : kNanKey;
}

} // namespace

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

#if defined(THINWIRE_LEVEL)

namespace THINWIRE_LEVEL {
namespace {

// Elements [at, at + n), at most a tile, of a span as fp32: where they are, or in `tile`.
static inline const float* span_values(const Span& span, int64_t at, int64_t n, float* tile) {
  if (span.dtype == kFloat32) return (const float*)span.x + span.start + at;
  read_floats(span.x, span.dtype, span.start + at, n, tile);
  return tile;
}

static void sample(const Span& span, int64_t offset, int64_t stride, int64_t count, uint32_t* keys) {
  constexpr int64_t kEarly = 24; // samples that are prefetched
  const int64_t size = size_of(span.dtype);
  const char* first = (const char*)span.x + (span.start + offset) * size;
  for (int64_t j = 0; j < count; j++) {
    if (j + kEarly < count) __builtin_prefetch(first + (j + kEarly) * stride * size, 0, 0);
    float v;
    read_floats(first, span.dtype, j * stride, 1, &v);
    keys[j] = key_of(v);
  }
}

#if !defined(__AVX512F__)
// The lanes, as bits, whose key is above another.
static inline uint32_t lanes_above(Words key, Words other) {
  const Words is = (Words)((Ints)key > (Ints)other);
#if defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps((__m256)is);
#elif defined(__SSE2__)
  return (uint32_t)_mm_movemask_ps((__m128)is);
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; i++) bits |= (is[i] & 1) << i;
  return bits;
#endif
}
#endif

// Appends the elements of x[0, n) with a key of at least `least`; there is room for n and a vector more. Returns their
// number.
static inline int64_t compact(const float* x, int64_t n, uint32_t least, uint32_t index, uint32_t* indices,
                              float* values, const float* ahead, Words& seen) {
  int64_t found = 0, i = 0;
#if defined(__AVX512F__)
  const __m512i bound = _mm512_set1_epi32((int)least);
  __m512i numbers = _mm512_add_epi32(_mm512_set1_epi32((int)index), (__m512i)lane_numbers());
  for (; i + 64 <= n; i += 64) {
    if (ahead) prefetch(ahead + i);
    for (int j = 0; j < 64; j += 16) {
      const __m512i v = _mm512_loadu_si512(x + i + j);
      const __m512i key = _mm512_min_epi32(_mm512_and_si512(v, _mm512_set1_epi32(0x7FFFFFFF)),
                                           _mm512_set1_epi32((int)kNanKey));
      seen |= (Words)key + 0x00800000;
      const __mmask16 is = _mm512_cmpge_epi32_mask(key, bound);
      _mm512_storeu_si512(indices + found, _mm512_maskz_compress_epi32(is, numbers));
      _mm512_storeu_si512(values + found, _mm512_maskz_compress_epi32(is, v));
      found += __builtin_popcount(is);
      numbers = _mm512_add_epi32(numbers, _mm512_set1_epi32(16));
    }
  }
#else
  const Words bound = splat(least - 1);
  for (; i + 32 <= n; i += 32) {
    if (ahead && i % 64 == 0) prefetch(ahead + i);
    uint32_t is = 0;
    for (int j = 0; j < 32; j += kLanes) {
      const Words key = load<Words>(x + i + j) & 0x7FFFFFFF;
      seen |= key + 0x00800000;
      is |= lanes_above(key, bound) << j;
    }
    for (; is; is &= is - 1, found++) {
      const int64_t at = i + __builtin_ctz(is);
      indices[found] = index + (uint32_t)at;
      values[found] = x[at];
    }
  }
#endif
  for (; i < n; i++) {
    const uint32_t key = key_of(x[i]);
    seen |= splat(key) + 0x00800000;
    indices[found] = index + (uint32_t)i, values[found] = x[i];
    found += key >= least;
  }
  return found;
}

static void collect(const Span& span, Candidates& to, int64_t begin, int64_t end) {
  alignas(64) float tile[kTile];
  alignas(64) uint32_t indices[kTile + 16];
  alignas(64) float values[kTile + 16];
  Words seen = {};
  int64_t total = 0;
  for (int64_t b = begin; b < end; b++) {
    const int64_t at = b * kTile, n = span.numel - at < kTile ? span.numel - at : kTile;
    const float* x = span_values(span, at, n, tile);
    const bool fetch = span.dtype == kFloat32 && at + kAhead + kTile <= span.numel;
    const int64_t found = compact(x, n, to.least, (uint32_t)at, indices, values, fetch ? x + kAhead : nullptr, seen);
    total += found;
    to.places[b] = Place{0, 0};
    if (!found) continue;
    const int64_t place = __atomic_fetch_add(&to.used, found, __ATOMIC_RELAXED);
    if (place + found > to.capacity) continue;
    std::memcpy(to.indices + place, indices, 4 * found), std::memcpy(to.values + place, values, 4 * found);
    to.places[b] = Place{place, found};
  }
  uint32_t bad = 0;
  for (int i = 0; i < kLanes; i++) bad |= seen[i] >> 31;
  __atomic_fetch_add(&to.total, total, __ATOMIC_RELAXED);
  if (bad) __atomic_store_n(&to.nonfinite, 1, __ATOMIC_RELAXED);
}

static void histogram(const Span& span, const Histogram& job, int64_t begin, int64_t end) {
  alignas(64) float tile[kTile];
  // Four histograms, so that equal neighbors do not depend on each other; the last bin counts keys outside the range.
  int32_t counts[4][kBins + 1] = {};
  alignas(64) uint32_t bins[kTile];
  const Words limit = splat(job.clamped ? kNanKey : 0x7FFFFFFFu), prefix = splat(job.prefix);
  for (int64_t b = begin; b < end; b++) {
    const int64_t at = b * kTile, n = span.numel - at < kTile ? span.numel - at : kTile;
    const float* x = span_values(span, at, n, tile);
    if (n < kTile) {
      std::memcpy(bins, x, 4 * n);
      for (int64_t i = n; i < kTile; i++) bins[i] = 0;
    }
    const uint32_t* from = n < kTile ? bins : (const uint32_t*)x;
    for (int64_t i = 0; i < kTile; i += kLanes) {
      const Words key = least(load<Words>(from + i) & 0x7FFFFFFF, limit), other = key >> job.above ^ prefix;
      store(bins + i, select(above(other, Words{}), splat((uint32_t)kBins), key >> job.shift & (kBins - 1)));
    }
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
      for (int j = 0; j < 4; j++) counts[j][bins[i + j]]++;
    }
    for (; i < n; i++) counts[0][bins[i]]++;
  }
  for (int k = 0; k < kBins; k++) {
    const int32_t count = counts[0][k] + counts[1][k] + counts[2][k] + counts[3][k];
    if (count) __atomic_fetch_add(job.counts + k, count, __ATOMIC_RELAXED);
  }
}

static int64_t find(const Span& span, uint32_t key, int64_t count, uint32_t* indices) {
  alignas(64) float tile[kTile];
  int64_t found = 0;
  for (int64_t at = 0; at < span.numel && found < count; at += kTile) {
    const int64_t n = span.numel - at < kTile ? span.numel - at : kTile;
    const float* x = span_values(span, at, n, tile);
    for (int64_t i = 0; i < n && found < count; i++) {
      indices[found] = (uint32_t)(at + i);
      found += key_of(x[i]) == key;
    }
  }
  return found;
}

static int64_t narrow(const uint32_t* keys, int64_t n, uint32_t low, uint32_t high, uint32_t* to, int64_t& above) {
  int64_t found = 0, i = 0;
#if defined(__AVX512F__)
  const __m512i from = _mm512_set1_epi32((int)low), end = _mm512_set1_epi32((int)high);
  const __m512i width = _mm512_sub_epi32(end, from);
  for (; i + 16 <= n; i += 16) {
    const __m512i key = _mm512_loadu_si512(keys + i);
    const __mmask16 is = _mm512_cmplt_epu32_mask(_mm512_sub_epi32(key, from), width);
    above += __builtin_popcount(_mm512_cmpge_epu32_mask(key, end));
    _mm512_storeu_si512(to + found, _mm512_maskz_compress_epi32(is, key));
    found += __builtin_popcount(is);
  }
#endif
  for (; i < n; i++) {
    const uint32_t key = keys[i];
    to[found] = key, found += key - low < high - low, above += key >= high;
  }
  return found;
}

static void gather(const Span& span, const int32_t* indices, int64_t count, float* values) {
  for (int64_t j = 0; j < count; j++) read_floats(span.x, span.dtype, span.start + indices[j], 1, values + j);
}

// `values` lies in a message, at any address; null: zeros are written instead of sums.
static void scatter(void* y, Dtype dtype, int64_t start, const int32_t* indices, const void* values, int64_t count,
                    float scale) {
  constexpr int64_t kEarly = 16;
  const int64_t size = size_of(dtype);
  for (int64_t j = 0; j < count; j++) {
    if (j + kEarly < count) __builtin_prefetch((char*)y + (start + indices[j + kEarly]) * size, 1, 0);
    const int64_t at = start + indices[j];
    float v = 0.0f, sent;
    if (values) {
      memcpy(&sent, (const char*)values + j * (int64_t)sizeof(float), sizeof(float));
      read_floats(y, dtype, at, 1, &v);
      v += sent * scale;
    }
    write_floats(&v, 1, y, dtype, at);
  }
}

const SparseKernels sparse_kernels = {sample, collect, histogram, find, narrow, gather, scatter};

} // namespace
} // namespace THINWIRE_LEVEL

#else

namespace {

constexpr int64_t kCrowd = 1 << 19; // candidates in excess of twice k for which a list is still faster

bool collect(const Machine& machine, const Span& span, Candidates& to) {
  to.used = to.total = 0, to.nonfinite = 0;
  auto work = [&](int64_t begin, int64_t end) { machine.kernels->sparse->collect(span, to, begin, end); };
  return run(machine, ceil_div(span.numel, kTile), span.numel, work);
}

bool count_bins(const Machine& machine, const Span& span, const Histogram& job) {
  std::memset(job.counts, 0, kBins * sizeof(int32_t));
  auto work = [&](int64_t begin, int64_t end) { machine.kernels->sparse->histogram(span, job, begin, end); };
  return run(machine, ceil_div(span.numel, kTile), span.numel, work);
}

// The bin in which the k-th largest lies; `k` becomes its rank inside.
int bin_of(const int32_t* counts, int64_t& k) {
  int bin = kBins - 1;
  for (; bin > 0 && counts[bin] < k; bin--) k -= counts[bin];
  return bin;
}

template <class Visit>
void for_candidates(const Candidates& from, int64_t blocks, Visit visit) {
  for (int64_t b = 0; b < blocks; b++) {
    const Place place = from.places[b];
    for (int64_t j = place.at; j < place.at + place.count; j++) visit(from.indices[j], from.values[j]);
  }
}

// The rank-th largest of n keys of at least `low` and below `high`, and how many of those that equal it are among the
// `rank`. `room` is for n keys, and may be `keys` itself.
uint32_t kth_of(const Machine& machine, const uint32_t* keys, int64_t n, uint32_t low, uint32_t high, int64_t rank,
                uint32_t* room, int64_t& ties) {
  int shift = 0;
  while ((high - 1 - low) >> shift >= (uint32_t)kBins) shift++;
  int32_t counts[kBins] = {};
  for (int64_t i = 0; i < n; i++) counts[(keys[i] - low) >> shift]++;
  const uint32_t bin = (uint32_t)bin_of(counts, rank);
  const uint32_t first = low + (bin << shift), last = std::min(first + (1u << shift), high);
  int64_t above = 0;
  const int64_t num = machine.kernels->sparse->narrow(keys, n, first, last, room, above);
  std::nth_element(room, room + (rank - 1), room + num, std::greater<uint32_t>());
  const uint32_t kth = room[rank - 1];
  ties = rank;
  for (int64_t i = 0; i < num; i++) ties -= room[i] > kth;
  return kth;
}

// The key of the k-th largest candidate, as above.
uint32_t kth_key(const Machine& machine, const Candidates& from, int64_t blocks, int64_t k, uint32_t* keys,
                 int64_t& ties) {
  uint32_t most = from.least;
  int64_t n = 0;
  for_candidates(from, blocks, [&](uint32_t, float v) { keys[n] = key_of(v), most = std::max(most, keys[n]), n++; });
  return kth_of(machine, keys, n, from.least, most + 1, k, keys, ties);
}

// Writes the candidates above `kth`, and the first `ties` of those that have it.
int64_t emit(const Candidates& from, int64_t blocks, uint32_t kth, int64_t ties, int64_t k, Picked& to) {
  int64_t n = 0;
  for_candidates(from, blocks, [&](uint32_t index, float v) {
    const uint32_t key = key_of(v);
    const bool tie = key == kth && ties > 0;
    if (n < k) to.indices[n] = (int32_t)index, to.values[n] = v;
    ties -= tie, n += (key > kth) | tie;
  });
  return n;
}

// Writes the k largest candidates, or all if they are fewer.
void emit_largest(const Machine& machine, const Candidates& from, int64_t blocks, int64_t k, uint32_t* keys,
                  Picked& to) {
  uint32_t kth = 0;
  int64_t ties = 0;
  if (from.total > k) kth = kth_key(machine, from, blocks, k, keys, ties);
  to.count = emit(from, blocks, kth, ties, k, to);
}

// Candidates and the first `ties` elements with the key `tied`, by index.
Status emit_with_ties(const Machine& machine, const Span& span, const Candidates& from, int64_t blocks, uint32_t tied,
                      int64_t ties, Picked& to) {
  const Memory memory(4 * (ties + 1));
  uint32_t* const found = memory.as<uint32_t>();
  if (!found) return kNoMemory;
  const int64_t count = machine.kernels->sparse->find(span, tied, ties, found);
  const float* const x = static_cast<const float*>(span.x) + span.start;
  int64_t n = 0, t = 0;
  const auto put_ties = [&](uint32_t before) {
    for (; t < count && found[t] < before; t++, n++) {
      to.indices[n] = (int32_t)found[t];
      if (span.dtype == kFloat32) to.values[n] = x[found[t]];
    }
  };
  for_candidates(from, blocks, [&](uint32_t index, float v) {
    put_ties(index);
    to.indices[n] = (int32_t)index, to.values[n] = v, n++;
  });
  put_ties(UINT32_MAX);
  if (span.dtype != kFloat32) machine.kernels->sparse->gather(span, to.indices, n, to.values);
  to.count = n;
  return kDone;
}

// The exact k largest, where candidates were too few or too many. A histogram yields the eighth of an octave in which
// the k-th largest lies; if many candidates are in it, two more yield its key.
Status pick_by_histogram(const Machine& machine, const Span& span, int64_t k, Place* places, Picked& to) {
  const int64_t blocks = ceil_div(span.numel, kTile);
  int32_t counts[kBins];
  int64_t rank = k;
  uint32_t prefix = 0;
  int above = 31;
  for (const int shift : {20, 9, 0}) {
    if (!count_bins(machine, span, Histogram{shift, above, prefix, true, counts})) return kThreadsFailed;
    const int bin = bin_of(counts, rank);
    prefix = prefix << (above - shift) | ((uint32_t)bin & ((1u << (above - shift)) - 1)), above = shift;
    const int64_t reach = k - rank + counts[bin];
    if (!shift || reach > 2 * k + kCrowd || !prefix) continue;
    const Memory memory(12 * reach);
    uint32_t* const indices = memory.as<uint32_t>();
    if (!indices) return kNoMemory;
    Candidates all{prefix << shift, reach, indices, memory.as<float>() + reach, places, 0, 0, 0};
    if (!collect(machine, span, all)) return kThreadsFailed;
    return emit_largest(machine, all, blocks, k, indices + 2 * reach, to), kDone;
  }
  const int64_t greater = k - rank;
  const Memory memory(8 * greater);
  if (!memory.at) return kNoMemory;
  Candidates all{prefix + 1, greater, memory.as<uint32_t>(), memory.as<float>() + greater, places, 0, 0, 0};
  if (!collect(machine, span, all)) return kThreadsFailed;
  return emit_with_ties(machine, span, all, blocks, prefix, rank, to);
}


Status pick(const Machine& machine, const Span& span, const Pick& job, Picked& to) {
  const int64_t k = job.k, blocks = ceil_div(span.numel, kTile);
  to.count = to.total = 0, to.finite = true;
  if (!span.numel) return kDone;
  uint32_t least = job.least;
  bool partial = job.partial;
  if (job.rank) {
    const Memory memory(4 * job.num_samples);
    uint32_t* const keys = memory.as<uint32_t>();
    if (!keys) return kNoMemory;
    machine.kernels->sparse->sample(span, job.offset, job.stride, job.num_samples, keys);
    std::nth_element(keys, keys + (job.rank - 1), keys + job.num_samples, std::greater<uint32_t>());
    partial = job.sampled && keys[job.rank - 1] > 0;
    least = std::max(keys[job.rank - 1], least);
  }
  const int64_t capacity = k ? std::min(span.numel, k + k / 2 + 65536) : 0;
  const Memory memory(12 * capacity), table(blocks * (int64_t)sizeof(Place));
  if (!memory.at || !table.at) return kNoMemory;
  uint32_t* const indices = memory.as<uint32_t>();
  uint32_t* const keys = indices + 2 * capacity;
  Candidates some{k || job.partial ? least : kNanKey + 1, capacity, indices, memory.as<float>() + capacity,
                  table.as<Place>(), 0, 0, 0};
  if (!collect(machine, span, some)) return kThreadsFailed;
  to.finite = !some.nonfinite, to.total = some.total;
  if (!k) return kDone;
  if (some.total < k && !partial) {
    if (least == 1) return emit_with_ties(machine, span, some, blocks, 0, k - some.total, to); // the rest is zeros
    return pick_by_histogram(machine, span, k, table.as<Place>(), to);
  }
  if (some.total > capacity) return pick_by_histogram(machine, span, k, table.as<Place>(), to);
  emit_largest(machine, some, blocks, k, keys, to);
  return kDone;
}

bool are_inside(const int32_t* indices, int64_t count, int64_t numel) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; i++) most = std::max(most, (uint32_t)indices[i]);
  return !count || most < numel;
}

void scatter(const Machine& machine, void* y, Dtype dtype, int64_t start, const int32_t* indices, const void* values,
             int64_t count, float scale) {
  auto work = [&](int64_t, int64_t) {
    machine.kernels->sparse->scatter(y, dtype, start, indices, values, count, scale);
  };
  run(machine, 1, count, work);
}

// Writes indices that are known to ascend.
void put_indices(const int32_t* indices, int64_t count, const IndexList& to, uint8_t* bytes) {
  if (to.bitmap) {
    std::memset(bytes, 0, to.num_bytes());
    uint64_t bits = 0;
    int32_t word = -1;
    for (int64_t i = 0; i < count; i++) { // without a branch or a load of what has been stored
      const int32_t own = indices[i] >> 6;
      bits = (own == word ? bits : 0) | uint64_t(1) << (indices[i] & 63), word = own;
      std::memcpy(bytes + 8 * (int64_t)word, &bits, 8);
    }
    return;
  }
  uint8_t* offsets = bytes + 4 * to.blocks();
  int64_t i = 0;
  for (int64_t b = 0; b < to.blocks(); b++) {
    const int64_t first = i, end = (b + 1) * kIndexBlock;
    for (; i < count && indices[i] < end; i++) {
      const uint16_t offset = (uint16_t)indices[i];
      std::memcpy(offsets + 2 * i, &offset, 2);
    }
    const uint32_t in = (uint32_t)(i - first);
    std::memcpy(bytes + 4 * b, &in, 4);
  }
  std::memset(offsets + 2 * count, 0, to.num_bytes() - 4 * to.blocks() - 2 * count);
}

// The same of any; false if they do not ascend.
bool pack_indices(const int32_t* indices, int64_t count, const IndexList& to, uint8_t* bytes) {
  bool bad = count && (indices[0] < 0 || indices[count - 1] >= to.numel);
  for (int64_t i = 1; i < count; i++) bad |= indices[i] <= indices[i - 1];
  if (!bad) put_indices(indices, count, to, bytes);
  return !bad;
}

int64_t unpack_indices(const uint8_t* bytes, const IndexList& from, int32_t* indices) {
  int64_t n = 0;
  if (from.bitmap) {
    for (int64_t at = 0; at < from.numel && n < from.k; at += 64) { // the bitmap is padded to 64 bytes
      uint64_t word;
      std::memcpy(&word, bytes + at / 8, 8);
      if (from.numel - at < 64) word &= (uint64_t(1) << (from.numel - at)) - 1;
      for (; word && n < from.k; word &= word - 1) indices[n++] = (int32_t)(at + __builtin_ctzll(word));
    }
    return n;
  }
  const uint8_t* offsets = bytes + 4 * from.blocks();
  int64_t last = -1, taken = 0;
  for (int64_t b = 0; b < from.blocks() && taken < from.k; b++) {
    uint32_t in;
    std::memcpy(&in, bytes + 4 * b, 4);
    const int64_t end = std::min<int64_t>(from.k, taken + in);
    for (; taken < end; taken++) {
      uint16_t offset;
      std::memcpy(&offset, offsets + 2 * taken, 2);
      const int64_t index = b * kIndexBlock + offset;
      indices[n] = (int32_t)index;
      n += index > last && index < from.numel; // others were not written by pack_indices
      last = std::max(last, index);
    }
  }
  return n;
}

constexpr int64_t kMaxIndex = INT32_MAX;

// x, dtype, start, numel
Span read_span(Arguments& in) {
  Span span;
  span.x = in.address<const void>(), span.dtype = in.dtype();
  span.start = in.integer(), span.numel = in.integer();
  in.require(span.start >= 0 && span.numel >= 0 && span.numel <= kMaxIndex, "a span has 0 to 2**31 - 1 elements");
  return span;
}

// pick(x, dtype, start, numel, k, least, partial, sampled, offset, stride, num_samples, rank, indices, values)
// -> (picked, that reached the threshold, finite)
PyObject* py_pick(Arguments& in) {
  const Span span = read_span(in);
  Pick job;
  job.k = in.integer();
  const int64_t least = in.integer();
  job.least = static_cast<uint32_t>(least);
  job.partial = in.flag(), job.sampled = in.flag();
  job.offset = in.integer(), job.stride = in.integer(), job.num_samples = in.integer(), job.rank = in.integer();
  Picked to = {in.address<int32_t>(), in.address<float>(), 0, 0, true};
  in.require(least >= 1 && least <= kNanKey + 1, "no such key");
  in.require(job.k >= 0 && job.k <= kMaxIndex && (job.k <= span.numel || job.partial), "k is 0 to numel");
  in.require(job.rank >= 0 && job.rank <= job.num_samples && job.num_samples <= span.numel,
             "rank is within the sample");
  in.require(!job.num_samples || (job.offset >= 0 && job.stride >= 1 && job.stride <= span.numel &&
                                  job.offset + (job.num_samples - 1) * job.stride < span.numel),
             "the sample is within the span");
  if (in.failed() || !call(span.numel, [&](const Machine& now) { return pick(now, span, job, to); })) return nullptr;
  return Py_BuildValue("(LLN)", static_cast<long long>(to.count), static_cast<long long>(to.total),
                       PyBool_FromLong(to.finite));
}

PyObject* py_abs_histogram(Arguments& in) {
  const Span span = read_span(in);
  int32_t* counts = in.address<int32_t>();
  if (in.failed()) return nullptr;
  const Histogram job{20, 31, 0, false, counts};
  const auto work = [&](const Machine& now) { return count_bins(now, span, job) ? kDone : kThreadsFailed; };
  return none_if(call(span.numel, work));
}

IndexList read_list(Arguments& in) {
  IndexList list;
  list.numel = in.integer(), list.k = in.integer(), list.bitmap = in.flag();
  in.require(list.numel >= 0 && list.numel <= kMaxIndex && list.k >= 0 && list.k <= list.numel, "k is 0 to numel");
  return list;
}

// pack_indices(indices, count, numel, k, bitmap, bytes) -> whether they ascend within 0..numel
PyObject* py_pack_indices(Arguments& in) {
  const int32_t* indices = in.address<const int32_t>();
  const int64_t num = in.integer();
  const IndexList list = read_list(in);
  uint8_t* bytes = in.address<uint8_t>();
  in.require(num >= 0 && num <= list.k, "more than k indices");
  if (in.failed()) return nullptr;
  bool good = false;
  const auto work = [&](const Machine&) { return good = pack_indices(indices, num, list, bytes), kDone; };
  return call(list.bitmap ? list.numel / 8 : num, work) ? PyBool_FromLong(good) : nullptr;
}

// unpack_indices(bytes, numel, k, bitmap, indices) -> how many
PyObject* py_unpack_indices(Arguments& in) {
  const uint8_t* bytes = in.address<const uint8_t>();
  const IndexList list = read_list(in);
  int32_t* indices = in.address<int32_t>();
  if (in.failed()) return nullptr;
  int64_t found = 0;
  const auto work = [&](const Machine&) { return found = unpack_indices(bytes, list, indices), kDone; };
  return call(list.bitmap ? list.numel / 8 : list.k, work) ? PyLong_FromLongLong(found) : nullptr;
}

// sparse_scatter(y, dtype, start, numel, indices, values or 0, count, scale) -> whether all indices were inside
PyObject* py_sparse_scatter(Arguments& in) {
  const Span span = read_span(in);
  const int32_t* indices = in.address<const int32_t>();
  const void* values = in.address<const void>();
  const int64_t num = in.integer();
  const float scale = in.real();
  in.require(num >= 0, "a count is at least 0");
  if (in.failed()) return nullptr;
  bool inside = false;
  const auto work = [&](const Machine& now) {
    inside = are_inside(indices, num, span.numel);
    if (inside) scatter(now, const_cast<void*>(span.x), span.dtype, span.start, indices, values, num, scale);
    return kDone;
  };
  return call(num, work) ? PyBool_FromLong(inside) : nullptr;
}

} // namespace

#endif

} // namespace thinwire
