// Powers of two, range floats, learned levels, integers: element by element. Included inside a level's namespace.

struct FloatScratch {
  alignas(64) float tile[kTile];
  alignas(64) uint8_t low[kGroup], high[kGroup];
};

static inline int64_t sum_lanes(Words v) {
  int64_t sum = 0;
  for (int i = 0; i < kLanes; i++) sum += v[i];
  return sum;
}

// Properties of a tile's values: how many saturated, and in the sign bits whether one is not finite.
struct Seen {
  Words saturated = {}, nonfinite = {};
  void report(Found& found) const {
    const bool bad = any_bits(nonfinite >> 31);
    const int64_t count = any_bits(saturated) ? sum_lanes(saturated) : 0;
    if (count) __atomic_fetch_add(&found.saturated, count, __ATOMIC_RELAXED);
    if (bad) __atomic_store_n(&found.nonfinite, 1, __ATOMIC_RELAXED);
  }
};

static inline Words widen_words(const uint8_t* codes) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32(load<__m128i>(codes));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)codes));
#elif defined(__SSE4_1__)
  return (Words)_mm_cvtepu8_epi32(_mm_cvtsi32_si128(load<int32_t>(codes)));
#else
  Words wide;
  for (int i = 0; i < kLanes; i++) wide[i] = codes[i];
  return wide;
#endif
}

// Calls put(j, four vectors of codes) for the elements j of a group, made by code(bits of values, 16 random bits).
template <bool kRandom, class Code, class Put>
static inline void for_group(const float* x, const Draws& draws, uint32_t counter, Code code, Put put) {
  const Words lanes = lane_numbers();
  for (int j = 0; j < kHalf; j += 4 * kLanes) {
    Words random[4] = {}, a[4], b[4];
    if (kRandom) {
      for (int v = 0; v < 4; v++) random[v] = lanes ^ (counter + j + v * kLanes); // a multiple of 64: xor adds
      draws.words<4>(random);
    }
    for (int v = 0; v < 4; v++) {
      a[v] = code(load<Words>(x + j + v * kLanes), random[v] & 0xFFFF);
      b[v] = code(load<Words>(x + j + v * kLanes + kHalf), random[v] >> 16);
    }
    put(j, a), put(j + kHalf, b);
  }
}

// Calls visit(row, at, n, values) for tiles, their values as fp32.
template <class Visit>
static inline void for_values(const FloatJob& job, int64_t begin, int64_t end, FloatScratch& s, Visit visit) {
  for_tiles(job, begin, end, [&](const Row& row, int64_t at, int64_t n) {
    const float* x = (const float*)job.own + row.start + at;
    if (job.own_dtype != kFloat32) read_floats(job.own, job.own_dtype, row.start + at, n, s.tile), x = s.tile;
    visit(row, at, n, x);
  });
}

// Calls group(values, i, elements, whole) for the groups of a tile; the last may have to be completed with zeros.
template <class Group>
static inline void for_groups(const FloatJob& job, const Row& row, int64_t at, int64_t n, const float* x, Group group) {
  const float* ahead = job.own_dtype == kFloat32 ? ahead_of((const float*)job.own, row, at) : nullptr;
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    if (ahead) prefetch(ahead + i), prefetch(ahead + i + kHalf);
    group(x + i, i, kGroup);
  }
  if (i == n) return;
  alignas(64) float padded[kGroup] = {};
  std::memcpy(padded, x + i, 4 * (n - i));
  group(padded, i, n - i);
}

template <bool kAdd>
static inline void put_value(float* to, Floats v, float scale) {
  store(to, kAdd ? load<Floats>(to) + v * scale : v * scale);
}

