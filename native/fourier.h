// Transforms of single blocks of real values. Included inside a level's namespace.
//
// A block's n values are taken as n / 2 complex ones, z[j] = x[2j] + i x[2j + 1], whose transform gives the components of
// the real values. It is of radix 4, by decimation in frequency, whose result is in the order of reversed bits: of many
// short transforms in the end, a vector's lanes compute one each, and their results, transposed, are in order. All
// arithmetic is element by element, so that results do not depend on a vector's lanes.

template <int kWidth>
struct Lanes {
  typedef float Real __attribute__((vector_size(4 * kWidth)));
  typedef int32_t Order __attribute__((vector_size(4 * kWidth)));
  struct Complex {
    Real re, im;
  };
};

template <class C>
static inline C times(C a, C w) {
  return {a.re * w.re - a.im * w.im, a.re * w.im + a.im * w.re};
}

// The lanes of a and b, numbered through, that order(lane) names.
#if defined(__clang__)
template <int kWidth, class Order>
static inline typename Lanes<kWidth>::Real pick_lanes(typename Lanes<kWidth>::Real a, typename Lanes<kWidth>::Real b,
                                                      Order order) {
  float from[2 * kWidth], to[kWidth];
  std::memcpy(from, &a, sizeof a), std::memcpy(from + kWidth, &b, sizeof b);
  for (int i = 0; i < kWidth; i++) to[i] = from[order(i)];
  return load<typename Lanes<kWidth>::Real>(to);
}
#else
template <int kWidth, class Order>
static inline typename Lanes<kWidth>::Real pick_lanes(typename Lanes<kWidth>::Real a, typename Lanes<kWidth>::Real b,
                                                      Order order) {
  typename Lanes<kWidth>::Order from;
  for (int i = 0; i < kWidth; i++) from[i] = order(i);
  return __builtin_shuffle(a, b, from);
}
#endif

template <int kWidth, class C>
static inline C reversed(C v) {
  const auto order = [](int i) { return kWidth - 1 - i; };
  return {pick_lanes<kWidth>(v.re, v.re, order), pick_lanes<kWidth>(v.im, v.im, order)};
}

// From pairs, and to pairs, of a real and an imaginary part.
template <int kWidth>
static inline typename Lanes<kWidth>::Complex load_pairs(const float* p) {
  using Real = typename Lanes<kWidth>::Real;
  const Real a = load<Real>(p), b = load<Real>(p + kWidth);
  return {pick_lanes<kWidth>(a, b, [](int i) { return 2 * i; }),
          pick_lanes<kWidth>(a, b, [](int i) { return 2 * i + 1; })};
}
template <int kWidth>
static inline void store_pairs(float* p, typename Lanes<kWidth>::Complex v) {
  const auto at = [](int first) { return [first](int i) { return first + i / 2 + i % 2 * kWidth; }; };
  store(p, pick_lanes<kWidth>(v.re, v.im, at(0))), store(p + kWidth, pick_lanes<kWidth>(v.re, v.im, at(kWidth / 2)));
}

template <int kWidth, int kStep = 1>
static inline void transpose(typename Lanes<kWidth>::Real* rows) {
  for (int i = 0; i < kWidth; i++) {
    if (i & kStep) continue;
    const auto a = rows[i], b = rows[i + kStep];
    rows[i] = pick_lanes<kWidth>(a, b, [](int k) { return k & kStep ? k - kStep + kWidth : k; });
    rows[i + kStep] = pick_lanes<kWidth>(a, b, [](int k) { return k & kStep ? k + kWidth : k + kStep; });
  }
  if constexpr (2 * kStep < kWidth) transpose<kWidth, 2 * kStep>(rows);
}

// One step of a transform of four parts.
template <class C>
static inline void butterfly(C& a, C& b, C& c, C& d) {
  const C ac = {a.re + c.re, a.im + c.im}, bd = {b.re + d.re, b.im + d.im};
  const C rest = {a.re - c.re, a.im - c.im}, other = {b.re - d.re, b.im - d.im};
  a = {ac.re + bd.re, ac.im + bd.im}, b = {ac.re - bd.re, ac.im - bd.im};
  c = {rest.re + other.im, rest.im - other.re}, d = {rest.re - other.im, rest.im + other.re};
}

// Factors of one step of a transform of n values: those of its second, third and fourth part, real and imaginary parts.
static float* fill_factors(float* to, const float* roots, int64_t block, int64_t n) {
  const int64_t powers[] = {2, 1, 3};
  for (const int64_t power : powers) {
    for (int64_t j = 0; j < n / 4; j++) to[j] = roots[block / n * power * j];
    for (int64_t j = 0; j < n / 4; j++) to[n / 4 + j] = roots[block + block / n * power * j];
    to += n / 2;
  }
  return to;
}

// With the factors of a vector's lanes, those of each part `quarter` behind those before it.
template <int kWidth, class C>
static inline void turned_butterfly(C* v, const float* w, int64_t quarter) {
  butterfly(v[0], v[1], v[2], v[3]);
  for (int p = 1; p < 4; p++, w += 2 * quarter) {
    v[p] = times(v[p], C{load<decltype(C::re)>(w), load<decltype(C::re)>(w + quarter)});
  }
}

