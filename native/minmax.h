// The operations, tile by tile. Included inside a level's namespace.

// ---- Scales -------------------------------------------------------------------------------------------------------

constexpr float kLargest = 3.402823466e38f;
constexpr float kTinyRange = 0x1p-100f;

static inline float quiet_nan() {
  const uint32_t bits = 0x7FC00000;
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}

static inline float numerator(int bits) { return (float)(((1 << bits) - 1) * 65536.0 * (1.0 - 0x1p-22)); }

static inline bool holds_nan(const float* x, int64_t n) {
  bool found = false;
  for (int64_t i = 0; i < n; i++) found |= x[i] != x[i];
  return found;
}

// Minimum and maximum of x[0, n), whatever the NaNs among them; `sums` is no longer finite if there is one.
static inline void extrema(const float* x, int64_t n, float& low, float& high, Floats& sums) {
  if (n < kLanes) {
    low = high = x[0];
    for (int64_t i = 0; i < n; i++) {
      low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
      sums[0] += x[i];
    }
    return;
  }
  const Floats last = load<Floats>(x + n - kLanes); // overlaps what the loop reads
  Floats lows = last, highs = last;
  sums += last;
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    const Floats a = load<Floats>(x + i), b = load<Floats>(x + i + kLanes);
    const Floats c = load<Floats>(x + i + 2 * kLanes), d = load<Floats>(x + i + 3 * kLanes);
    lows = lesser(lesser(lesser(a, b), lesser(c, d)), lows);
    highs = greater(greater(greater(a, b), greater(c, d)), highs);
    sums += (a + b) + (c + d);
  }
  for (; i + kLanes <= n; i += kLanes) {
    const Floats a = load<Floats>(x + i);
    lows = lesser(a, lows), highs = greater(a, highs), sums += a;
  }
  low = across_lesser(lows), high = across_greater(highs);
}

static inline bool finite(Floats sums) {
  bool ok = true;
  for (int i = 0; i < kLanes; i++) ok &= __builtin_fabsf(sums[i]) <= kLargest;
  return ok;
}

// lo, unit and factor of `n` buckets; `low` and `high` hold the extrema on entry. NaN or Inf spoil a bucket's range.
static void finish_scales(float* low, const float* high, float* unit, float* inverse, int64_t n, int bits) {
  const float levels = (float)((1 << bits) - 1), over = numerator(bits), nan = quiet_nan();
  for (int64_t k = 0; k < n; k++) {
    const float lo = low[k] + 0.0f, span = (high[k] + 0.0f) - lo;
    const bool bad = !(span <= kLargest), flat = bad | (span < kTinyRange);
    const float divisor = flat ? 1.0f : span;
    const float u = divisor / levels, f = over / divisor;
    low[k] = bad ? nan : lo;
    unit[k] = bad ? nan : (flat ? 0.0f : u);
    inverse[k] = flat ? 0.0f : f;
  }
}

// ---- Scratch ------------------------------------------------------------------------------------------------------

struct Scratch {
  alignas(64) float values[kLoaded];     // a block, converted or summed
  alignas(64) float tile[kTile];         // values of one tile on their way to y
  alignas(64) uint8_t codes[kTile];      // one byte each
  alignas(64) float low[kMaxBuckets];    // per bucket of a block
  alignas(64) float unit[kMaxBuckets];
  alignas(64) float inverse[kMaxBuckets];
  alignas(64) float high[kMaxBuckets];
  alignas(64) float each_low[kTile];     // per element of a tile, where groups and buckets do not fit each other
  alignas(64) float each_other[kTile];
};

// Values of the buckets that the elements [at, at + n) lie in, one per element and up to a whole group.
static void spread(const float* per_bucket, int64_t bucket, int64_t at, int64_t first, int64_t n, float* each) {
  int64_t k = at / bucket - first, left = bucket - at % bucket;
  for (int64_t i = 0; i < n; k++, left = bucket) {
    float value;
    std::memcpy(&value, per_bucket + k, 4); // a message may lie at any address
    for (const int64_t end = left < n - i ? i + left : n; i < end; i++) each[i] = value;
  }
  for (int64_t i = n; i % kGroup; i++) each[i] = each[n - 1];
}