// Decodes tiles: value(row, at) gives what reads a group: read(i) before, then lanes(j) as fp32.
template <bool kAdd, class Open>
static inline void decode_groups(const FloatJob& job, int64_t begin, int64_t end, FloatScratch& s, Open open) {
  const float scale = job.scale;
  for_tiles(job, begin, end, [&](const Row& row, int64_t at, int64_t n) {
    const bool direct = job.y_dtype == kFloat32;
    float* to = direct ? (float*)job.y + row.start + at : s.tile;
    if (!direct && kAdd) read_floats(job.y, job.y_dtype, row.start + at, n, to);
    const float* ahead = direct ? ahead_of((const float*)job.y, row, at) : nullptr;
    auto group = open(row, at, n);
    int64_t i = 0;
    for (; i + kGroup <= n; i += kGroup) {
      if (ahead) prefetch(ahead + i), prefetch(ahead + i + kHalf);
      group.read(i, kGroup);
      for (int j = 0; j < kGroup; j += kLanes) put_value<kAdd>(to + i + j, group.lanes(j), scale);
    }
    if (i < n) {
      alignas(64) float padded[kGroup] = {};
      std::memcpy(padded, to + i, 4 * (n - i));
      group.read(i, n - i);
      for (int j = 0; j < kGroup; j += kLanes) put_value<kAdd>(padded + j, group.lanes(j), scale);
      std::memcpy(to + i, padded, 4 * (n - i));
    }
    if (!direct) write_floats(to, n, job.y, job.y_dtype, row.start + at);
  });
}

static inline void zero_to_64(uint8_t* payload, int64_t used) {
  std::memset(payload + used, 0, align64(used) - used);
}

// ---- Natural compression -------------------------------------------------------------------------------------------

// The biased exponent below those that have a code. A shift from a message may be any.
static inline uint32_t natural_zero(int32_t shift) { return 18 + (shift < -18 ? -18 : shift > 109 ? 109 : shift); }

static void natural_encode(const FloatJob& job, int64_t begin, int64_t end) {
  FloatScratch s;
  for_values(job, begin, end, s, [&](const Row& row, int64_t at, int64_t n, const float* x) {
    const Draws draws(job.key, row);
    const Words zero = splat(natural_zero(job.shift));
    uint8_t* codes = job.out + row.payload + kHeader + at;
    Seen seen;
    const auto code = [&](Words w, Words random) {
      const Words size = w & 0x7FFFFFFF, bad = size + 0x00800000;
      const Words steps = ((size + (random << 7) + 64) >> 23) - zero;
      seen.saturated += ((127 - steps) >> 31) - (bad >> 31), seen.nonfinite |= bad;
      const Words step = least(steps, splat(127u));
      return keep(above(step, Words{}), step | (w >> 24 & 0x80));
    };
    for_groups(job, row, at, n, x, [&](const float* from, int64_t i, int64_t count) {
      uint8_t* to = count == kGroup ? codes + i : s.low;
      const auto put = [&](int j, Words* c) { store_bytes(to + j, c[0], c[1], c[2], c[3]); };
      for_group<true>(from, draws, (uint32_t)((row.index0 + at + i) / 2), code, put);
      if (count < kGroup) std::memcpy(codes + i, s.low, count);
    });
    if (at + n == row.numel) zero_to_64(job.out + row.payload + kHeader, row.numel);
    seen.report(job.found[&row - job.rows]);
  });
}

struct NaturalGroup {
  const uint8_t *codes, *from;
  uint8_t* spare;
  Words poison; // all bits of a NaN where the row is not finite
  Words zero;
  void read(int64_t i, int64_t n) {
    from = codes + i;
    if (n < kGroup) std::memcpy(spare, from, n), from = spare;
  }
  Floats lanes(int j) const {
    const Words c = widen_words(from + j), steps = c & 127;
    return bits_of<Floats>(keep(above(steps, Words{}), ((steps + zero) << 23) | (c >> 7 << 31)) | poison);
  }
};

static inline uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

template <bool kAdd>
static void natural_decode_as(const FloatJob& job, int64_t begin, int64_t end) {
  FloatScratch s = {};
  decode_groups<kAdd>(job, begin, end, s, [&](const Row& row, int64_t at, int64_t) {
    const uint8_t* payload = job.messages[0] + row.payload;
    const Words zero = splat(natural_zero((int32_t)word_at(payload + 8)));
    return NaturalGroup{payload + kHeader + at, nullptr, s.low, splat(word_at(payload) ? 0x7FC00000u : 0u), zero};
  });
}