// The transforms of every kSize of kAll values.
template <int kSize, int kAll, class C>
static inline void transform_lanes(C* v, const float* w) {
  if constexpr (kSize >= 4) {
    constexpr int kQuarter = kSize / 4;
    for (int at = 0; at < kAll; at += kSize) {
      for (int j = at; j < at + kQuarter; j++) {
        butterfly(v[j], v[j + kQuarter], v[j + 2 * kQuarter], v[j + 3 * kQuarter]);
        for (int p = 1; p < 4 && j > at; p++) {
          const float* own = w + 2 * (p - 1) * kQuarter + j - at;
          v[j + p * kQuarter] = times(v[j + p * kQuarter], C{own[0] - decltype(C::re){}, own[kQuarter] - decltype(C::re){}});
        }
      }
    }
    transform_lanes<kQuarter, kAll>(v, w + 6 * kQuarter);
  } else if constexpr (kSize == 2) {
    for (int at = 0; at < kAll; at += 2) {
      const C a = v[at], b = v[at + 1];
      v[at] = {a.re + b.re, a.im + b.im}, v[at + 1] = {a.re - b.re, a.im - b.im};
    }
  }
}

// Real and imaginary parts of values.
struct Places {
  float *re, *im;
  template <class C>
  C get(int64_t i) const {
    return {load<decltype(C::re)>(re + i), load<decltype(C::re)>(im + i)};
  }
  template <class C>
  void put(int64_t i, C v) const {
    store(re + i, v.re), store(im + i, v.im);
  }
};

static inline uint32_t reverse_bits(uint32_t v, int bits) {
  uint32_t reverse = 0;
  for (int i = 0; i < bits; i++) reverse = reverse << 1 | (v >> i & 1);
  return reverse;
}

// The transform of blocks of one size, with its tables and the values it works on.
struct Fourier {
  const int64_t block, half;
  const Places turns; // exp(-2 pi i k / block)
  float *re, *im;         // what is transformed, `half` values
  float *out_re, *out_im; // the result, in order, with room for a vector more
  float* factors;         // of all steps, in turn
  uint32_t* order;        // the short transform that a lane computes

  // Of memory for all of these: four times half a block, factors of twice that, less than half a block of numbers, and
  // room.
  static int64_t bytes(int64_t block) { return 4 * (5 * block + 256); }
  Fourier(int64_t block, const float* roots, void* memory)
      : block(block), half(block / 2), turns{const_cast<float*>(roots), const_cast<float*>(roots + block)},
        re(static_cast<float*>(memory)), im(re + half + 16), out_re(im + half + 16), out_im(out_re + half + 48),
        factors(out_im + half + 48) {
    float* end = factors;
    for (int64_t n = half; n >= 4; n /= 4) end = fill_factors(end, roots, block, n);
    order = reinterpret_cast<uint32_t*>(end);
    const int64_t transforms = half / last(width());
    for (int64_t i = 0; i < transforms; i++) order[i] = reverse_bits((uint32_t)i, __builtin_ctzll(transforms));
  }
  // Lanes that are used: so many short transforms, at least, have to be left in the end.
  static constexpr int kHalf = kLanes > 8 ? 8 : kLanes;
  int64_t width() const { return half >= kLanes * last(kLanes) ? kLanes : half >= kHalf * last(kHalf) ? kHalf : 4; }
  // The size of these transforms.
  int64_t last(int64_t lanes) const {
    int64_t n = half;
    while (n / 4 >= lanes) n /= 4;
    return n;
  }

  // Calls load_values(i) for the kWidth values from i on, and store_values(i, values) for their transform.
  template <int kWidth, class Load, class Store>
  void run_on(Load load_values, Store store_values) const {
    const float* w = first_step<kWidth>(load_values);
    int64_t n = half / 4;
    for (; n / 4 >= kWidth; n /= 4) w = step<kWidth>(n, w);
    n == kWidth ? run_last<kWidth, kWidth>(w, store_values) : run_last<kWidth, 2 * kWidth>(w, store_values);
  }

  template <int kWidth, class Load>
  const float* first_step(Load load_values) const {
    using C = typename Lanes<kWidth>::Complex;
    const int64_t quarter = half / 4;
    const Places to = {re, im};
    const float* const w = factors;
    for (int64_t j = 0; j < quarter; j += kWidth) {
      C v[4];
      for (int p = 0; p < 4; p++) v[p] = load_values(j + p * quarter);
      turned_butterfly<kWidth>(v, w + j, quarter);
      for (int p = 0; p < 4; p++) to.put(j + p * quarter, v[p]);
    }
    return w + 6 * quarter;
  }

