// Values to messages, block by block. Included inside a level's namespace.

template <bool kEach, Origin kOrigin, bool kRandom>
THINWIRE_APART static void quantize_last(const float* x, int64_t n, const HalfScales& scales, const Draws& draws,
                                         const Coding& coding, uint32_t counter, uint8_t* codes, Words& seen) {
  alignas(64) float padded[kGroup];
  for (int64_t j = 0; j < kGroup; j++) padded[j] = x[j < n ? j : n - 1];
  quantize_group<kEach, kOrigin, kRandom>(padded, scales, draws, coding, counter, codes, seen);
  std::memset(codes + n, 0, kGroup - n);
}

// The arguments of quantizing a tile: the elements [at, at + n) of a block whose scales are known.
struct Tile {
  const Block& block;
  int64_t at, n, bucket;
  uint32_t counter; // of the first group
  Block* next;        // null, or the next block, whose extrema are computed as well
  const float* ahead; // null, or the memory after that one, which is prefetched
  const float* also;  // the same of the residual
  uint8_t* codes;
  Scales scales; // those that the receiver decodes with
  Feedback feedback;
};

// The codes of a tile, and in the same loop the extrema of units of kUnit elements of the next block (its low and high),
// whose memory latency and reductions over lanes are hidden that way. Bucket and group are multiples of kUnit; with 0,
// buckets may end anywhere, and no extrema are computed. Returns `seen` of quantize_group. With kFeedback, the loop also
// does what Tile::feedback asks for.
template <int kUnit, Origin kOrigin, bool kRandom, bool kFeedback>
THINWIRE_APART static Words quantize_tile(const Tile& tile, const Draws keys, const Coding how, Scratch& s) {
  const Draws draws = keys;
  const Coding coding = how;
  const Block& block = tile.block;
  const int64_t from = tile.at - block.at, n = tile.n, whole = n / kGroup * kGroup;
  if (kUnit == 0) {
    if (kOrigin == kFromLow) spread(block.low, tile.bucket, tile.at, block.first, n, s.each_low);
    spread(block.inverse, tile.bucket, tile.at, block.first, n, s.each_other);
  }
  Cursor<kUnit ? kUnit : kGroup> in(tile.bucket, tile.at, block.first);
  // The scales of the group at i; a half that begins behind the row's end takes those of the one before.
  const auto scales_at = [&](int64_t i) {
    if (kUnit == 0) {
      const float *low = s.each_low + i, *inverse = s.each_other + i;
      return HalfScales{{low, low + kHalf}, {inverse, inverse + kHalf}, {}};
    }
    const float *low = block.low + in.k, *inverse = block.inverse + in.k;
    const int64_t k = in.k;
    in.advance();
    if (kUnit == kGroup || n - i <= kHalf) return HalfScales{{low, low}, {inverse, inverse}, {k, k}};
    const HalfScales two{{low, block.low + in.k}, {inverse, block.inverse + in.k}, {k, in.k}};
    in.advance();
    return two;
  };
  const Feedback feedback = tile.feedback;
  // The residual of the group at i.
  const auto lose = [&](int64_t i, const HalfScales& scales) {
    for (int half = 0; half < 2; half++) {
      const float unit = tile.scales.unit[scales.k[half]];
      const float low = tile.scales.low ? tile.scales.low[scales.k[half]] : -(tile.scales.offset * unit);
      lose_half(feedback, block.x + from, tile.codes, low, unit, i + half * kHalf);
    }
  };
  const float *x = block.x + from, *ahead = tile.ahead, *also = tile.also;
  uint8_t* codes = tile.codes;
  uint32_t counter = tile.counter;
  Words seen = {};
  int64_t i = 0;
  if constexpr (kUnit > 0 && kOrigin != kSaturating) {
    if (Block* next = tile.next) {
      const int64_t left = next->n - from, ready = left < whole ? left / kGroup * kGroup : whole;
      float *low = next->low + from / kUnit, *high = next->high + from / kUnit;
      const float* y = next->x + from;
      for (; i < ready; i += kGroup, counter += kHalf) {
        if (ahead) prefetch(ahead + i), prefetch(ahead + i + kHalf);
        if (kFeedback && also) prefetch(also + i), prefetch(also + i + kHalf);
        for (int u = 0; u < kGroup; u += kUnit) {
          if (kFeedback && feedback.x) add_unit<kUnit>(feedback, i + u);
          if constexpr (kOrigin == kFromLow) {
            unit_extrema<kUnit>(y + i + u, *low++, *high++);
          } else {
            *high++ = unit_largest<kUnit>(y + i + u);
          }
        }
        const HalfScales scales = scales_at(i);
        quantize_group<false, kOrigin, kRandom>(x + i, scales, draws, coding, counter, codes + i, seen);
        if (kFeedback && feedback.next) lose(i, scales);
      }
    }
  }
  for (; i < whole; i += kGroup, counter += kHalf) {
    if (ahead) prefetch(ahead + i), prefetch(ahead + i + kHalf);
    if (kFeedback && also) prefetch(also + i), prefetch(also + i + kHalf);
    const HalfScales scales = scales_at(i);
    quantize_group<kUnit == 0, kOrigin, kRandom>(x + i, scales, draws, coding, counter, codes + i, seen);
    if (kFeedback && feedback.next) lose(i, scales);
  }
  if (i < n) {
    quantize_last<kUnit == 0, kOrigin, kRandom>(x + i, n - i, scales_at(i), draws, coding, counter, codes + i, seen);
  }
  return seen;
}