static void natural_decode(const FloatJob& job, int64_t begin, int64_t end) {
  job.add ? natural_decode_as<true>(job, begin, end) : natural_decode_as<false>(job, begin, end);
}

// ---- Range floats --------------------------------------------------------------------------------------------------

// A row's format, from max and mantissa; an invalid one is replaced by a valid one.
struct RangeFloat {
  bool valid;
  int shift, up, down;
  uint32_t first, positives, largest, smallest, half_smallest, step, half_step;
  float factor;

  RangeFloat(float max, int32_t mantissa, int bits) {
    valid = mantissa >= 0 && mantissa <= 22;
    positives = (1u << (bits - 1)) - 1;
    std::memcpy(&largest, &max, 4);
    const int32_t word = (int32_t)largest;
    const int64_t lowest = valid ? (int64_t)(word >> (23 - mantissa)) + 1 - positives : 0;
    valid = valid && word < 0x7F800000 && lowest >= 1;
    if (!valid) mantissa = 22, largest = 0x3F800000;
    shift = 23 - mantissa;
    first = (largest >> shift) + 1 - positives;
    up = mantissa < 7 ? 7 - mantissa : 0, down = mantissa > 7 ? mantissa - 7 : 0;
    step = (1u << up) >> 1, half_step = 1u << (shift - 1);
    smallest = first << shift;
    float eps;
    std::memcpy(&eps, &smallest, 4);
    const float half = eps * 0.5f;
    std::memcpy(&half_smallest, &half, 4);
    factor = 65536.0f / eps;
    if (!(factor <= kMost)) factor = kMost;
  }
  static constexpr float kMost = 3.402823466e38f;

  template <FloatRounding kRounding>
  inline Words code(Words w, Words random, Seen& seen) const {
    const Words size = w & 0x7FFFFFFF, bad = size + 0x00800000, limit = splat(largest);
    seen.nonfinite |= bad, seen.saturated += ((limit - size) >> 31) - (bad >> 31);
    const Words value = least(size, limit);
    Words c;
    if (kRounding == FloatRounding::kTruncate) {
      c = keep(above(value, splat(smallest - 1)), (value >> shift) - (first - 1));
    } else if (kRounding == FloatRounding::kNearest) { // what rounds to 1 from below the smallest lies above half of it
      const Words steps = least(((value + half_step) >> shift) - (first - 1), splat(positives));
      c = keep(above(value, splat(half_smallest - 1)), most(steps, splat(1u)));
    } else {
      const Words added = ((random << up) >> down) + step;
      const Words steps = least(((value + added) >> shift) - (first - 1), splat(positives));
      const Words one = keep(above(truncate(bits_of<Floats>(value) * factor), random), splat(1u));
      c = select(above(value, splat(smallest - 1)), steps, one);
    }
    c = add_where(negative(w) & above(c, Words{}), c, splat(positives));
    return select(negative(bad), splat(2 * positives + 1), c);
  }
};

