// Spectra of blocks: their largest components, and values again. Included inside a level's namespace.

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
