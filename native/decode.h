// Messages to values: decoding, adding, summing. Included inside a level's namespace.

enum Mode {
  kStore, // to = v * scale
  kAdd,   // to = base * weight + v * scale
  kMean,  // to = (base * weight + v * scale) * after
  kLost,  // to = (base - v) * scale
  kLostOver, // to = (base - v) / scale
};

// The destination of decoded values. `base` may be `to`; the memory at `ahead` (if not null) is prefetched.
struct Sink {
  Mode mode;
  float scale;
  const float* base;
  float* to;
  const float* ahead;
  float weight = 1.0f, after = 1.0f;
};

template <Mode kMode, class V>
static inline V combine(V v, V base, float scale, float weight, float after) {
  switch (kMode) {
  case kStore: return v * scale;
  case kAdd: return base * weight + v * scale;
  case kMean: return (base * weight + v * scale) * after;
  case kLost: return (base - v) * scale;
  case kLostOver: return (base - v) / scale;
  }
}

// Half a group, with one scale for all or with one for each (kEach).
template <bool kEach, Mode kMode>
THINWIRE_WITHIN static inline void dequantize_half(const uint8_t* codes, const float* low, const float* unit, const float* base,
                                   float* to, float scale, float weight, float after) {
  for (int j = 0; j < kHalf; j += kLanes) {
    const Floats lows = kEach ? load<Floats>(low + j) : splat(*low);
    const Floats units = kEach ? load<Floats>(unit + j) : splat(*unit);
    const Floats v = lows + widen(codes + j) * units;
    store(to + j, combine<kMode>(v, kMode == kStore ? v : load<Floats>(base + j), scale, weight, after));
  }
}

template <bool kEach, Mode kMode>
static inline void dequantize_few(const uint8_t* codes, const float* low, const float* unit, const float* base,
                                  float* to, float scale, float weight, float after, int64_t n) {
  for (int64_t j = 0; j < n; j++) {
    const float v = low[kEach ? j : 0] + (float)codes[j] * unit[kEach ? j : 0];
    to[j] = combine<kMode>(v, kMode == kStore ? v : base[j], scale, weight, after);
  }
}

// The scales of a row's buckets, in a message or in scratch memory. `first` is the bucket at index 0. If there is one
// scale, `low` is null, and lo is -(offset * unit).
struct Scales {
  const float *low, *unit;
  int64_t first;
  float offset;
};

template <bool kEach, Mode kMode>
THINWIRE_APART static void dequantize_as(const uint8_t* codes, const Scales& scales, int64_t bucket, int64_t at,
                                         int64_t n, const Sink& sink, Scratch& s) {
  const float scale = sink.scale, weight = sink.weight, after = sink.after, *base = sink.base;
  float* to = sink.to;
  if (kEach) {
    spread(scales.unit, bucket, at, scales.first, n, s.each_other);
    if (scales.low) {
      spread(scales.low, bucket, at, scales.first, n, s.each_low);
    } else {
      for (int64_t i = 0; i < n; i++) s.each_low[i] = -(scales.offset * s.each_other[i]);
    }
  }
  Cursor<kHalf> at_bucket(bucket, at, scales.first);
  for (int64_t i = 0; i < n; i += kHalf, at_bucket.advance(), to += kHalf, base += kMode == kStore ? 0 : kHalf) {
    if (sink.ahead) prefetch(sink.ahead + i);
    float low, unit;
    const float *lows = s.each_low + i, *units = s.each_other + i;
    if (!kEach) { // a message may lie at any address
      std::memcpy(&unit, scales.unit + at_bucket.k, 4);
      low = -(scales.offset * unit);
      if (scales.low) std::memcpy(&low, scales.low + at_bucket.k, 4);
      lows = &low, units = &unit;
    }
    if (n - i >= kHalf) {
      dequantize_half<kEach, kMode>(codes + i, lows, units, base, to, scale, weight, after);
    } else {
      dequantize_few<kEach, kMode>(codes + i, lows, units, base, to, scale, weight, after, n - i);
    }
  }
}

template <Mode kMode>
static void dequantize_in(const uint8_t* codes, const Scales& scales, int64_t bucket, int64_t at, int64_t n,
                          const Sink& sink, Scratch& s) {
  bucket % kHalf ? dequantize_as<true, kMode>(codes, scales, bucket, at, n, sink, s)
                 : dequantize_as<false, kMode>(codes, scales, bucket, at, n, sink, s);
}

