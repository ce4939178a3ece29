// Random bits, and values to codes. Included inside a level's namespace.

static inline uint64_t splitmix64(uint64_t v) {
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9ull;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBull;
  return v ^ (v >> 31);
}

// Draws of one row.
struct Draws {
  uint32_t k0, k1;
  Draws(uint64_t key, const Row& row) {
    const uint64_t mixed = splitmix64(key + (uint64_t)row.site * 0x9E3779B97F4A7C15ull);
    k0 = (uint32_t)mixed, k1 = (uint32_t)(mixed >> 32);
  }
  inline Words operator()(Words counter) const {
    Words x = counter ^ k0;
    x = (x ^ (x >> 17)) * 0xED5AD4BBu + k1;
    x = (x ^ (x >> 11)) * 0xAC4C1B51u;
    x = (x ^ (x >> 15)) * 0x31848BABu;
    return x ^ (x >> 14);
  }
};

static inline Words lane_numbers() {
  Words v;
  for (int i = 0; i < kLanes; i++) v[i] = i;
  return v;
}

static inline Ints position(const float* x, Floats low, Floats inverse) {
  return __builtin_convertvector((load<Floats>(x) - low) * inverse, Ints);
}

static inline void store_codes(uint8_t* to, Ints fixed) {
  store(to, __builtin_convertvector(bits_of<Words>(fixed) >> 16, Codes));
}

// The 128 codes of one group. `low` and `inverse` hold one value per element if kEach, else one for the group;
// `counter` is 64 times the group's number in its layer.
template <bool kEach, bool kNearest>
static inline void quantise_group(const float* x, const float* low, const float* inverse, const Draws& draws,
                                  uint32_t counter, uint8_t* codes) {
  const Words lanes = lane_numbers();
  for (int j = 0; j < 64; j += kLanes) {
    const Floats low_a = kEach ? load<Floats>(low + j) : splat(*low);
    const Floats low_b = kEach ? load<Floats>(low + j + 64) : low_a;
    const Floats inverse_a = kEach ? load<Floats>(inverse + j) : splat(*inverse);
    const Floats inverse_b = kEach ? load<Floats>(inverse + j + 64) : inverse_a;
    Ints a = position(x + j, low_a, inverse_a), b = position(x + j + 64, low_b, inverse_b);
    if (kNearest) {
      a += 0x8000, b += 0x8000;
    } else {
      const Words random = draws(lanes + (counter + j));
      a += bits_of<Ints>(random & 0xFFFF), b += bits_of<Ints>(random >> 16);
    }
    store_codes(codes + j, a), store_codes(codes + j + 64, b);
  }
}
