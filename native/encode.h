// Values to messages, block by block. Included inside a level's namespace.

template <bool kEach, bool kNearest>
static inline void quantise_last(const float* x, int64_t n, const HalfScales& scales, const Draws& draws,
                                 uint32_t counter, uint8_t* codes) {
  alignas(64) float padded[kGroup];
  for (int64_t j = 0; j < kGroup; j++) padded[j] = x[j < n ? j : n - 1];
  quantise_group<kEach, kNearest>(padded, scales, draws, counter, codes);
  std::memset(codes + n, 0, kGroup - n);
}

// Codes of the elements [at, at + n), at most a tile, of the block. Meanwhile `walk` goes through as many elements of the
// block that follows, in units of kUnit, and those some tiles later (`ahead`, if not null) are fetched. kUnit: bucket
// and group are multiples of it; 0: buckets may end anywhere, and nothing is walked.
template <int kUnit, bool kNearest>
static void quantise_tile(const Block& block, int64_t at, int64_t n, int64_t bucket, uint32_t counter,
                          const Draws& draws, Walk& walk, const float* ahead, Scratch& s) {
  if (kUnit == 0) {
    spread(block.low, bucket, at, block.first, n, s.each_low);
    spread(block.inverse, bucket, at, block.first, n, s.each_other);
  }
  const int64_t from = at - block.at, whole = n / kGroup * kGroup;
  const float* x = block.x + from;
  Cursor<kUnit ? kUnit : kGroup> in(bucket, at, block.first);
  // The scales of the group at i; a half that begins behind the row's end takes those of the one before.
  const auto scales_at = [&](int64_t i) {
    if (kUnit == 0) {
      const float *low = s.each_low + i, *inverse = s.each_other + i;
      return HalfScales{{low, low + kHalf}, {inverse, inverse + kHalf}};
    }
    const int64_t a = in.k;
    in.advance();
    if (kUnit == kGroup || n - i <= kHalf) return HalfScales{{block.low + a, block.low + a}, {block.inverse + a, block.inverse + a}};
    const int64_t b = in.k;
    in.advance();
    return HalfScales{{block.low + a, block.low + b}, {block.inverse + a, block.inverse + b}};
  };
  int64_t i = 0;
  if constexpr (kUnit > 0) {
    const int64_t left = walk.block ? walk.block->n - from : 0, ready = left < whole ? left / kGroup * kGroup : whole;
    const float* next = walk.block ? walk.block->x + from : nullptr;
    float *low = walk.block ? walk.block->low + from / kUnit : nullptr;
    float *high = walk.block ? walk.block->high + from / kUnit : nullptr;
    Floats sums = walk.sums;
    for (; i < ready; i += kGroup, counter += kHalf) {
      if (ahead) prefetch(ahead + i), prefetch(ahead + i + kHalf);
      for (int u = 0; u < kGroup; u += kUnit) unit_extrema<kUnit>(next + i + u, *low++, *high++, sums);
      quantise_group<false, kNearest>(x + i, scales_at(i), draws, counter, s.codes + i);
    }
    walk.sums = sums;
  }
  for (; i < whole; i += kGroup, counter += kHalf) {
    quantise_group<kUnit == 0, kNearest>(x + i, scales_at(i), draws, counter, s.codes + i);
  }
  if (i < n) quantise_last<kUnit == 0, kNearest>(x + i, n - i, scales_at(i), draws, counter, s.codes + i);
}