// Follows the bucket of one half group after the other; only where no bucket ends inside a half.
struct Cursor {
  int64_t k, left;
  const int64_t bucket;
  Cursor(int64_t bucket, int64_t at, int64_t first) : k(at / bucket - first), left(bucket - at % bucket), bucket(bucket) {}
  inline void advance() {
    if ((left -= kHalf) == 0) k++, left = bucket;
  }
};

// Where a row's values at `at` will be read or written some tiles later; null past its end.
static inline const float* ahead_of(const float* values, const Row& row, int64_t at) {
  return at + kAhead + kTile <= row.numel ? values + row.start + at + kAhead : nullptr;
}

// ---- Codes to values ----------------------------------------------------------------------------------------------

enum Mode {
  kStore, // to = v * scale
  kAdd,   // to = base + v * scale
  kMean,  // to = (base + v) * scale
};

// Where decoded values go. `base` may be `to`; what lies at `ahead` (if not null) is fetched meanwhile.
struct Sink {
  Mode mode;
  float scale;
  const float* base;
  float* to;
  const float* ahead;
};

template <Mode kMode, class V>
static inline V combine(V v, V base, float scale) {
  return kMode == kStore ? v * scale : kMode == kAdd ? base + v * scale : (base + v) * scale;
}

// A vector's worth of elements with scales of their own (kEach) or one scale.
template <bool kEach, Mode kMode>
static inline void dequantise_half(const uint8_t* codes, const float* low, const float* unit, const float* base,
                                   float* to, float scale) {
  for (int j = 0; j < kHalf; j += kLanes) {
    const Floats lows = kEach ? load<Floats>(low + j) : splat(*low), units = kEach ? load<Floats>(unit + j) : splat(*unit);
    const Floats v = lows + widen(codes + j) * units;
    store(to + j, combine<kMode>(v, kMode == kStore ? v : load<Floats>(base + j), scale));
  }
}

template <bool kEach, Mode kMode>
static inline void dequantise_few(const uint8_t* codes, const float* low, const float* unit, const float* base,
                                  float* to, float scale, int64_t n) {
  for (int64_t j = 0; j < n; j++) {
    const float v = low[kEach ? j : 0] + (float)codes[j] * unit[kEach ? j : 0];
    to[j] = combine<kMode>(v, kMode == kStore ? v : base[j], scale);
  }
}

// Where the scales of a row's buckets are: in a message or in scratch memory. `first` is the bucket at index 0.
struct Scales {
  const float *low, *unit;
  int64_t first;
};

template <bool kEach, Mode kMode>
static void dequantise_as(const uint8_t* codes, const Scales& scales, int64_t bucket, int64_t at, int64_t n,
                          const Sink& sink, Scratch& s) {
  const float scale = sink.scale, *base = sink.base;
  float* to = sink.to;
  if (kEach) {
    spread(scales.low, bucket, at, scales.first, n, s.each_low);
    spread(scales.unit, bucket, at, scales.first, n, s.each_other);
  }
  Cursor at_bucket(bucket, at, scales.first);
  for (int64_t i = 0; i < n; i += kHalf, at_bucket.advance(), to += kHalf, base += kMode == kStore ? 0 : kHalf) {
    if (sink.ahead) prefetch(sink.ahead + i);
    float low, unit;
    const float *lows = s.each_low + i, *units = s.each_other + i;
    if (!kEach) { // a message may lie at any address
      std::memcpy(&low, scales.low + at_bucket.k, 4), std::memcpy(&unit, scales.unit + at_bucket.k, 4);
      lows = &low, units = &unit;
    }
    if (n - i >= kHalf) {
      dequantise_half<kEach, kMode>(codes + i, lows, units, base, to, scale);
    } else {
      dequantise_few<kEach, kMode>(codes + i, lows, units, base, to, scale, n - i);
    }
  }
}

