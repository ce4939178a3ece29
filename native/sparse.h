// Sparse selection: keys, candidates, histograms. Included inside a level's namespace.

static inline uint32_t key_of(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  bits &= 0x7FFFFFFF;
  return bits < kNanKey ? bits : kNanKey;
}

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
