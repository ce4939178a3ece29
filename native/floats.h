// Powers of two, range floats, integers, element by element; learned levels and magnitudes, whose arithmetic is in
// levels.h and magnitudes.h.
#pragma once
#include "dispatch.h"

namespace thinwire {

constexpr int64_t kHeader = 64; // bytes at the start of a payload of floats

enum class FloatRounding : int { kTruncate = 0, kNearest = 1, kStochastic = 2 };

struct Found { // properties of a row's values; merged atomically
  int64_t saturated, nonfinite;
};

struct FloatJob : Job {
  const float* params = nullptr; // per row: max and mantissa, levels, alpha, or factor; for all rows: magnitudes
  FloatRounding rounding = FloatRounding::kTruncate;
  int bits = 0;
  int shift = 0;         // of the exponents of powers of two
  int64_t bucket = 0;    // of learned levels and magnitudes
  bool nearest = false;  // of integers
  int width = 0;         // bytes of an integer
  float clip = 0.0f;
  uint8_t* integers = nullptr;
  Found* found = nullptr; // per row
};

struct FloatKernels {
  // Tiles [begin, end) of kTile elements of all rows, in table order.
  void (*natural_encode)(const FloatJob&, int64_t begin, int64_t end);
  void (*natural_decode)(const FloatJob&, int64_t begin, int64_t end);
  void (*range_encode)(const FloatJob&, int64_t begin, int64_t end);
  void (*range_decode)(const FloatJob&, int64_t begin, int64_t end);
  void (*levels_decode)(const FloatJob&, int64_t begin, int64_t end);
  void (*int_round)(const FloatJob&, int64_t begin, int64_t end);
  void (*int_decode)(const FloatJob&, int64_t begin, int64_t end);
  // Blocks [begin, end) of levels_block() elements.
  void (*levels_encode)(const FloatJob&, int64_t begin, int64_t end);
  void (*magnitudes_encode)(const FloatJob&, int64_t begin, int64_t end);
  // Tiles, as above.
  void (*magnitudes_decode)(const FloatJob&, int64_t begin, int64_t end);
};

namespace {

// Elements of a block whose buckets are measured and then coded: whole buckets and groups, or a whole row.
inline int64_t levels_block(int64_t numel, int64_t bucket) {
  constexpr int64_t kWhole = int64_t(1) << 20;
  if (bucket > kWhole) return numel;
  const int64_t grain = grain_of(bucket);
  return grain >= kLoaded ? grain : kLoaded / grain * grain;
}

} // namespace

#if defined(THINWIRE_LEVEL)

namespace THINWIRE_LEVEL {
namespace {

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

#include "levels.h"
#include "magnitudes.h"

const FloatKernels float_kernels = {
    natural_encode, natural_decode, range_encode, range_decode, levels_decode, int_round, int_decode, levels_encode,
    magnitudes_encode, magnitudes_decode,
};

} // namespace
} // namespace THINWIRE_LEVEL

#else

namespace {

// Writes the properties of the rows into headers.
void put_headers(const FloatJob& job, bool params) {
  for (int64_t r = 0; r < job.num_rows; r++) {
    if (!job.rows[r].numel) continue;
    uint8_t* header = job.out + job.rows[r].payload;
    const int64_t saturated = job.found[r].saturated;
    const uint32_t words[2] = {job.found[r].nonfinite != 0, saturated < UINT32_MAX ? (uint32_t)saturated : UINT32_MAX};
    std::memset(header, 0, kHeader);
    std::memcpy(header, words, 8);
    std::memcpy(header + 8, &job.shift, 4);
    if (!params) continue;
    const float m = job.params[2 * r + 1];
    const bool whole = m >= 0 && m <= 22 && m == static_cast<float>(static_cast<int>(m));
    const int32_t mantissa = whole ? static_cast<int>(m) : -1;
    std::memcpy(header + 8, job.params + 2 * r, 4), std::memcpy(header + 12, &mantissa, 4);
  }
}

using FloatWork = void (*)(const FloatJob&, int64_t, int64_t);

// Blocks of whole buckets, which are measured before they are coded.
PyObject* run_blocks(Arguments& in, const FloatJob& job, FloatWork kernel) {
  return run_rows(in, job, [&](const Machine& now) {
    int64_t blocks = 0, elements = 0;
    for (int64_t r = 0; r < job.num_rows; r++) {
      const int64_t numel = job.rows[r].numel;
      if (numel) blocks += ceil_div(numel, levels_block(numel, job.bucket)), elements += numel;
    }
    auto work = [&](int64_t begin, int64_t end) { kernel(job, begin, end); };
    return run(now, blocks, elements, work) ? kDone : kThreadsFailed;
  });
}

// With a count for each row, which is written into headers, or into `clipped` if that is not null.
PyObject* run_counted(Arguments& in, FloatJob& job, FloatWork kernel, bool params, int64_t* clipped = nullptr) {
  return run_rows(in, job, [&](const Machine& now) {
    Found few[16] = {};
    void* memory = job.num_rows <= 16 ? nullptr : std::calloc(job.num_rows, sizeof(Found));
    if (job.num_rows > 16 && !memory) return kNoMemory;
    job.found = memory ? static_cast<Found*>(memory) : few;
    const Status status = on_tiles(now, job, kernel);
    if (clipped) {
      for (int64_t r = 0; r < job.num_rows; r++) clipped[r] = job.found[r].saturated;
    } else {
      put_headers(job, params);
    }
    std::free(memory);
    return status;
  });
}

void read_bits(Arguments& in, FloatJob& job, int low, int high) {
  const int64_t bits = in.integer();
  in.require(bits >= low && bits <= high, "bits out of range");
  job.bits = static_cast<int>(bits);
}

void read_bucket(Arguments& in, FloatJob& job) {
  job.bucket = in.integer();
  in.require(job.bucket >= 1 && job.bucket <= (int64_t(1) << 62), "bucket must be 1 to 2**62");
}

void read_width(Arguments& in, FloatJob& job) {
  const int64_t width = in.integer();
  in.require(width == 1 || width == 4, "integers have 1 or 4 bytes");
  job.width = static_cast<int>(width);
}

PyObject* py_natural_encode(Arguments& in) {
  FloatJob job;
  in.source(job), job.out = in.address<uint8_t>();
  const int64_t shift = in.integer();
  in.require(shift >= -18 && shift <= 109, "shift must be -18 to 109");
  job.shift = static_cast<int>(shift), job.key = in.bits64();
  return run_counted(in, job, machine.kernels->floats->natural_encode, false);
}

PyObject* py_natural_decode(Arguments& in) {
  FloatJob job;
  in.message(job), in.target(job);
  job.add = in.flag(), job.scale = in.real();
  return run_tiles(in, job, machine.kernels->floats->natural_decode);
}

PyObject* py_rangefloat_encode(Arguments& in) {
  FloatJob job;
  in.source(job), job.out = in.address<uint8_t>(), job.params = in.address<const float>();
  read_bits(in, job, 3, 15);
  const int64_t rounding = in.integer();
  in.require(rounding >= 0 && rounding <= 2, "rounding must be 0, 1 or 2");
  job.rounding = static_cast<FloatRounding>(rounding);
  job.key = in.bits64();
  return run_counted(in, job, machine.kernels->floats->range_encode, true);
}

PyObject* py_rangefloat_decode(Arguments& in) {
  FloatJob job;
  in.message(job), in.target(job);
  read_bits(in, job, 3, 15);
  job.add = in.flag(), job.scale = in.real();
  return run_tiles(in, job, machine.kernels->floats->range_decode);
}

PyObject* py_levels_encode(Arguments& in) {
  FloatJob job;
  in.source(job), job.out = in.address<uint8_t>(), job.params = in.address<const float>();
  read_bits(in, job, 1, 8);
  read_bucket(in, job);
  return run_blocks(in, job, machine.kernels->floats->levels_encode);
}

PyObject* py_levels_decode(Arguments& in) {
  FloatJob job;
  in.message(job), in.target(job);
  read_bits(in, job, 1, 8);
  read_bucket(in, job);
  job.add = in.flag(), job.scale = in.real();
  return run_tiles(in, job, machine.kernels->floats->levels_decode);
}

PyObject* py_magnitudes_encode(Arguments& in) {
  FloatJob job;
  in.source(job), job.out = in.address<uint8_t>(), job.params = in.address<const float>();
  read_bits(in, job, 1, 4);
  read_bucket(in, job);
  in.residual(job);
  return run_blocks(in, job, machine.kernels->floats->magnitudes_encode);
}

PyObject* py_magnitudes_decode(Arguments& in) {
  FloatJob job;
  in.message(job), in.target(job);
  job.params = in.address<const float>();
  read_bits(in, job, 1, 4);
  read_bucket(in, job);
  job.add = in.flag(), job.scale = in.real();
  return run_tiles(in, job, machine.kernels->floats->magnitudes_decode);
}

PyObject* py_int_round(Arguments& in) {
  FloatJob job;
  in.source(job), job.params = in.address<const float>(), job.integers = in.address<uint8_t>();
  read_width(in, job);
  job.clip = in.real(), job.key = in.bits64(), job.nearest = in.flag();
  int64_t* clipped = in.address<int64_t>();
  return run_counted(in, job, machine.kernels->floats->int_round, false, clipped);
}

PyObject* py_int_decode(Arguments& in) {
  FloatJob job;
  job.integers = in.address<uint8_t>();
  read_width(in, job);
  in.target(job);
  job.params = in.address<const float>();
  return run_tiles(in, job, machine.kernels->floats->int_decode);
}

} // namespace

#endif

} // namespace thinwire