template <Mode kMode>
static void dequantise_in(const uint8_t* codes, const Scales& scales, int64_t bucket, int64_t at, int64_t n,
                          const Sink& sink, Scratch& s) {
  bucket % kHalf ? dequantise_as<true, kMode>(codes, scales, bucket, at, n, sink, s)
                 : dequantise_as<false, kMode>(codes, scales, bucket, at, n, sink, s);
}

// Values lo + code * unit of the elements [at, at + n), at most a tile, of a row.
static void dequantise(const uint8_t* codes, const Scales& scales, int64_t bucket, int64_t at, int64_t n,
                       const Sink& sink, Scratch& s) {
  switch (sink.mode) {
  case kStore: return dequantise_in<kStore>(codes, scales, bucket, at, n, sink, s);
  case kAdd: return dequantise_in<kAdd>(codes, scales, bucket, at, n, sink, s);
  case kMean: return dequantise_in<kMean>(codes, scales, bucket, at, n, sink, s);
  }
}

// The same from a message; `at` is a multiple of the group.
static void decode_tile(const uint8_t* message, const Row& row, int bits, int64_t bucket, int64_t at, int64_t n,
                        const Sink& sink, Scratch& s) {
  const uint8_t* payload = message + row.payload;
  const uint8_t* packed = payload + codes_at(row.numel, bucket) + at / kGroup * 16 * bits;
  const float* low = (const float*)payload;
  unpack(packed, ceil_div(n, kGroup), bits, s.codes);
  dequantise(s.codes, Scales{low, low + num_buckets(row.numel, bucket), 0}, bucket, at, n, sink, s);
}

// ---- What is encoded ----------------------------------------------------------------------------------------------

// Elements [at, at + n), at most a tile, of scale * (own + messages) into `to`; partial sums go through `sums`, which
// may be `to`.
static void load_tile(const Job& job, const Row& row, int64_t at, int64_t n, float* sums, float* to, Scratch& s) {
  const float *base = sums, *ahead = nullptr;
  if (!job.num_messages) sums = to;
  if (!job.own) {
    std::memset(sums, 0, 4 * n);
  } else if (job.own_dtype == kFloat32 && job.num_messages) {
    base = (const float*)job.own + row.start + at; // read by the first addition
    ahead = ahead_of((const float*)job.own, row, at);
  } else {
    read_floats(job.own, job.own_dtype, row.start + at, n, sums);
  }
  for (int64_t m = 0; m < job.num_messages; m++) {
    const bool last = m + 1 == job.num_messages;
    const Sink sink{last ? kMean : kAdd, last ? job.scale : 1.0f, base, last ? to : sums, m ? nullptr : ahead};
    decode_tile(job.messages[m], row, job.bits, job.bucket, at, n, sink, s);
    base = sums;
  }
  if (!job.num_messages) {
    const float scale = job.scale;
    for (int64_t j = 0; j < n; j++) to[j] *= scale;
  }
}

static void load_values(const Job& job, const Row& row, int64_t at, int64_t n, float* to, Scratch& s) {
  for (int64_t i = 0; i < n; i += kTile) {
    load_tile(job, row, at + i, n - i < kTile ? n - i : kTile, to + i, to + i, s);
  }
}

// The decoded values of a tile go to y as they will come out of the message.
static void write_decoded(const Job& job, const Row& row, const Scales& scales, int64_t at, int64_t n, Scratch& s) {
  if (job.y_dtype == kFloat32) {
    float* y = (float*)job.y + row.start + at;
    const float* ahead = job.y == job.own ? nullptr : ahead_of((const float*)job.y, row, at);
    dequantise(s.codes, scales, job.bucket, at, n, Sink{kStore, 1.0f, y, y, ahead}, s);
    return;
  }
  dequantise(s.codes, scales, job.bucket, at, n, Sink{kStore, 1.0f, s.tile, s.tile, nullptr}, s);
  write_floats(s.tile, n, job.y, job.y_dtype, row.start + at);
}

