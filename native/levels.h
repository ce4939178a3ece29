// Learned levels: codes for the nearest of 2^bits values between a bucket's ends. Included inside a level's namespace.

// Values looked up by code, in a register of 16 values if the level has one.
template <bool kFew>
struct Lookup {
  alignas(64) float values[256];
  inline Floats operator()(Words codes) const {
#if defined(__AVX512F__)
    if (kFew) return (Floats)_mm512_permutexvar_ps((__m512i)codes, _mm512_load_ps(values));
    return (Floats)_mm512_i32gather_ps((__m512i)codes, values, 4);
#elif defined(__AVX2__)
    if (kFew) {
      const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(values), (__m256i)codes);
      const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(values + 8), (__m256i)codes);
      return (Floats)_mm256_blendv_ps(low, high, (__m256)(codes << 28)); // by bit 3
    }
    return (Floats)_mm256_i32gather_ps(values, (__m256i)codes, 4);
#else
    Floats found;
    for (int i = 0; i < kLanes; i++) found[i] = values[codes[i]];
    return found;
#endif
  }
};

// The sign bit is set for a NaN: its magnitude is over that of infinity, 0x7F800000.
static inline Words over_infinity(Floats v) { return (bits_of<Words>(v) & 0x7FFFFFFF) + 0x7FFFFF; }

// Minimum and maximum of x[0, n), and whether it holds a NaN.
static inline void measure_bucket(const float* x, int64_t n, float& low, float& high, bool& bad) {
  Floats lows = splat(low), highs = splat(high);
  Words nan = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    const Floats a = load<Floats>(x + i), b = load<Floats>(x + i + kLanes);
    const Floats c = load<Floats>(x + i + 2 * kLanes), d = load<Floats>(x + i + 3 * kLanes);
    lows = lesser(lesser(lesser(a, b), lesser(c, d)), lows);
    highs = greater(greater(greater(a, b), greater(c, d)), highs);
    nan |= (over_infinity(a) | over_infinity(b)) | (over_infinity(c) | over_infinity(d));
  }
  for (; i + kLanes <= n; i += kLanes) {
    const Floats v = load<Floats>(x + i);
    lows = lesser(v, lows), highs = greater(v, highs), nan |= over_infinity(v);
  }
  low = across_lesser(lows), high = across_greater(highs);
  uint32_t any = any_bits(nan >> 31);
  for (; i < n; i++) {
    low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high, any |= x[i] != x[i];
  }
  bad |= any != 0;
}

static inline int64_t levels_meta(int bits) { return align64(int64_t(4) << bits); }

struct LevelScratch {
  alignas(64) float tile[kTile];
  alignas(64) float low[kTile], inverse[kTile]; // per element
  alignas(64) uint8_t codes[kTile];
};

// lo, range and 1 / range of a bucket that begins at element `at`.
static void level_scales(const FloatJob& job, const Row& row, int64_t at, int64_t n, LevelScratch& s, float* three) {
  float low = __builtin_inff(), high = -__builtin_inff();
  bool bad = false;
  for (int64_t i = 0; i < n; i += kTile) {
    const int64_t count = n - i < kTile ? n - i : kTile;
    const float* x = (const float*)job.own + row.start + at + i;
    if (job.own_dtype != kFloat32) read_floats(job.own, job.own_dtype, row.start + at + i, count, s.tile), x = s.tile;
    if (job.own_dtype == kFloat32 && at + i + count + kAhead <= row.numel) {
      for (int64_t j = 0; j < count; j += 16) __builtin_prefetch(x + kAhead + j, 0, 3);
    }
    measure_bucket(x, count, low, high, bad);
  }
  low += 0.0f;
  float span = (high + 0.0f) - low;
  bad |= !(span <= 3.402823466e38f);
  const bool flat = bad | (span < 0x1p-100f);
  three[2] = flat ? 0.0f : 1.0f / span;
  uint32_t nan = 0x7FC00000;
  if (flat) low = nearest_to_zero(low, high + 0.0f), span = 0.0f;
  if (bad) std::memcpy(&low, &nan, 4), std::memcpy(&span, &nan, 4);
  three[0] = low, three[1] = span;
}