// Writes the decoded values of a tile to y, as a receiver would decode them.
static void write_decoded(const Job& job, const Row& row, const Tile& tile, const Scales& scales, Scratch& s) {
  if (job.y_dtype == kFloat32) {
    float* y = (float*)job.y + row.start + tile.at;
    const float* ahead = job.y == job.own ? nullptr : ahead_of((const float*)job.y, row, tile.at);
    dequantize(tile.codes, scales, job.form.bucket, tile.at, tile.n, Sink{kStore, 1.0f, y, y, ahead}, s);
    return;
  }
  dequantize(tile.codes, scales, job.form.bucket, tile.at, tile.n, Sink{kStore, 1.0f, s.tile, s.tile, nullptr}, s);
  write_floats(s.tile, tile.n, job.y, job.y_dtype, row.start + tile.at);
}

// Dividing by it is multiplying by its inverse, which is faster.
static inline bool is_power_of_two(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return (bits & 0x7FFFFF) == 0;
}

// Writes the residual of the tile's codes from `first` on.
static void write_lost(const Job& job, const Row& row, const Tile& tile, int64_t first, Scratch& s) {
  const int64_t at = tile.at + first, n = tile.n - first;
  const bool power = is_power_of_two(job.loss_scale), in_place = job.next == job.now;
  float* next = job.next + row.start + at;
  const Sink sink{power ? kLost : kLostOver, power ? 1.0f / job.loss_scale : job.loss_scale,
                  tile.block.x + (at - tile.block.at), in_place ? next : s.tile, nullptr};
  if (n) dequantize(tile.codes + first, tile.scales, job.form.bucket, at, n, sink, s);
  if (!in_place) stream(s.tile, n, next);
}

struct Encoder {
  const Job& job;
  const Format& form;
  const Row& row;
  Scratch& s;
  const Draws draws;
  const Coding coding;
  const bool as_is;   // the values are neither converted nor summed
  const bool direct;  // and are read in place
  const int64_t unit; // elements whose extrema are computed together; 0 if buckets may end anywhere
  const bool beside;  // the extrema of a block are computed together with the codes of the previous one
  const bool loads_beside; // and its values are computed there, too
  const int64_t buckets;
  uint8_t* const payload;
  uint8_t* const packed;

  Encoder(const Job& job, const Row& row, Scratch& s)
      : job(job), form(job.form), row(row), s(s), draws(job.key, row), coding(form, draws), as_is(taken_as_is(job)), direct(Blocks(job).direct),
        unit(form.bucket % kHalf ? 0 : form.bucket % kGroup ? kHalf : kGroup),
        beside(unit && !form.summed() && !form.saturates()), loads_beside(beside && as_is && job.now), buckets(num_buckets(row.numel, form.bucket)),
        payload(job.out + row.payload), packed(payload + codes_at(row.numel, form)) {}