// ---- Values to codes ----------------------------------------------------------------------------------------------

template <bool kEach, bool kNearest>
static inline void quantise_last(const float* x, int64_t n, const HalfScales& scales, const Draws& draws,
                                 uint32_t counter, uint8_t* codes) {
  alignas(64) float padded[kGroup];
  for (int64_t j = 0; j < kGroup; j++) padded[j] = x[j < n ? j : n - 1];
  quantise_group<kEach, kNearest>(padded, scales, draws, counter, codes);
  std::memset(codes + n, 0, kGroup - n);
}

// Codes of the elements [at, at + n), at most a tile, of a row; x holds them.
template <bool kEach, bool kNearest>
static void quantise_as(const float* x, const float* ahead, const Row& row, int64_t bucket, int64_t at, int64_t n, const float* low,
                        const float* inverse, int64_t first, const Draws& draws, uint8_t* codes, Scratch& s) {
  if (kEach) {
    spread(low, bucket, at, first, n, s.each_low);
    spread(inverse, bucket, at, first, n, s.each_other);
  }
  uint32_t counter = (uint32_t)((row.index0 + at) / 2);
  Cursor at_bucket(bucket, at, first);
  for (int64_t i = 0; i < n; i += kGroup, counter += kHalf) {
    HalfScales scales;
    for (int half = 0; half < 2; half++, at_bucket.advance()) {
      // A half that begins behind the row's end takes the scale of the one before.
      if (half && n - i <= kHalf) {
        scales.low[1] = scales.low[0], scales.inverse[1] = scales.inverse[0];
        continue;
      }
      scales.low[half] = kEach ? s.each_low + i + half * kHalf : low + at_bucket.k;
      scales.inverse[half] = kEach ? s.each_other + i + half * kHalf : inverse + at_bucket.k;
    }
    if (ahead) prefetch(ahead + i), prefetch(ahead + i + kHalf);
    if (n - i >= kGroup) {
      quantise_group<kEach, kNearest>(x + i, scales, draws, counter, codes + i);
    } else {
      quantise_last<kEach, kNearest>(x + i, n - i, scales, draws, counter, codes + i);
    }
  }
}

struct Encoder {
  const Job& job;
  const Row& row;
  Scratch& s;
  const Draws draws;
  const bool direct; // the values are read where they are
  const int64_t buckets;
  uint8_t* const payload;
  uint8_t* const packed;

  Encoder(const Job& job, const Row& row, Scratch& s)
      : job(job), row(row), s(s), draws(job.key, row), direct(Blocks(job).direct), buckets(num_buckets(row.numel, job.bucket)),
        payload(job.out + row.payload), packed(payload + codes_at(row.numel, job.bucket)) {}

  // Elements [at, at + n), at most a tile, at a multiple of the group. `low` … hold the scales from bucket `first` on.
  void tile(const float* x, int64_t at, int64_t n, const float* low, const float* unit, const float* inverse,
            int64_t first) const {
    const bool each = job.bucket % kHalf;
    const auto quantise = each ? job.nearest ? quantise_as<true, true> : quantise_as<true, false>
                               : job.nearest ? quantise_as<false, true> : quantise_as<false, false>;
    const float* ahead = direct ? ahead_of((const float*)job.own, row, at) : nullptr;
    quantise(x, ahead, row, job.bucket, at, n, low, inverse, first, draws, s.codes, s);
    pack(s.codes, ceil_div(n, kGroup), job.bits, packed + at / kGroup * 16 * job.bits);
    if (job.y) write_decoded(job, row, Scales{low, unit, first}, at, n, s);
    if (at + n == row.numel) zero_padding();
  }

