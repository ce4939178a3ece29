// Signs and magnitudes from a table, in units of a bucket's root mean square. Included inside a level's namespace, after
// levels.h.

constexpr int kMostMagnitudes = 8; // of 4 bits: with both signs they fill a register of 16 values

// sqrt(mean of squares) of the n elements at `at`, summed as lane_sums() of the reference; NaN if it is not finite.
static float root_mean_square(const FloatJob& job, const Row& row, int64_t at, int64_t n, LevelScratch& s) {
  alignas(64) double lanes[kSumLanes] = {};
  for (int64_t i = 0; i < n; i += kTile) {
    const int64_t count = n - i < kTile ? n - i : kTile;
    const float* x = (const float*)job.own + row.start + at + i;
    if (job.own_dtype != kFloat32) read_floats(job.own, job.own_dtype, row.start + at + i, count, s.tile), x = s.tile;
    add_terms<kSquare>(x, count, lanes);
  }
  const float found = (float)std::sqrt(across(lanes) / (double)n);
  return found <= kLargest ? found : __builtin_nanf("");
}

// How many of the middles, times the bucket's scale, a magnitude reaches; the codes of negative values follow.
template <bool kEach>
THINWIRE_APART static void magnitude_codes(const float* x, int64_t n, int count, const float* middles,
                                           LevelScratch& s) {
  for (int64_t i = 0; i < n; i += 4 * kLanes) {
    const Floats scale = splat(s.inverse[i / kGroup * kGroup]);
    Words code[4] = {};
    for (int v = 0; v < 4; v++) {
      const int64_t at = i + v * kLanes;
      const Floats value = load<Floats>(x + at), own = kEach ? load<Floats>(s.inverse + at) : scale;
      const Floats size = bits_of<Floats>(magnitude(value));
      for (int j = 0; j + 1 < count; j++) code[v] -= (Words)(size >= own * middles[j]);
      code[v] += (Words)(value < Floats{}) & (uint32_t)count;
    }
    store_bytes(s.codes + i, code[0], code[1], code[2], code[3]);
  }
}

// What the codes of magnitudes stand for, in units of a bucket's scale: the positive ones first.
static Lookup<true> signed_magnitudes(const FloatJob& job) {
  Lookup<true> values = {};
  const int count = 1 << (job.bits - 1);
  for (int j = 0; j < count; j++) values.values[j] = job.params[j], values.values[count + j] = -job.params[j];
  return values;
}

// next = x + loss_scale * now of the n elements at `at`; x and `now` may be `next`.
static void add_residual(const FloatJob& job, const Row& row, int64_t at, int64_t n, LevelScratch& s) {
  for (int64_t i = row.start + at, end = i + n; i < end; i += kTile) {
    const int64_t count = end - i < kTile ? end - i : kTile;
    const float* x = (const float*)job.own + i;
    if (job.own_dtype != kFloat32) read_floats(job.own, job.own_dtype, i, count, s.tile), x = s.tile;
    if (i + count + kAhead <= row.start + row.numel) {
      for (int64_t j = 0; j < count; j += 16) {
        if (x != s.tile) __builtin_prefetch(x + kAhead + j, 0, 3);
        __builtin_prefetch(job.now + i + kAhead + j, 0, 3), __builtin_prefetch(job.next + i + kAhead + j, 1, 3);
      }
    }
    add_scaled(x, job.now + i, job.loss_scale, count, job.next + i);
  }
}

// With error feedback, a bucket's values and residual are added up in `next` as it is measured, and are coded from
// there; then `next` gets what the codes lack.
struct MagnitudeCoder {
  const FloatJob& given;
  const FloatJob job; // whose own values are those that are coded
  LevelScratch& s;
  const int count;
  const Lookup<true> values;
  float middles[kMostMagnitudes];
  uint8_t* scales;
  int64_t buckets;
  float scale;

  MagnitudeCoder(const FloatJob& given, LevelScratch& s)
      : given(given), job(with_sums(given)), s(s), count(1 << (job.bits - 1)), values(signed_magnitudes(job)) {
    for (int j = 0; j + 1 < count; j++) middles[j] = (job.params[j] + job.params[j + 1]) * 0.5f;
  }
  static FloatJob with_sums(FloatJob job) {
    if (job.now) job.own = job.next, job.own_dtype = kFloat32;
    return job;
  }
  uint8_t* open(const Row& row) {
    scales = job.out + row.payload, buckets = num_buckets(row.numel, job.bucket);
    return scales + align64(4 * buckets);
  }
  void write_head() { zero_to_64(scales, 4 * buckets); }
  void measure(const Row& row, int64_t at, int64_t n) {
    if (job.now) add_residual(given, row, at, n, s);
    scale = root_mean_square(job, row, at, n, s);
    std::memcpy(scales + 4 * (at / job.bucket), &scale, 4);
  }
  void spread(int64_t i) { s.inverse[i] = scale; }
  template <bool kEach>
  void code(const float* x, int64_t n) {
    magnitude_codes<kEach>(x, n, count, middles, s);
  }
  void finish(const Row& row, int64_t at, int64_t n, const float* x) {
    if (!job.now) return;
    const bool each = job.bucket % kGroup != 0, power = is_power_of_two(job.loss_scale);
    const float inverse = 1.0f / job.loss_scale;
    float* next = job.next + row.start + at;
    for (int64_t i = 0; i < n; i += kLanes) {
      const Floats own = each ? load<Floats>(s.inverse + i) : splat(s.inverse[i / kGroup * kGroup]);
      const Floats lost = load<Floats>(x + i) - values(widen_words(s.codes + i)) * own;
      const Floats kept = power ? lost * inverse : lost / job.loss_scale;
      if (i + kLanes <= n) {
        store(next + i, kept);
      } else {
        std::memcpy(next + i, &kept, 4 * (n - i));
      }
    }
  }
};

static void magnitudes_encode(const FloatJob& job, int64_t begin, int64_t end) {
  LevelScratch s;
  MagnitudeCoder coder(job, s);
  encode_measured(coder.job, begin, end, s, coder);
}

struct MagnitudeGroup {
  const uint8_t* packed;
  LevelScratch& s;
  const Lookup<true>& values;
  const int bits;
  int64_t base;
  void read(int64_t i, int64_t) { unpack(packed + i / kGroup * 16 * bits, 1, bits, s.codes), base = i; }
  Floats lanes(int j) const { return values(widen_words(s.codes + j)) * load<Floats>(s.inverse + base + j); }
};

template <bool kAdd>
static void magnitudes_decode_as(const FloatJob& job, int64_t begin, int64_t end) {
  FloatScratch tile;
  LevelScratch s;
  const Lookup<true> values = signed_magnitudes(job);
  decode_groups<kAdd>(job, begin, end, tile, [&](const Row& row, int64_t at, int64_t n) {
    const uint8_t* scales = job.messages[0] + row.payload;
    spread((const float*)scales, job.bucket, at, 0, n, s.inverse);
    const uint8_t* packed = scales + align64(4 * num_buckets(row.numel, job.bucket)) + at / kGroup * 16 * job.bits;
    return MagnitudeGroup{packed, s, values, job.bits, 0};
  });
}

static void magnitudes_decode(const FloatJob& job, int64_t begin, int64_t end) {
  job.add ? magnitudes_decode_as<true>(job, begin, end) : magnitudes_decode_as<false>(job, begin, end);
}
