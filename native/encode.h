// Values to messages, block by block. Included inside a level's namespace.

template <bool kEach, bool kNearest>
static inline void quantise_last(const float* x, int64_t n, const HalfScales& scales, const Draws& draws,
                                 uint32_t counter, uint8_t* codes) {
  alignas(64) float padded[kGroup];
  for (int64_t j = 0; j < kGroup; j++) padded[j] = x[j < n ? j : n - 1];
  quantise_group<kEach, kNearest>(padded, scales, draws, counter, codes);
  std::memset(codes + n, 0, kGroup - n);
}

// Codes of the elements [at, at + n), at most a tile, of a row; x holds them. `low` and `inverse` begin at bucket `first`.
template <bool kEach, bool kNearest>
static void quantise_as(const float* x, const float* ahead, const Row& row, int64_t bucket, int64_t at, int64_t n,
                        const float* low, const float* inverse, int64_t first, const Draws& draws, uint8_t* codes,
                        Scratch& s) {
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
      : job(job), row(row), s(s), draws(job.key, row), direct(Blocks(job).direct),
        buckets(num_buckets(row.numel, job.bucket)), payload(job.out + row.payload),
        packed(payload + codes_at(row.numel, job.bucket)) {}

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