  void put_scales(const float* low, const float* unit, int64_t first, int64_t n) const {
    std::memcpy(payload + 4 * first, low, 4 * n);
    std::memcpy(payload + 4 * (buckets + first), unit, 4 * n);
  }

  void zero_padding() const {
    const int64_t meta = 8 * buckets, codes = ceil_div(row.numel, kGroup) * 16 * job.bits;
    std::memset(payload + meta, 0, align64(meta) - meta);
    std::memset(packed + codes, 0, align64(codes) - codes);
  }

  // Elements [at, at + n) starting at a bucket and a group, ending at one or at the row's end.
  void block(int64_t at, int64_t n) const {
    const float* x = s.values;
    if (direct) {
      x = (const float*)job.own + row.start + at;
    } else {
      load_values(job, row, at, n, s.values, s);
    }
    const int64_t width = job.bucket < n ? job.bucket : n, count = ceil_div(n, width), first = at / job.bucket;
    Floats sums = {};
    for (int64_t k = 0; k < count; k++) {
      const int64_t from = k * width;
      extrema(x + from, from + width <= n ? width : n - from, s.low[k], s.high[k], sums);
    }
    if (!finite(sums)) {
      for (int64_t k = 0; k < count; k++) {
        const int64_t from = k * width;
        if (holds_nan(x + from, from + width <= n ? width : n - from)) s.low[k] = quiet_nan();
      }
    }
    finish_scales(s.low, s.high, s.unit, s.inverse, count, job.bits);
    put_scales(s.low, s.unit, first, count);
    for (int64_t i = 0; i < n; i += kTile) {
      tile(x + i, at + i, n - i < kTile ? n - i : kTile, s.low, s.unit, s.inverse, first);
    }
  }
};

static void encode_blocks(const Job& job, int64_t begin, int64_t end) {
  const Blocks blocks(job);
  Scratch scratch;
  int64_t before = 0;
  for (int64_t r = 0; r < job.num_rows && before < end; r++) {
    const Row& row = job.rows[r];
    const int64_t count = blocks.count(row.numel);
    if (before + count > begin) {
      const Encoder encoder(job, row, scratch);
      const int64_t size = blocks.size ? blocks.size : row.numel;
      for (int64_t b = begin > before ? begin - before : 0; b < count && before + b < end; b++) {
        const int64_t at = b * size;
        encoder.block(at, row.numel - at < size ? row.numel - at : size);
      }
    }
    before += count;
  }
}

// ---- Wide rows ----------------------------------------------------------------------------------------------------

static inline int32_t to_key(float v) {
  int32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

static inline float from_key(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & 0x7FFFFFFF);
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}