using QuantiseTile = void (*)(const Block&, int64_t at, int64_t n, int64_t bucket, uint32_t counter, const Draws&,
                              Walk&, const float* ahead, Scratch&);

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

  // Elements of which one walk finds the extrema together; 0 where buckets end anywhere.
  int64_t unit() const { return job.bucket % kHalf ? 0 : job.bucket % kGroup ? kHalf : kGroup; }

  // Puts the codes of a block whose scales are known, while `walk` goes through the one that follows.
  void codes(const Block& block, Walk& walk) const {
    const int64_t unit = this->unit();
    const QuantiseTile quantise =
        job.nearest ? (unit == 0 ? quantise_tile<0, true> : unit == kHalf ? quantise_tile<kHalf, true> : quantise_tile<kGroup, true>)
                    : (unit == 0 ? quantise_tile<0, false> : unit == kHalf ? quantise_tile<kHalf, false> : quantise_tile<kGroup, false>);
    for (int64_t i = 0; i < block.n; i += kTile) {
      const int64_t at = block.at + i, n = block.n - i < kTile ? block.n - i : kTile;
      const float* ahead = direct ? ahead_of((const float*)job.own, row, at + block.n) : nullptr;
      quantise(block, at, n, job.bucket, (uint32_t)((row.index0 + at) / 2), draws, walk, ahead, s);
      pack(s.codes, ceil_div(n, kGroup), job.bits, packed + at / kGroup * 16 * job.bits);
      if (job.y) write_decoded(job, row, Scales{block.low, block.unit, block.first}, at, n, s);
    }
    if (block.at + block.n == row.numel) zero_padding();
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

  // The block of elements [at, at + n), which begins at a bucket and a group and ends at one or at the row's end.
  void load(Block& block, int64_t at, int64_t n) const {
    block.x = direct ? (const float*)job.own + row.start + at : block.values;
    block.at = at, block.n = n;
    block.first = at / job.bucket, block.count = num_buckets(n, job.bucket);
    if (!direct) load_values(job, row, at, n, block.values, s);
  }

  // The scales of a block whose extrema are known; not to be trusted where `sums` is not finite.
  void scales(Block& block, Floats sums) const {
    if (!finite(sums)) {
      for (int64_t k = 0, from = 0; k < block.count; k++, from += job.bucket) {
        const int64_t left = block.n - from;
        if (holds_nan(block.x + from, left < job.bucket ? left : job.bucket)) block.low[k] = quiet_nan();
      }
    }
    finish_scales(block.low, block.high, block.unit, block.inverse, block.count, job.bits);
    put_scales(block.low, block.unit, block.first, block.count);
  }

  // Extrema and scales at once.
  void measure(Block& block) const {
    Floats sums = {};
    for (int64_t k = 0, from = 0; k < block.count; k++, from += job.bucket) {
      const int64_t left = block.n - from;
      extrema(block.x + from, left < job.bucket ? left : job.bucket, block.low[k], block.high[k], sums);
    }
    scales(block, sums);
  }

  // The scales of a block that a walk has gone through.
  void finish(Walk& walk) const {
    Block& block = *walk.block;
    const int64_t unit = this->unit(), each = job.bucket / unit;
    int64_t units = block.n / kGroup * (kGroup / unit);
    for (int64_t from = units * unit; from < block.n; from += unit, units++) {
      const int64_t left = block.n - from;
      extrema(block.x + from, left < unit ? left : unit, block.low[units], block.high[units], walk.sums);
    }
    for (int64_t k = 0; k < block.count && each > 1; k++) {
      float low = block.low[k * each], high = block.high[k * each];
      for (int64_t u = k * each + 1; u < (k + 1) * each && u < units; u++) {
        low = block.low[u] < low ? block.low[u] : low;
        high = block.high[u] > high ? block.high[u] : high;
      }
      block.low[k] = low, block.high[k] = high;
    }
    scales(block, walk.sums);
  }

  // Blocks [begin, end) of `size` elements: the codes of one and the extrema of the next side by side.
  void run(int64_t begin, int64_t end, int64_t size, Block* blocks) const {
    const auto load_block = [&](int64_t b) {
      load(blocks[b % 2], b * size, row.numel - b * size < size ? row.numel - b * size : size);
    };
    load_block(begin);
    measure(blocks[begin % 2]);
    for (int64_t b = begin; b < end; b++) {
      Block* next = b + 1 < end ? &blocks[(b + 1) % 2] : nullptr;
      if (next) load_block(b + 1);
      Walk walk{unit() ? next : nullptr, Floats{}};
      codes(blocks[b % 2], walk);
      if (next) unit() ? finish(walk) : measure(*next);
    }
  }
};

static void encode_blocks(const Job& job, int64_t begin, int64_t end) {
  const Blocks cut(job);
  Scratch scratch;
  Block blocks[2];
  int64_t before = 0;
  for (int64_t r = 0; r < job.num_rows && before < end; r++) {
    const Row& row = job.rows[r];
    const int64_t count = cut.count(row.numel), last = end - before < count ? end - before : count;
    const int64_t first = begin > before ? begin - before : 0;
    if (first < last) Encoder(job, row, scratch).run(first, last, cut.size ? cut.size : row.numel, blocks);
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

static void wide_extrema(const Job& job, const Row& row, const Wide& wide, int64_t begin, int64_t end) {
  Scratch scratch;
  Block block;
  const Encoder encoder(job, row, scratch);
  for (int64_t at = begin * kLoaded; at < end * kLoaded && at < row.numel; at += kLoaded) {
    encoder.load(block, at, row.numel - at < kLoaded ? row.numel - at : kLoaded);
    for (int64_t i = 0, k = block.first; i < block.n; k++) {
      const int64_t left = job.bucket - (at + i) % job.bucket, count = left < block.n - i ? left : block.n - i;
      float low, high;
      Floats sums = {};
      extrema(block.x + i, count, low, high, sums);
      if (!finite(sums) && holds_nan(block.x + i, count)) low = high = quiet_nan(); // a key above that of infinity
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
  Block block;
  const Encoder encoder(job, row, scratch);
  for (int64_t at = begin * kLoaded; at < end * kLoaded && at < row.numel; at += kLoaded) {
    encoder.load(block, at, row.numel - at < kLoaded ? row.numel - at : kLoaded);
    const int64_t count = num_buckets(at + block.n, job.bucket) - block.first;
    std::memcpy(block.low, wide.low + block.first, 4 * count);
    std::memcpy(block.unit, wide.unit + block.first, 4 * count);
    std::memcpy(block.inverse, wide.inverse + block.first, 4 * count);
    Walk none{nullptr, Floats{}};
    encoder.codes(block, none);
  }
}