template <FloatRounding kRounding>
static void range_encode_as(const FloatJob& job, int64_t begin, int64_t end) {
  FloatScratch s;
  const int bits = job.bits;
  for_values(job, begin, end, s, [&](const Row& row, int64_t at, int64_t n, const float* x) {
    const float* params = job.params + 2 * (&row - job.rows);
    const bool whole = params[1] >= 0 && params[1] <= 22 && params[1] == (float)(int)params[1];
    const RangeFloat form(params[0], whole ? (int)params[1] : -1, bits);
    const Draws draws(job.key, row);
    uint8_t* packed = job.out + row.payload + kHeader + at / kGroup * 16 * bits;
    Seen seen;
    const auto code = [&](Words w, Words random) { return form.code<kRounding>(w, random, seen); };
    for_groups(job, row, at, n, x, [&](const float* from, int64_t i, int64_t) {
      const uint32_t counter = (uint32_t)((row.index0 + at + i) / 2);
      uint8_t* low = bits >= 8 ? packed : s.low;
      if (bits <= 8) {
        const auto put = [&](int j, Words* c) { store_bytes(low + j, c[0], c[1], c[2], c[3]); };
        for_group<kRounding == FloatRounding::kStochastic>(from, draws, counter, code, put);
        if (bits < 8) pack(s.low, 1, bits, packed);
      } else {
        const auto put = [&](int j, Words* c) {
          store_bytes(low + j, c[0] & 255, c[1] & 255, c[2] & 255, c[3] & 255);
          store_bytes(s.high + j, c[0] >> 8, c[1] >> 8, c[2] >> 8, c[3] >> 8);
        };
        for_group<kRounding == FloatRounding::kStochastic>(from, draws, counter, code, put);
        pack(s.high, 1, bits - 8, packed + kGroup);
      }
      if (!form.valid) std::memset(packed, 0, 16 * bits);
      packed += 16 * bits;
    });
    if (at + n == row.numel) zero_to_64(job.out + row.payload + kHeader, ceil_div(row.numel, kGroup) * 16 * bits);
    if (!form.valid) seen.saturated = Words{};
    seen.report(job.found[&row - job.rows]);
  });
}

static void range_encode(const FloatJob& job, int64_t begin, int64_t end) {
  switch (job.rounding) {
  case FloatRounding::kTruncate: return range_encode_as<FloatRounding::kTruncate>(job, begin, end);
  case FloatRounding::kNearest: return range_encode_as<FloatRounding::kNearest>(job, begin, end);
  case FloatRounding::kStochastic: return range_encode_as<FloatRounding::kStochastic>(job, begin, end);
  }
}

template <bool kWide>
struct RangeGroup {
  const uint8_t *packed, *from;
  FloatScratch& s;
  const RangeFloat form;
  const Words poison;
  const int bits;
  void read(int64_t i, int64_t) {
    const uint8_t* group = packed + i / kGroup * 16 * bits;
    from = group;
    if (kWide) {
      unpack(group + kGroup, 1, bits - 8, s.high);
    } else if (bits < 8) {
      unpack(group, 1, bits, s.low), from = s.low;
    }
  }
  Floats lanes(int j) const {
    Words c = widen_words(from + j);
    if (kWide) c |= widen_words(s.high + j) << 8;
    const Words sign = (form.positives - c) & 0x80000000; // set above the positive codes
    const Words steps = add_where(negative(sign), c, splat(0u - form.positives)) + (form.first - 1);
    const Words bits = keep(above(c, Words{}), (steps << form.shift) | sign);
    return bits_of<Floats>(select(above(c, splat(2 * form.positives)), splat(0x7FC00000u), bits) | poison);
  }
};

template <bool kAdd, bool kWide>
static void range_decode_as(const FloatJob& job, int64_t begin, int64_t end) {
  FloatScratch s;
  decode_groups<kAdd>(job, begin, end, s, [&](const Row& row, int64_t at, int64_t) {
    const uint8_t* payload = job.messages[0] + row.payload;
    float max;
    std::memcpy(&max, payload + 8, 4);
    const RangeFloat form(max, (int32_t)word_at(payload + 12), job.bits);
    const uint8_t* packed = payload + kHeader + at / kGroup * 16 * job.bits;
    return RangeGroup<kWide>{packed, nullptr, s, form, splat(form.valid ? 0u : 0x7FC00000u), job.bits};
  });
}

static void range_decode(const FloatJob& job, int64_t begin, int64_t end) {
  if (job.bits > 8) {
    job.add ? range_decode_as<true, true>(job, begin, end) : range_decode_as<false, true>(job, begin, end);
  } else {
    job.add ? range_decode_as<true, false>(job, begin, end) : range_decode_as<false, false>(job, begin, end);
  }
}

// ---- Integers ------------------------------------------------------------------------------------------------------