// Codes of a tile whose elements (kEach), or the first of each group, have their lo and factor in scratch: how many of
// the middles lie at or below.
template <bool kFew, bool kEach>
THINWIRE_APART static void level_codes(const float* x, int64_t n, int bits, const Lookup<kFew>& middles,
                                         LevelScratch& s) {
  for (int64_t i = 0; i < n; i += 4 * kLanes) {
    Floats place[4];
    const Floats low = splat(s.low[i / kGroup * kGroup]), inverse = splat(s.inverse[i / kGroup * kGroup]);
    Words code[4] = {};
    for (int v = 0; v < 4; v++) {
      const int64_t at = i + v * kLanes;
      place[v] = kEach ? (load<Floats>(x + at) - load<Floats>(s.low + at)) * load<Floats>(s.inverse + at)
                       : (load<Floats>(x + at) - low) * inverse;
    }
    if (kFew && kLanes < 16) { // without a register of 16 values, comparing with all is faster than searching
      for (int j = 0; j < (1 << bits) - 1; j++) {
        const Floats middle = splat(middles.values[j]);
        for (int v = 0; v < 4; v++) code[v] -= (Words)(place[v] >= middle);
      }
    } else {
      for (uint32_t step = 1u << (bits - 1); step; step >>= 1) {
        for (int v = 0; v < 4; v++) {
          code[v] = add_where(reaches(place[v], middles(code[v] + (step - 1))), code[v], splat(step));
        }
      }
    }
    store_bytes(s.codes + i, code[0], code[1], code[2], code[3]);
  }
}

// Codes blocks [begin, end) of rows. A coder opens a row and returns where its codes go, writes what stands before them,
// measures a bucket that begins at an element, spreads its scales to element i of the tile, makes a tile's codes, and
// then may use them.
template <class Coder>
static void encode_measured(const FloatJob& job, int64_t begin, int64_t end, LevelScratch& s, Coder& coder) {
  const int bits = job.bits;
  const int64_t bucket = job.bucket;
  const bool each = bucket % kGroup != 0;
  int64_t before = 0;
  for (int64_t r = 0; r < job.num_rows && before < end; r++) {
    const Row& row = job.rows[r];
    if (!row.numel) continue;
    const int64_t size = levels_block(row.numel, bucket), count = ceil_div(row.numel, size);
    uint8_t* packed = coder.open(row);
    for (int64_t b = begin > before ? begin - before : 0; b < count && before + b < end; b++) {
      const int64_t first = b * size, last = first + size < row.numel ? first + size : row.numel;
      if (b == 0) coder.write_head();
      int64_t measured = first;
      for (int64_t at = first; at < last; at += kTile) {
        const int64_t n = last - at < kTile ? last - at : kTile;
        for (int64_t i = 0; i < n;) { // the buckets that begin in this tile are measured, and spread over it
          const int64_t here = at + i;
          if (here == measured) {
            const int64_t left = row.numel - here, in = left < bucket ? left : bucket;
            coder.measure(row, here, in);
            measured = here + in;
          }
          const int64_t until = measured - at < n ? measured - at : n;
          for (; i < until; i += each ? 1 : kGroup) coder.spread(i);
        }
        const float* x = (const float*)job.own + row.start + at;
        const int64_t groups = ceil_div(n, kGroup), whole = n / kGroup * kGroup;
        if (job.own_dtype != kFloat32 || whole < n) {
          read_floats(job.own, job.own_dtype, row.start + at, n, s.tile), x = s.tile;
          for (int64_t i = n; i < groups * kGroup; i++) s.tile[i] = 0.0f;
          if (each) for (int64_t i = n; i < groups * kGroup; i++) s.low[i] = s.inverse[i] = 0.0f;
        }
        each ? coder.template code<true>(x, groups * kGroup) : coder.template code<false>(x, groups * kGroup);
        std::memset(s.codes + n, 0, groups * kGroup - n);
        coder.finish(row, at, n, x);
        pack(s.codes, groups, bits, packed + at / kGroup * 16 * bits);
      }
      if (last == row.numel) zero_to_64(packed, ceil_div(row.numel, kGroup) * 16 * bits);
    }
    before += count;
  }
}

