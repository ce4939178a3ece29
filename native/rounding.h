// Random bits, and values to codes. Included inside a level's namespace.

static inline uint64_t splitmix64(uint64_t v) {
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9ull;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBull;
  return v ^ (v >> 31);
}

// Random draws of one row.
struct Draws {
  uint32_t k0, k1;
  Draws(uint64_t key, const Row& row) {
    const uint64_t mixed = splitmix64(key + (uint64_t)row.site * 0x9E3779B97F4A7C15ull);
    k0 = (uint32_t)mixed, k1 = (uint32_t)(mixed >> 32);
  }
  // Random words for kCount counters, interleaved step by step for instruction-level parallelism.
  template <int kCount>
  THINWIRE_WITHIN inline void words(Words* x) const {
    for (int i = 0; i < kCount; i++) x[i] ^= k0;
    for (int i = 0; i < kCount; i++) x[i] = (x[i] ^ (x[i] >> 17)) * 0xED5AD4BBu;
    for (int i = 0; i < kCount; i++) x[i] += k1;
    for (int i = 0; i < kCount; i++) x[i] = (x[i] ^ (x[i] >> 11)) * 0xAC4C1B51u;
    for (int i = 0; i < kCount; i++) x[i] = (x[i] ^ (x[i] >> 15)) * 0x31848BABu;
    for (int i = 0; i < kCount; i++) x[i] ^= x[i] >> 14;
  }
};

static inline Words lane_numbers() {
  Words v;
  for (int i = 0; i < kLanes; i++) v[i] = i;
  return v;
}

enum Origin {
  kFromLow,    // codes count from the bucket's minimum
  kFromZero,   // from zero, where the code is Coding::middle >> 16
  kSaturating, // the same, and values may lie beyond the outermost codes
};

// Constants of all positions of a row.
struct Coding {
  uint32_t middle; // the position of zero
  uint32_t noise;  // added in place of random bits
  explicit Coding(const Format& form, const Draws& draws)
      : middle(form.num_scales() == 2 ? 0 : (uint32_t)(form.offset() * 65536.0f)),
        noise(form.rounding == kShift ? draws.k0 & 0xFFFF : 0x8000) {}
};

// Code in 16.16 fixed point before the cut, counted from the origin.
template <Origin kOrigin>
THINWIRE_WITHIN static inline Words position(const float* x, Floats low, Floats inverse, float limit) {
  const Floats v = load<Floats>(x);
  if (kOrigin == kFromLow) return truncate((v - low) * inverse);
  if (kOrigin == kFromZero) return truncate(v * inverse);
  return truncate(greater(lesser(v * inverse, splat(limit)), splat(-limit)));
}

// The scales of a group's two halves of 64: one value each, or one per element where buckets end inside a half.
struct HalfScales {
  const float *low[2], *inverse[2];
  int64_t k[2]; // their buckets in the block
};

// The 128 codes of one group; `counter` is 64 times the group's number in its layer. Where lesser() hides NaNs, bits
// above the codes are set in `seen` if a position is NaN: by its value, or by the scale of a bucket that has none.
template <bool kEach, Origin kOrigin, bool kRandom>
THINWIRE_WITHIN static inline void quantize_group(const float* x, const HalfScales& scales, const Draws& draws, const Coding& coding,
                                  uint32_t counter, uint8_t* codes, Words& seen) {
  const Words lanes = lane_numbers(), middle = splat(coding.middle), fixed = splat(coding.middle + coding.noise);
  const float limit = (float)coding.middle;
  Words a[4], b[4];
  for (int j = 0; j < 64; j += 4 * kLanes) {
    Words random[4];
    if (kRandom) {
      for (int v = 0; v < 4; v++) random[v] = lanes ^ (counter + j + v * kLanes); // a multiple of 64: xor adds
      draws.words<4>(random);
    }
    for (int v = 0; v < 4; v++) {
      const int at = j + v * kLanes;
      const auto spread = [at](const float* p) { return kEach ? load<Floats>(p + at) : splat(*p); };
      a[v] = position<kOrigin>(x + at, spread(scales.low[0]), spread(scales.inverse[0]), limit);
      b[v] = position<kOrigin>(x + at + 64, spread(scales.low[1]), spread(scales.inverse[1]), limit);
      if (!kRandom) {
        a[v] += fixed, b[v] += fixed;
      } else if (kOrigin == kFromLow) {
        a[v] += random[v] & 0xFFFF, b[v] += random[v] >> 16;
      } else if (kOrigin == kFromZero) { // zero is a code: its position has no bits below 2^16
        a[v] += (random[v] & 0xFFFF) | middle, b[v] += (random[v] >> 16) | middle;
      } else {
        a[v] += (random[v] & 0xFFFF) + middle, b[v] += (random[v] >> 16) + middle;
      }
      a[v] >>= 16, b[v] >>= 16;
      if (kHidesNan && kOrigin == kFromLow) seen |= a[v] | b[v];
    }
    store_bytes(codes + j, a[0], a[1], a[2], a[3]), store_bytes(codes + j + 64, b[0], b[1], b[2], b[3]);
  }
}

// Codes of one bit, x >= 0; zeros up to a whole group. The memory at `ahead` and `also` is prefetched.
THINWIRE_APART static void quantize_signs(const float* x, int64_t n, uint8_t* codes, const float* ahead,
                                          const float* also) {
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    if (ahead) prefetch(ahead + i), prefetch(ahead + i + kHalf);
    if (also) prefetch(also + i), prefetch(also + i + kHalf);
    for (int j = 0; j < kGroup; j += 4 * kLanes) {
      Words v[4];
      for (int k = 0; k < 4; k++) v[k] = (Words)(load<Floats>(x + i + j + k * kLanes) >= Floats{}) & 1u;
      store_bytes(codes + i + j, v[0], v[1], v[2], v[3]);
    }
  }
  for (; i < n; i++) codes[i] = x[i] >= 0.0f;
  for (; i % kGroup; i++) codes[i] = 0;
}