static inline void merge(int32_t* into, int32_t key, bool lower) {
  int32_t seen = __atomic_load_n(into, __ATOMIC_RELAXED);
  while ((lower ? key < seen : key > seen) &&
         !__atomic_compare_exchange_n(into, &seen, key, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

static const float* wide_values(const Job& job, const Row& row, int64_t at, int64_t n, Scratch& s) {
  if (Blocks(job).direct) return (const float*)job.own + row.start + at;
  load_values(job, row, at, n, s.values, s);
  return s.values;
}

static void wide_extrema(const Job& job, const Row& row, const Wide& wide, int64_t begin, int64_t end) {
  Scratch scratch;
  for (int64_t at = begin * kLoaded; at < end * kLoaded && at < row.numel; at += kLoaded) {
    const int64_t n = row.numel - at < kLoaded ? row.numel - at : kLoaded;
    const float* x = wide_values(job, row, at, n, scratch);
    for (int64_t i = 0, k = at / job.bucket; i < n; k++) {
      const int64_t left = job.bucket - (at + i) % job.bucket, count = left < n - i ? left : n - i;
      float low, high;
      Floats sums = {};
      extrema(x + i, count, low, high, sums);
      if (!finite(sums) && holds_nan(x + i, count)) low = high = quiet_nan(); // its key is above that of infinity
      merge(wide.low_key + k, to_key(low), true), merge(wide.high_key + k, to_key(high), false);
      i += count;
    }
  }
}

static void wide_scales(const Job& job, const Row& row, const Wide& wide) {
  const int64_t count = num_buckets(row.numel, job.bucket);
  float* const high = wide.inverse; // becomes the factor in place
  for (int64_t k = 0; k < count; k++) {
    wide.low[k] = from_key(wide.low_key[k]), high[k] = from_key(wide.high_key[k]);
  }
  finish_scales(wide.low, high, wide.unit, wide.inverse, count, job.bits);
  uint8_t* payload = job.out + row.payload;
  std::memcpy(payload, wide.low, 4 * count);
  std::memcpy(payload + 4 * count, wide.unit, 4 * count);
}

static void wide_codes(const Job& job, const Row& row, const Wide& wide, int64_t begin, int64_t end) {
  Scratch scratch;
  const Encoder encoder(job, row, scratch);
  for (int64_t at = begin * kLoaded; at < end * kLoaded && at < row.numel; at += kLoaded) {
    const int64_t n = row.numel - at < kLoaded ? row.numel - at : kLoaded;
    const float* x = wide_values(job, row, at, n, scratch);
    for (int64_t i = 0; i < n; i += kTile) {
      encoder.tile(x + i, at + i, n - i < kTile ? n - i : kTile, wide.low, wide.unit, wide.inverse, 0);
    }
  }
}

// ---- Decode and sum -----------------------------------------------------------------------------------------------

// Calls visit(row, first element, elements) for the tiles [begin, end) of all rows, in order.
template <class Visit>
static void for_tiles(const Job& job, int64_t begin, int64_t end, Visit visit) {
  int64_t before = 0;
  for (int64_t r = 0; r < job.num_rows && before < end; r++) {
    const Row& row = job.rows[r];
    const int64_t count = ceil_div(row.numel, kTile);
    for (int64_t t = begin > before ? begin - before : 0; t < count && before + t < end; t++) {
      visit(row, t * kTile, row.numel - t * kTile < kTile ? row.numel - t * kTile : kTile);
    }
    before += count;
  }
}

static void decode_tiles(const Job& job, int64_t begin, int64_t end) {
  Scratch s;
  for_tiles(job, begin, end, [&](const Row& row, int64_t at, int64_t n) {
    const uint8_t* message = job.messages[0];
    if (job.y_dtype == kFloat32) {
      float* y = (float*)job.y + row.start + at;
      const Sink sink{job.add ? kAdd : kStore, job.scale, y, y, ahead_of((const float*)job.y, row, at)};
      decode_tile(message, row, job.bits, job.bucket, at, n, sink, s);
      return;
    }
    if (job.add) read_floats(job.y, job.y_dtype, row.start + at, n, s.tile);
    const Sink sink{job.add ? kAdd : kStore, job.scale, s.tile, s.tile, nullptr};
    decode_tile(message, row, job.bits, job.bucket, at, n, sink, s);
    write_floats(s.tile, n, job.y, job.y_dtype, row.start + at);
  });
}

static void sum_tiles(const Job& job, int64_t begin, int64_t end) {
  Scratch s;
  for_tiles(job, begin, end, [&](const Row& row, int64_t at, int64_t n) {
    if (job.y_dtype == kFloat32) {
      load_tile(job, row, at, n, s.tile, (float*)job.y + row.start + at, s);
      return;
    }
    load_tile(job, row, at, n, s.tile, s.tile, s);
    write_floats(s.tile, n, job.y, job.y_dtype, row.start + at);
  });
}

static uint64_t checksum(const uint8_t* message, int64_t begin, int64_t end) {
  uint64_t sum = 0;
  for (int64_t i = begin; i < end; i++) {
    uint32_t word;
    std::memcpy(&word, message + 4 * i, 4);
    sum += (uint64_t)word * (2 * (uint64_t)i + 1);
  }
  return sum;
}