  template <Origin kOrigin, bool kRandom>
  Words quantize_as(const Tile& tile) const {
    if (unit && job.next) {
      return unit == kGroup ? quantize_tile<kGroup, kOrigin, kRandom, true>(tile, draws, coding, s)
                            : quantize_tile<kHalf, kOrigin, kRandom, true>(tile, draws, coding, s);
    }
    return unit == kGroup  ? quantize_tile<kGroup, kOrigin, kRandom, false>(tile, draws, coding, s)
           : unit == kHalf ? quantize_tile<kHalf, kOrigin, kRandom, false>(tile, draws, coding, s)
                           : quantize_tile<0, kOrigin, kRandom, false>(tile, draws, coding, s);
  }

  template <bool kRandom>
  Words quantize(const Tile& tile) const {
    return form.scheme == kMinMax ? quantize_as<kFromLow, kRandom>(tile)
           : form.saturates()     ? quantize_as<kSaturating, kRandom>(tile)
                                  : quantize_as<kFromZero, kRandom>(tile);
  }

  // Buckets that decode to NaN have codes 0. (Min-max's come out so.)
  void clear_spoilt(const Tile& tile) const {
    for (int64_t i = 0, k = tile.at / form.bucket; i < tile.n; k++) {
      const int64_t end = (k + 1) * form.bucket - tile.at, until = end < tile.n ? end : tile.n;
      const float unit = tile.block.unit[k - tile.block.first];
      if (unit != unit) std::memset(tile.codes + i, 0, until - i);
      i = until;
    }
  }

  Scales scales_of(const Block& block) const {
    const float* low = form.rounding == kShift ? block.sent : block.low;
    return {form.num_scales() == 2 ? low : nullptr, block.unit, block.first, form.offset()};
  }

  // Error feedback to be done together with the codes of the tile at element i of a block.
  Feedback feedback_of(const Block& block, Block* next, int64_t i) const {
    Feedback f;
    if (!job.next || !unit || form.scheme >= kSides) return f;
    f.scale = job.loss_scale, f.inverse = 1.0f / job.loss_scale;
    if (next && loads_beside) {
      const int64_t at = row.start + next->at + i;
      f.x = (const float*)job.own + at, f.now = job.now + at, f.values = next->values + i;
    }
    float* to = job.next + row.start + block.at + i;
    f.past_caches = job.next != job.now;
    if (is_power_of_two(job.loss_scale) && !(f.past_caches && (uintptr_t)to % 64)) f.next = to;
    return f;
  }

  float shift() const { return 0.5f - (float)coding.noise / 65536.0f; }

  // Puts the codes of a block whose scales are known. Returns whether a NaN was seen in it, or infinity.
  bool codes(const Block& block, Block* next) const {
    Words seen = {};
    const bool spoilt = form.scheme != kMinMax && holds_nan(block.unit, block.count);
    const Scales scales = scales_of(block);
    for (int64_t i = 0; i < block.n; i += kTile) {
      const int64_t at = block.at + i, n = block.n - i < kTile ? block.n - i : kTile;
      uint8_t* to = packed + at / kGroup * 16 * form.bits;
      const float* ahead = as_is ? ahead_of((const float*)job.own, row, at + block.n) : nullptr;
      const float* also = job.now ? ahead_of(job.now, row, at + block.n) : nullptr;
      const Tile tile{block, at, n, form.bucket, (uint32_t)((row.index0 + at) / 2), next, ahead, also,
                      form.bits == 8 ? to : s.codes, scales, feedback_of(block, next, i)};
      if (form.scheme >= kSides) {
        quantize_signs(block.x + i, n, tile.codes, ahead, also);
      } else {
        seen |= form.rounding == kStochastic ? quantize<true>(tile) : quantize<false>(tile);
      }
      if (spoilt) clear_spoilt(tile);
      if (form.bits < 8) pack(s.codes, ceil_div(n, kGroup), form.bits, to);
      if (job.y) write_decoded(job, row, tile, scales, s);
      if (job.next) write_lost(job, row, tile, tile.feedback.next ? n / kGroup * kGroup : 0, s);
    }
    if (block.at + block.n == row.numel) zero_padding();
    uint32_t all = 0;
    for (int i = 0; i < kLanes; i++) all |= seen[i];
    return all > 0xFF;
  }

  void zero_padding() const {
    const int64_t meta = 4 * form.num_scales() * buckets, codes = ceil_div(row.numel, kGroup) * 16 * form.bits;
    std::memset(payload + meta, 0, align64(meta) - meta);
    std::memset(packed + codes, 0, align64(codes) - codes);
  }