template <bool kFew>
struct LevelCoder {
  const FloatJob& job;
  LevelScratch& s;
  Lookup<kFew> middles{};
  const float* levels = nullptr;
  uint8_t *payload = nullptr, *scales = nullptr;
  int64_t buckets = 0;
  float three[3] = {};

  uint8_t* open(const Row& row) {
    levels = job.params + ((&row - job.rows) << job.bits);
    for (int j = 0; j + 1 < 1 << job.bits; j++) middles.values[j] = (levels[j] + levels[j + 1]) * 0.5f;
    payload = job.out + row.payload, scales = payload + levels_meta(job.bits);
    buckets = num_buckets(row.numel, job.bucket);
    return scales + align64(8 * buckets);
  }
  void write_head() {
    std::memcpy(payload, levels, int64_t(4) << job.bits);
    zero_to_64(payload, int64_t(4) << job.bits), zero_to_64(scales, 8 * buckets);
  }
  void measure(const Row& row, int64_t at, int64_t n) {
    level_scales(job, row, at, n, s, three);
    const int64_t k = at / job.bucket;
    std::memcpy(scales + 4 * k, three, 4), std::memcpy(scales + 4 * (buckets + k), three + 1, 4);
  }
  void spread(int64_t i) { s.low[i] = three[0], s.inverse[i] = three[2]; }
  template <bool kEach>
  void code(const float* x, int64_t n) {
    level_codes<kFew, kEach>(x, n, job.bits, middles, s);
  }
  void finish(const Row&, int64_t, int64_t, const float*) {}
};

template <bool kFew>
static void levels_encode_as(const FloatJob& job, int64_t begin, int64_t end) {
  LevelScratch s;
  LevelCoder<kFew> coder{job, s};
  encode_measured(job, begin, end, s, coder);
}

static void levels_encode(const FloatJob& job, int64_t begin, int64_t end) {
  job.bits <= 4 ? levels_encode_as<true>(job, begin, end) : levels_encode_as<false>(job, begin, end);
}

template <bool kFew>
struct LevelGroup {
  const uint8_t* packed;
  LevelScratch& s;
  const Lookup<kFew>& levels;
  const int bits;
  int64_t base;
  void read(int64_t i, int64_t) { unpack(packed + i / kGroup * 16 * bits, 1, bits, s.codes), base = i; }
  Floats lanes(int j) const {
    const Floats level = levels(widen_words(s.codes + j));
    return load<Floats>(s.low + base + j) + load<Floats>(s.inverse + base + j) * level;
  }
};

template <bool kAdd, bool kFew>
static void levels_decode_as(const FloatJob& job, int64_t begin, int64_t end) {
  FloatScratch tile;
  LevelScratch s;
  Lookup<kFew> levels;
  decode_groups<kAdd>(job, begin, end, tile, [&](const Row& row, int64_t at, int64_t n) {
    const uint8_t* payload = job.messages[0] + row.payload;
    const uint8_t* scales = payload + levels_meta(job.bits);
    const int64_t buckets = num_buckets(row.numel, job.bucket);
    std::memcpy(levels.values, payload, int64_t(4) << job.bits);
    spread((const float*)scales, job.bucket, at, 0, n, s.low);
    spread((const float*)scales + buckets, job.bucket, at, 0, n, s.inverse);
    const uint8_t* packed = scales + align64(8 * buckets) + at / kGroup * 16 * job.bits;
    return LevelGroup<kFew>{packed, s, levels, job.bits, 0};
  });
}

static void levels_decode(const FloatJob& job, int64_t begin, int64_t end) {
  if (job.bits <= 4) {
    job.add ? levels_decode_as<true, true>(job, begin, end) : levels_decode_as<false, true>(job, begin, end);
  } else {
    job.add ? levels_decode_as<true, false>(job, begin, end) : levels_decode_as<false, false>(job, begin, end);
  }
}
