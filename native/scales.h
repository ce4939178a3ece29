// lo, unit and factor of buckets, and how elements find theirs. Included inside a level's namespace.

constexpr float kLargest = 3.402823466e38f;
constexpr float kTinyRange = 0x1p-100f;

static inline float quiet_nan() {
  const uint32_t bits = 0x7FC00000;
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}

static inline float numerator(int steps) { return (float)(steps * 65536.0 * (1.0 - 0x1p-22)); }

static inline bool holds_nan(const float* x, int64_t n) {
  bool found = false;
  for (int64_t i = 0; i < n; i++) found |= x[i] != x[i];
  return found;
}

// Minimum and maximum of x[0, n). If lesser() hides NaNs they do not count.
THINWIRE_APART static void extrema(const float* x, int64_t n, float& low, float& high) {
  if (n < kLanes) {
    low = high = x[0];
    for (int64_t i = 1; i < n; i++) {
      low = x[i] < low || x[i] != x[i] ? x[i] : low;
      high = x[i] > high || x[i] != x[i] ? x[i] : high;
    }
    return;
  }
  const Floats last = load<Floats>(x + n - kLanes); // overlaps what the loop reads
  Floats lows = last, highs = last;
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    const Floats a = load<Floats>(x + i), b = load<Floats>(x + i + kLanes);
    const Floats c = load<Floats>(x + i + 2 * kLanes), d = load<Floats>(x + i + 3 * kLanes);
    lows = lesser(lesser(lesser(a, b), lesser(c, d)), lows);
    highs = greater(greater(greater(a, b), greater(c, d)), highs);
  }
  for (; i + kLanes <= n; i += kLanes) {
    const Floats a = load<Floats>(x + i);
    lows = lesser(a, lows), highs = greater(a, highs);
  }
  low = across_lesser(lows), high = across_greater(highs);
}

// The value between low and high that is nearest to zero: what all values of a bucket with a tiny range become, so that
// no error is larger than its value.
static inline float nearest_to_zero(float low, float high) { return low > 0.0f ? low : (high < 0.0f ? high : 0.0f); }

// lo, unit and factor of `n` buckets; `low` and `high` hold the extrema on entry. NaN or Inf spoil a bucket's range.
THINWIRE_APART static void finish_minmax(float* low, const float* high, float* unit, float* inverse, int64_t n,
                                         int steps) {
  const float levels = (float)steps, over = numerator(steps), nan = quiet_nan();
  for (int64_t k = 0; k < n; k++) {
    const float lo = low[k] + 0.0f, hi = high[k] + 0.0f, span = hi - lo;
    const bool bad = !(span <= kLargest), flat = bad | (span < kTinyRange);
    const float divisor = flat ? 1.0f : span;
    const float u = divisor / levels, f = over / divisor;
    low[k] = bad ? nan : (flat ? nearest_to_zero(lo, hi) : lo);
    unit[k] = bad ? nan : (flat ? 0.0f : u);
    inverse[k] = flat ? 0.0f : f;
  }
}

// unit and factor where `largest` holds a. `largest` may be `inverse`.
THINWIRE_APART static void finish_largest(const float* largest, float* unit, float* inverse, int64_t n,
                                          const Format& form) {
  const float levels = (float)form.steps, over = numerator(form.steps), top = form.max_code(), nan = quiet_nan();
  for (int64_t k = 0; k < n; k++) {
    const float a = largest[k];
    const bool infinite = !(a <= kLargest), flat = infinite | (a < kTinyRange);
    const float divisor = flat ? 1.0f : a;
    const float u = divisor / levels, f = over / divisor;
    const bool bad = infinite | !(u * top <= kLargest);
    unit[k] = bad ? nan : (flat ? 0.0f : u);
    inverse[k] = flat | bad ? 0.0f : f;
  }
}