  // The block of elements [at, at + n), which begins at a bucket and a group and ends at one or at the row's end.
  void load(Block& block, int64_t at, int64_t n) const {
    block.x = direct ? (const float*)job.own + row.start + at : block.values;
    block.at = at, block.n = n;
    block.first = at / form.bucket, block.count = num_buckets(n, form.bucket);
    if (!direct) load_values(job, row, at, n, block.values, s);
  }

  // The same, without whole groups, which the loop that codes the previous block handles.
  void load_rest(Block& block, int64_t at, int64_t n) const {
    block.x = block.values, block.at = at, block.n = n;
    block.first = at / form.bucket, block.count = num_buckets(n, form.bucket);
    const int64_t rest = n / kGroup * kGroup;
    load_values(job, row, at + rest, n - rest, block.values + rest, s);
  }

  // Extrema of x[0, n), or the largest magnitude.
  void measure(const float* x, int64_t n, float& low, float& high) const {
    if (form.scheme == kMinMax) return extrema(x, n, low, high);
    high = largest(x, n);
  }

  // Computes the extrema or sums of all buckets of a block.
  void measure(Block& block) const {
    for (int64_t k = 0, from = 0; k < block.count; k++, from += form.bucket) {
      const int64_t left = block.n - from, n = left < form.bucket ? left : form.bucket;
      if (!form.summed()) {
        measure(block.x + from, n, block.low[k], block.high[k]);
        continue;
      }
      Gathered found(form);
      found.add(block.x + from, n);
      found.finish(block.low[k], block.high[k]);
    }
  }

  // The same, with those of the units of all whole groups given.
  void merge_units(Block& block) const {
    const int64_t each = form.bucket / unit;
    int64_t units = block.n / kGroup * (kGroup / unit);
    for (int64_t from = units * unit; from < block.n; from += unit, units++) {
      const int64_t left = block.n - from;
      measure(block.x + from, left < unit ? left : unit, block.low[units], block.high[units]);
    }
    for (int64_t k = 0; k < block.count && each > 1; k++) {
      const int64_t first = k * each, count = units - first < each ? units - first : each;
      float low, high, other;
      measure(block.high + first, count, other, high);
      if (form.scheme == kMinMax) extrema(block.low + first, count, low, other), block.low[k] = low;
      block.high[k] = high;
    }
  }

  void put_scales(Block& block) const {
    finish_scales(form, block.low, block.high, block.unit, block.inverse, block.count);
    if (form.rounding == kShift) shift_lows(block.low, block.unit, block.count, shift(), block.sent);
    send_scales(scales_of(block).low, block.unit, block.first, block.count);
  }

  void send_scales(const float* low, const float* unit, int64_t first, int64_t count) const {
    if (low) std::memcpy(payload + 4 * first, low, 4 * count);
    std::memcpy(payload + 4 * (low ? buckets + first : first), unit, 4 * count);
  }

  // Finds the buckets whose minimum ignored a NaN; returns whether there are any.
  bool find_nan(Block& block) const {
    bool found = false;
    for (int64_t k = 0, from = 0; k < block.count; k++, from += form.bucket) {
      const int64_t left = block.n - from;
      if (block.low[k] != block.low[k] || !holds_nan(block.x + from, left < form.bucket ? left : form.bucket)) continue;
      block.low[k] = quiet_nan(), found = true;
    }
    return found;
  }

  // Blocks [begin, end) of `size` elements: the codes of one and the extrema of the next side by side.
  void run(int64_t begin, int64_t end, int64_t size, Block* blocks) const {
    const auto load_block = [&](int64_t b) {
      const int64_t n = row.numel - b * size < size ? row.numel - b * size : size;
      b > begin && loads_beside ? load_rest(blocks[b % 2], b * size, n) : load(blocks[b % 2], b * size, n);
    };
    load_block(begin);
    measure(blocks[begin % 2]);
    for (int64_t b = begin; b < end; b++) {
      Block &block = blocks[b % 2], *next = b + 1 < end ? &blocks[(b + 1) % 2] : nullptr;
      put_scales(block);
      if (next) load_block(b + 1);
      if (codes(block, beside ? next : nullptr) && find_nan(block)) {
        put_scales(block);
        codes(block, nullptr);
      }
      if (next) beside ? merge_units(*next) : measure(*next);
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
  if (job.next) settle_stores();
}