  template <int kWidth>
  const float* step(int64_t n, const float* w) const {
    using C = typename Lanes<kWidth>::Complex;
    const int64_t quarter = n / 4, end = half;
    const Places in = {re, im};
    for (int64_t at = 0; at < end; at += n) {
      for (int64_t j = 0; j < quarter; j += kWidth) {
        C v[4];
        for (int p = 0; p < 4; p++) v[p] = in.get<C>(at + j + p * quarter);
        turned_butterfly<kWidth>(v, w + j, quarter);
        for (int p = 0; p < 4; p++) in.put(at + j + p * quarter, v[p]);
      }
    }
    return w + 6 * quarter;
  }

  // The short transforms, a lane each, in such an order that their results are.
  template <int kWidth, int kSize, class Store>
  void run_last(const float* w, Store store_values) const {
    using C = typename Lanes<kWidth>::Complex;
    using Real = typename Lanes<kWidth>::Real;
    const int64_t transforms = half / kSize;
    const Places in = {re, im};
    const uint32_t* const from = order;
    for (int64_t first = 0; first < transforms; first += kWidth) {
      C v[kSize];
      for (int part = 0; part < kSize; part += kWidth) {
        Real a[kWidth], b[kWidth];
        for (int lane = 0; lane < kWidth; lane++) {
          const C row = in.get<C>(from[first + lane] * kSize + part);
          a[lane] = row.re, b[lane] = row.im;
        }
        transpose<kWidth>(a), transpose<kWidth>(b);
        for (int i = 0; i < kWidth; i++) v[part + i] = C{a[i], b[i]};
      }
      transform_lanes<kSize, kSize>(v, w);
      for (int i = 0; i < kSize; i++) store_values(first + transforms * reverse_bits(i, __builtin_ctz(kSize)), v[i]);
    }
  }

  // From a block's values to its components' real and imaginary parts, half + 1 each, with room for a vector more.
  template <int kWidth>
  void analyze_on(const float* x, float* real, float* imaginary) const {
    using C = typename Lanes<kWidth>::Complex;
    const Places out = {out_re, out_im};
    const int64_t ahead = 1024; // of blocks that follow
    const auto load_values = [=](int64_t i) {
      for (int at = 0; at < 2 * kWidth; at += 16) __builtin_prefetch(x + ahead + 2 * i + at, 0, 3); // of the next block
      return load_pairs<kWidth>(x + 2 * i);
    };
    run_on<kWidth>(load_values, [out](int64_t i, C v) { out.put(i, v); });
    const int64_t end = half, middle = half / 2;
    out.re[end] = out.re[0], out.im[end] = out.im[0];
    const float scale = 0.5f / std::sqrt((float)block);
    const Places to = {real, imaginary}, turn = turns;
    for (int64_t t = 0; t < middle; t += kWidth) {
      // Of t and of half - t: both are made of the same two values.
      const int64_t other = end - t - (kWidth - 1);
      const C a = out.get<C>(t), b = reversed<kWidth>(out.get<C>(other));
      const C even = {(a.re + b.re) * scale, (a.im - b.im) * scale};
      const C turned = times(C{a.re - b.re, a.im + b.im}, turn.get<C>(t));
      const C odd = {turned.re * scale, turned.im * scale};
      to.put(t, C{even.re + odd.im, even.im - odd.re});
      to.put(other, reversed<kWidth>(C{even.re - odd.im, -(even.im + odd.re)}));
    }
    real[middle] = out.re[middle] * (2.0f * scale), imaginary[middle] = out.im[middle] * (-2.0f * scale);
    imaginary[end] = 0.0f;
  }
  void analyze(const float* x, float* real, float* imaginary) const {
    const int64_t lanes = width();
    if (lanes == kLanes) return analyze_on<kLanes>(x, real, imaginary);
    lanes == kHalf ? analyze_on<kHalf>(x, real, imaginary) : analyze_on<4>(x, real, imaginary);
  }

  // From components to `scale` times the block's values: the transform of conjugates, conjugated.
  template <int kWidth>
  void synthesise_on(const float* real, const float* imaginary, float scale, float* x) const {
    using C = typename Lanes<kWidth>::Complex;
    using Real = typename Lanes<kWidth>::Real;
    const float factor = scale / std::sqrt((float)block);
    const Places in = {const_cast<float*>(real), const_cast<float*>(imaginary)}, turn = turns;
    const int64_t end = half;
    run_on<kWidth>(
        [=](int64_t t) {
          // With the components half - t - i, from the last on.
          const C a = in.get<C>(t), b = reversed<kWidth>(in.get<C>(end - t - (kWidth - 1)));
          const C w = turn.get<C>(t);
          const C odd = times(C{a.re - b.re, a.im + b.im}, C{w.re, Real{} - w.im});
          return C{(a.re + b.re - odd.im) * factor, (b.im - a.im - odd.re) * factor};
        },
        [x](int64_t i, C v) { store_pairs<kWidth>(x + 2 * i, C{v.re, Real{} - v.im}); });
  }
  void synthesise(const float* real, const float* imaginary, float scale, float* x) const {
    const int64_t lanes = width();
    if (lanes == kLanes) return synthesise_on<kLanes>(real, imaginary, scale, x);
    lanes == kHalf ? synthesise_on<kHalf>(real, imaginary, scale, x) : synthesise_on<4>(real, imaginary, scale, x);
  }
};