// The scales of `n` buckets from their statistics: the extrema; a; the means of the two sides; the unit itself.
static void finish_scales(const Format& form, float* low, const float* high, float* unit, float* inverse, int64_t n) {
  if (form.scheme == kMinMax) return finish_minmax(low, high, unit, inverse, n, form.steps);
  if (form.scheme == kMaxAbs || form.scheme == kNorm) return finish_largest(high, unit, inverse, n, form);
  for (int64_t k = 0; k < n; k++) {
    const float u = form.scheme == kSign ? high[k] : high[k] - low[k];
    const bool bad = !(u <= kLargest);
    unit[k] = bad ? quiet_nan() : u;
    if (form.scheme == kSides && bad) low[k] = quiet_nan();
  }
}

// The minima as they are sent, shifted with the lattice.
static void shift_lows(const float* low, const float* unit, int64_t n, float shift, float* sent) {
  for (int64_t k = 0; k < n; k++) sent[k] = low[k] + unit[k] * shift;
}

// A block that is being encoded: its values, and the scales of its buckets, of which the first is bucket `first`.
struct Block {
  const float* x;
  int64_t at, n, first, count;
  alignas(64) float values[kLoaded]; // x points here if they had to be converted or summed
  alignas(64) float low[kMaxBuckets];
  alignas(64) float high[kMaxBuckets];
  alignas(64) float unit[kMaxBuckets];
  alignas(64) float inverse[kMaxBuckets];
  alignas(64) float sent[kMaxBuckets]; // minima of a shifted lattice
};

struct Scratch {
  alignas(64) float tile[kTile];     // decoded values of one tile
  alignas(64) uint8_t codes[kTile];  // one byte each
  alignas(64) float each_low[kTile]; // per element of a tile, if buckets do not end at groups
  alignas(64) float each_other[kTile];
};

// Values of the buckets that the elements [at, at + n) lie in, one per element, up to a whole group. `per_bucket`
// begins at bucket `first`.
THINWIRE_APART static void spread(const float* per_bucket, int64_t bucket, int64_t at, int64_t first, int64_t n,
                                  float* each) {
  int64_t k = at / bucket - first, left = bucket - at % bucket;
  for (int64_t i = 0; i < n; k++, left = bucket) {
    float value;
    std::memcpy(&value, per_bucket + k, 4); // a message may lie at any address
    for (const int64_t end = left < n - i ? i + left : n; i < end; i++) each[i] = value;
  }
  for (int64_t i = n; i % kGroup; i++) each[i] = each[n - 1];
}

// Iterates over the buckets of consecutive units (half a group, or a group), if no bucket ends inside a unit.
template <int kUnit>
struct Cursor {
  int64_t k, left;
  const int64_t bucket;
  Cursor(int64_t bucket, int64_t at, int64_t first)
      : k(at / bucket - first), left(bucket - at % bucket), bucket(bucket) {}
  inline void advance() {
    if ((left -= kUnit) == 0) k++, left = bucket;
  }
};

// Where a row's values at `at` will be read or written some tiles later; null past its end.
static inline const float* ahead_of(const float* values, const Row& row, int64_t at) {
  return at + kAhead + kTile <= row.numel ? values + row.start + at + kAhead : nullptr;
}

// Minimum and maximum of kUnit elements, like extrema() but without branches.
template <int kUnit>
THINWIRE_WITHIN static inline void unit_extrema(const float* x, float& low, float& high) {
  Floats lows, highs;
  for (int j = 0; j < kUnit; j += 4 * kLanes) {
    const Floats a = load<Floats>(x + j), b = load<Floats>(x + j + kLanes);
    const Floats c = load<Floats>(x + j + 2 * kLanes), d = load<Floats>(x + j + 3 * kLanes);
    const Floats least = lesser(lesser(a, b), lesser(c, d)), most = greater(greater(a, b), greater(c, d));
    lows = j ? lesser(least, lows) : least, highs = j ? greater(most, highs) : most;
  }
  low = across_lesser(lows), high = across_greater(highs);
}