// Values lo + code * unit of the elements [at, at + n), at most a tile, of a row.
static void dequantize(const uint8_t* codes, const Scales& scales, int64_t bucket, int64_t at, int64_t n,
                       const Sink& sink, Scratch& s) {
  switch (sink.mode) {
  case kStore: return dequantize_in<kStore>(codes, scales, bucket, at, n, sink, s);
  case kAdd: return dequantize_in<kAdd>(codes, scales, bucket, at, n, sink, s);
  case kMean: return dequantize_in<kMean>(codes, scales, bucket, at, n, sink, s);
  case kLost: return dequantize_in<kLost>(codes, scales, bucket, at, n, sink, s);
  case kLostOver: return dequantize_in<kLostOver>(codes, scales, bucket, at, n, sink, s);
  }
}

// The same from a message; `at` is a multiple of the group.
static void decode_tile(const uint8_t* message, const Row& row, const Format& form, int64_t at, int64_t n,
                        const Sink& sink, Scratch& s) {
  const uint8_t* payload = message + row.payload;
  const uint8_t* packed = payload + codes_at(row.numel, form) + at / kGroup * 16 * form.bits;
  const float* scales = (const float*)payload;
  const bool two = form.num_scales() == 2;
  const Scales found{two ? scales : nullptr, two ? scales + num_buckets(row.numel, form.bucket) : scales, 0,
                     form.offset()};
  unpack(packed, ceil_div(n, kGroup), form.bits, s.codes);
  dequantize(s.codes, found, form.bucket, at, n, sink, s);
}

// What the terms of a mean are multiplied by before they are added, so that their sum overflows only if their mean does:
// thinwire.kernels.format.before_sum.
static inline float before_sum(float scale) {
  return scale >= 0x1p-126f && scale < 1.0f ? bits_of<float>(bits_of<int32_t>(scale) & 0x7F800000) : 1.0f;
}

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
  const float before = before_sum(job.scale);
  for (int64_t m = 0; m < job.num_messages; m++) {
    const bool last = m + 1 == job.num_messages;
    const Sink sink{last ? kMean : kAdd, before, base, last ? to : sums, m ? nullptr : ahead, m ? 1.0f : before,
                    job.scale / before};
    decode_tile(job.messages[m], row, job.form, at, n, sink, s);
    base = sums;
  }
  if (!job.num_messages && job.scale != 1.0f) {
    const float scale = job.scale;
    for (int64_t j = 0; j < n; j++) to[j] *= scale;
  }
}

// to = x + scale * e
THINWIRE_APART static void add_scaled(const float* x, const float* e, float scale, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load<Floats>(x + i) + load<Floats>(e + i) * scale);
  for (; i < n; i++) to[i] = x[i] + scale * e[i];
}

// The values that a job encodes: elements [at, at + n) of a row, with their residual.
static void load_values(const Job& job, const Row& row, int64_t at, int64_t n, float* to, Scratch& s) {
  const bool as_is = taken_as_is(job);
  for (int64_t i = 0; i < n; i += kTile) {
    const int64_t from = at + i, count = n - i < kTile ? n - i : kTile;
    if (!(as_is && job.now)) load_tile(job, row, from, count, to + i, to + i, s);
    if (!job.now) continue;
    const float* own = (const float*)job.own;
    add_scaled(as_is ? own + row.start + from : to + i, job.now + row.start + from, job.loss_scale, count, to + i);
  }
}

// Error feedback together with coding, group by group: the operands of the next block's values, and the destination of
// this block's residual.
struct Feedback {
  const float *x = nullptr, *now = nullptr; // null: the values are complete
  float* values = nullptr;
  float* next = nullptr; // null: written later
  float scale = 1.0f, inverse = 1.0f;
  bool past_caches = false;
};

template <int kUnit>
THINWIRE_WITHIN static inline void add_unit(const Feedback& f, int64_t i) {
  for (int j = 0; j < kUnit; j += kLanes) {
    store(f.values + i + j, load<Floats>(f.x + i + j) + load<Floats>(f.now + i + j) * f.scale);
  }
}

// Half a group at i, coded from x.
THINWIRE_WITHIN static inline void lose_half(const Feedback& f, const float* x, const uint8_t* codes, float low, float unit,
                             int64_t i) {
  const Floats lows = splat(low), units = splat(unit);
  for (int j = 0; j < kHalf; j += kLanes) {
    const Floats lost = (load<Floats>(x + i + j) - (lows + widen(codes + i + j) * units)) * f.inverse;
    if (f.past_caches) {
      store_past_caches(f.next + i + j, lost);
    } else {
      store(f.next + i + j, lost);
    }
  }
}

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
      decode_tile(message, row, job.form, at, n, sink, s);
      return;
    }
    if (job.add) read_floats(job.y, job.y_dtype, row.start + at, n, s.tile);
    const Sink sink{job.add ? kAdd : kStore, job.scale, s.tile, s.tile, nullptr};
    decode_tile(message, row, job.form, at, n, sink, s);
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
