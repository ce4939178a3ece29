// The sums and maxima from which the scales of max-abs, norm, sides and sign are computed. Included inside a level's
// namespace.

typedef float HalfFloats __attribute__((vector_size(2 * kLanes)));
typedef int32_t HalfInts __attribute__((vector_size(2 * kLanes)));
typedef double Doubles __attribute__((vector_size(4 * kLanes)));

constexpr int kSumLanes = 16; // element i of a bucket is added to lane i % 16
constexpr int kPart = kLanes / 2;
constexpr int kSumVectors = kSumLanes / kPart;

// max |x| of kUnit elements; NaN if there is one.
template <int kUnit>
THINWIRE_WITHIN static inline float unit_largest(const float* x) {
  Ints most = magnitude(load<Floats>(x));
  for (int j = kLanes; j < kUnit; j += kLanes) most = greater_int(most, magnitude(load<Floats>(x + j)));
  return across_greater_int(most);
}

THINWIRE_APART static float largest(const float* x, int64_t n) {
  Ints most = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) most = greater_int(most, magnitude(load<Floats>(x + i)));
  float rest[kLanes] = {};
  for (int j = 0; i < n; i++, j++) rest[j] = x[i];
  return across_greater_int(greater_int(most, magnitude(load<Floats>(rest))));
}

enum Term { kAbsolute, kSquare, kNegative, kOther };

template <Term kTerm>
static inline Doubles term(const float* x) {
  const HalfFloats v = load<HalfFloats>(x);
  HalfInts bits = bits_of<HalfInts>(v);
  if (kTerm == kAbsolute) bits &= 0x7FFFFFFF;
  if (kTerm == kNegative) bits &= ~(v >= HalfFloats{});
  if (kTerm == kOther) bits &= v >= HalfFloats{};
  const Doubles wide = __builtin_convertvector(bits_of<HalfFloats>(bits), Doubles);
  return kTerm == kSquare ? wide * wide : wide;
}

// Adds the terms of x[0, n), of which element 0 belongs to lane 0.
template <Term kTerm>
THINWIRE_APART static void add_terms(const float* x, int64_t n, double* lanes) {
  Doubles sums[kSumVectors];
  for (int v = 0; v < kSumVectors; v++) sums[v] = load<Doubles>(lanes + v * kPart);
  int64_t i = 0;
  for (; i + kSumLanes <= n; i += kSumLanes) {
    for (int v = 0; v < kSumVectors; v++) sums[v] += term<kTerm>(x + i + v * kPart);
  }
  if (i < n) {
    float rest[kSumLanes] = {};
    for (int j = 0; i < n; i++, j++) rest[j] = x[i];
    for (int v = 0; v < kSumVectors; v++) sums[v] += term<kTerm>(rest + v * kPart);
  }
  for (int v = 0; v < kSumVectors; v++) store(lanes + v * kPart, sums[v]);
}

THINWIRE_APART static int64_t count_others(const float* x, int64_t n) {
  Ints counts = {};
  int64_t i = 0, total = 0;
  for (; i + kLanes <= n; i += kLanes) counts -= load<Floats>(x + i) >= Floats{};
  for (; i < n; i++) total += x[i] >= 0.0f;
  for (int j = 0; j < kLanes; j++) total += counts[j];
  return total;
}

// The sum of all lanes, by halves, which it overwrites.
template <class T>
static T across(T* lanes) {
  for (int width = kSumLanes / 2; width; width /= 2) {
    for (int j = 0; j < width; j++) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

// The statistics of one bucket, accumulated piece by piece: all pieces but the last are multiples of the 16 lanes.
struct Gathered {
  const Format& form;
  alignas(64) double lanes[kSumLanes] = {};
  alignas(64) double others[kSumLanes];
  int64_t n = 0, num_others = 0;
  float most = 0.0f;

  explicit Gathered(const Format& form) : form(form) {
    if (form.scheme == kSides) std::memset(others, 0, sizeof others);
  }

  void add(const float* x, int64_t count) {
    n += count;
    switch (form.scheme) {
    case kMaxAbs: {
      const float here = largest(x, count);
      most = here <= most ? most : here; // also if it is NaN
      return add_terms<kSquare>(x, count, lanes);
    }
    case kNorm: return add_terms<kSquare>(x, count, lanes);
    case kSign: return add_terms<kAbsolute>(x, count, lanes);
    case kSides:
      num_others += count_others(x, count);
      add_terms<kNegative>(x, count, lanes), add_terms<kOther>(x, count, others);
      return;
    case kMinMax: return;
    }
  }

  // The input of finish_scales().
  void finish(float& low, float& high) {
    const double sum = across(lanes), mean = sum / (double)n;
    switch (form.scheme) {
    case kMaxAbs: {
      const float bound = (float)std::sqrt(mean) * form.clip;
      high = most <= kLargest && bound < most ? bound : most;
      return;
    }
    case kNorm: high = (float)std::sqrt(sum); return;
    case kSign: high = (float)(2.0 * mean); return;
    case kSides: {
      const double below = sum / (double)(n - num_others), above = across(others) / (double)num_others;
      low = (float)(num_others == n ? above : below), high = (float)(num_others == 0 ? below : above);
      return;
    }
    case kMinMax: return;
    }
  }
};