template <bool kNearest>
static void int_round_as(const FloatJob& job, int64_t begin, int64_t end) {
  FloatScratch s;
  const Floats most = splat(job.clip), least = splat(-job.clip);
  for_values(job, begin, end, s, [&](const Row& row, int64_t at, int64_t n, const float* x) {
    const Draws draws(job.key, row);
    const float alpha = job.params[&row - job.rows];
    uint8_t* integers = job.integers + row.payload + at * job.width;
    Words clipped = {};
    const auto code = [&](Words w, Words random) {
      Floats place = bits_of<Floats>(w) * alpha;
      const Mask counts = above(splat(0x7F800000u), w & 0x7FFFFFFF) & ordered(place);
      place = bits_of<Floats>(keep(counts, bits_of<Words>(place)));
      clipped = add_where(below(most, place) | below(place, least), clipped, splat(1u));
      place = greater(lesser(place, most), least);
      if (kNearest) { // beyond 2^23 there are only integers; below, adding it leaves no room for a fraction
        const Words sign = bits_of<Words>(place) & 0x80000000;
        const Floats shift = bits_of<Floats>(sign | 0x4B000000);
        const Mask small = above(splat(0x4B000000u), bits_of<Words>(place) & 0x7FFFFFFF);
        return truncate(bits_of<Floats>(select(small, bits_of<Words>((place + shift) - shift), bits_of<Words>(place))));
      }
      Words whole = truncate(place);
      const Mask over = below(place, __builtin_convertvector((Ints)whole, Floats));
      whole = add_where(over, whole, splat(~0u)); // toward minus infinity
      const Floats fraction = place - __builtin_convertvector((Ints)whole, Floats);
      return whole + ((truncate(fraction * 65536.0f) + random) >> 16);
    };
    for_groups(job, row, at, n, x, [&](const float* from, int64_t i, int64_t count) {
      const uint32_t counter = (uint32_t)((row.index0 + at + i) / 2);
      alignas(64) uint32_t spare[kGroup];
      uint8_t* to = count == kGroup ? integers + i * job.width : (uint8_t*)spare;
      if (job.width == 1) {
        const auto put = [&](int j, Words* c) { store_bytes(to + j, c[0] & 255, c[1] & 255, c[2] & 255, c[3] & 255); };
        for_group<!kNearest>(from, draws, counter, code, put);
      } else {
        const auto put = [&](int j, Words* c) {
          for (int v = 0; v < 4; v++) store(to + 4 * (j + v * kLanes), c[v]);
        };
        for_group<!kNearest>(from, draws, counter, code, put);
      }
      if (count < kGroup) std::memcpy(integers + i * job.width, spare, count * job.width);
    });
    if (const int64_t sum = sum_lanes(clipped)) {
      __atomic_fetch_add(&job.found[&row - job.rows].saturated, sum, __ATOMIC_RELAXED);
    }
  });
}

static void int_round(const FloatJob& job, int64_t begin, int64_t end) {
  job.nearest ? int_round_as<true>(job, begin, end) : int_round_as<false>(job, begin, end);
}

struct IntGroup {
  const uint8_t *integers, *from;
  uint8_t* spare;
  const int width;
  const float factor;
  void read(int64_t i, int64_t n) {
    from = integers + i * width;
    if (n < kGroup) std::memcpy(spare, from, n * width), from = spare;
  }
  Floats lanes(int j) const {
    const Ints q = width == 1 ? (Ints)(widen_words(from + j) << 24) >> 24 : load<Ints>(from + 4 * j);
    return factor * __builtin_convertvector(q, Floats);
  }
};

static void int_decode(const FloatJob& job, int64_t begin, int64_t end) {
  FloatScratch s;
  alignas(64) uint8_t spare[4 * kGroup] = {};
  decode_groups<false>(job, begin, end, s, [&](const Row& row, int64_t at, int64_t) {
    const uint8_t* integers = job.integers + row.payload + at * job.width;
    return IntGroup{integers, nullptr, spare, job.width, job.params[&row - job.rows]};
  });
}
