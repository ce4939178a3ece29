// Spectra of blocks of real values. Included inside a level's namespace.
//
// Every lane of a vector has a block of its own, so the transform is the scalar algorithm, whatever the level. A block's
// n values are taken as n / 2 complex ones, z[j] = x[2j] + i x[2j + 1], whose transform (radix 4, in place, decimation in
// frequency: its result is in the order of reversed bits) gives the components of the real values.

struct Complex {
  Floats re, im;
};

static inline Complex operator+(Complex a, Complex b) { return {a.re + b.re, a.im + b.im}; }
static inline Complex operator-(Complex a, Complex b) { return {a.re - b.re, a.im - b.im}; }
static inline Complex times(Complex a, const float* w) {
  return {a.re * w[0] - a.im * w[1], a.re * w[1] + a.im * w[0]};
}

#if defined(__clang__)
static inline void transpose(Floats* rows) {
  float from[kLanes][kLanes], to[kLanes][kLanes];
  std::memcpy(from, rows, sizeof from);
  for (int i = 0; i < kLanes; i++) {
    for (int j = 0; j < kLanes; j++) to[j][i] = from[i][j];
  }
  std::memcpy(rows, to, sizeof to);
}
#else
template <int kStep>
static inline void transpose_blocks(Floats* rows) { // of kStep x kStep
  const Words lane = lane_numbers(), upper = (lane & kStep) / kStep * (uint32_t)(kLanes - kStep);
  for (int i = 0; i < kLanes; i++) {
    if (i & kStep) continue;
    const Floats a = rows[i], b = rows[i + kStep];
    rows[i] = __builtin_shuffle(a, b, (Ints)(lane + upper));
    rows[i + kStep] = __builtin_shuffle(a, b, (Ints)(lane + kStep + upper));
  }
}
static inline void transpose(Floats* rows) {
  transpose_blocks<1>(rows), transpose_blocks<2>(rows);
  if (kLanes > 4) transpose_blocks<kLanes / 2 < 4 ? 2 : 4>(rows);
  if (kLanes > 8) transpose_blocks<kLanes / 2 < 8 ? 2 : 8>(rows);
}
#endif

// The scratch memory of a call: kLanes blocks as vectors, and their rows, one a block: values, or real parts and, from
// `second` on, imaginary parts. Rows have a length that is no power of two, so that they do not share places in caches.
struct Spectra {
  const int64_t half, second, length;
  Complex* z;
  float *rows, *magnitudes, *values;
  uint32_t *order, *indices;

  Spectra(const Blocked& job, void* scratch)
      : half(job.block / 2), second(half + 16), length(job.block + 48),
        z(reinterpret_cast<Complex*>(((uintptr_t)scratch + 63) / 64 * 64)),
        rows(reinterpret_cast<float*>(z + half)), magnitudes(rows + kTogether * length), values(magnitudes + half + 64),
        order(reinterpret_cast<uint32_t*>(values + half + 64)), indices(order + half + 64) {
    order[0] = 0;
    for (int64_t n = 1; n < half; n *= 2) {
      for (int64_t k = 0; k < n; k++) order[k] *= 2, order[k + n] = order[k] + 1;
    }
  }
  float* row(int lane) const { return rows + lane * length; }
};

// One step of the transform of n values, at least 4; w[2 * step * j] is exp(-2 pi i j / n).
static inline void transform_step(Complex* z, int64_t n, const float* w, int64_t step) {
  const int64_t quarter = n / 4;
  Complex *a = z, *b = z + quarter, *c = b + quarter, *d = c + quarter;
  for (int64_t j = 0; j < quarter; j++) {
    const Complex ac = a[j] + c[j], bd = b[j] + d[j], rest = a[j] - c[j], other = b[j] - d[j];
    const Complex turned = {other.im, Floats{} - other.re};
    a[j] = ac + bd;
    if (j) {
      b[j] = times(ac - bd, w + 4 * step * j);
      c[j] = times(rest + turned, w + 2 * step * j), d[j] = times(rest - turned, w + 6 * step * j);
    } else {
      b[j] = ac - bd, c[j] = rest + turned, d[j] = rest - turned;
    }
  }
}

// Parts that fit into the L1 cache are transformed one after the other.
static void transform(Complex* z, int64_t n, const float* w, int64_t step) {
  constexpr int64_t kCached = 16384 / sizeof(Complex);
  if (n > kCached) {
    transform_step(z, n, w, step);
    for (int64_t at = 0; at < n; at += n / 4) transform(z + at, n / 4, w, 4 * step);
    return;
  }
  int64_t size = n;
  for (; size >= 4; size /= 4, step *= 4) {
    for (int64_t at = 0; at < n; at += size) transform_step(z + at, size, w, step);
  }
  for (int64_t at = 0; size == 2 && at < n; at += 2) {
    const Complex a = z[at], b = z[at + 1];
    z[at] = a + b, z[at + 1] = a - b;
  }
}

// Reads `lanes` blocks, `stride` apart, and writes the rows of their components.
static void analyse(const Blocked& job, int64_t first, int64_t stride, int lanes, Spectra& s) {
  const int64_t n = job.block;
  const float* from[kLanes];
  for (int lane = 0; lane < kLanes; lane++) {
    const int64_t at = (first + lane * stride) * n;
    const int64_t here = lane < lanes ? (job.span.numel - at < n ? job.span.numel - at : n) : 0;
    from[lane] = s.row(lane);
    if (here == n && job.span.dtype == kFloat32) {
      from[lane] = (const float*)job.span.x + job.span.start + at;
    } else {
      if (here) read_floats(job.span.x, job.span.dtype, job.span.start + at, here, s.row(lane));
      std::memset(s.row(lane) + here, 0, 4 * (n - here));
    }
  }
  Floats re[kLanes], im[kLanes];
  for (int64_t t = 0; t < n; t += kLanes) {
    for (int lane = 0; lane < kLanes; lane++) {
      re[lane] = load<Floats>(from[lane] + t), __builtin_prefetch(from[lane] + t + 64, 0, 3);
    }
    transpose(re);
    for (int i = 0; i < kLanes; i += 2) s.z[(t + i) / 2] = Complex{re[i], re[i + 1]};
  }
  transform(s.z, s.half, job.roots, 2);
  const float scale = 0.5f / std::sqrt((float)n);
  for (int64_t t = 0; t < s.half; t += kLanes) {
    for (int i = 0; i < kLanes; i++) {
      const Complex a = s.z[s.order[t + i]], b = s.z[s.order[t + i ? s.half - t - i : 0]];
      const Complex even = {a.re + b.re, a.im - b.im};
      const Complex odd = times(Complex{a.re - b.re, a.im + b.im}, job.roots + 2 * (t + i));
      re[i] = (even.re + odd.im) * scale, im[i] = (even.im - odd.re) * scale;
    }
    transpose(re), transpose(im);
    for (int lane = 0; lane < kLanes; lane++) {
      store(s.row(lane) + t, re[lane]), store(s.row(lane) + s.second + t, im[lane]);
    }
  }
  const Floats last = (s.z[0].re - s.z[0].im) * (2.0f * scale);
  for (int lane = 0; lane < kLanes; lane++) s.row(lane)[s.half] = last[lane], s.row(lane)[s.second + s.half] = 0.0f;
}

static inline void square_magnitudes(const float* row, const Spectra& s) {
  for (int64_t t = 0; t <= s.half; t += kLanes) { // there is room behind the last
    const Floats re = load<Floats>(row + t), im = load<Floats>(row + s.second + t);
    store(s.magnitudes + t, re * re + im * im);
  }
}

static void sample_spectra(const Blocked& job, int64_t stride, int64_t count, uint32_t* keys, void* scratch) {
  Spectra s(job, scratch);
  for (int64_t at = 0; at < count; at += kLanes) {
    const int lanes = count - at < kLanes ? (int)(count - at) : kLanes;
    analyse(job, at * stride, stride, lanes, s);
    for (int lane = 0; lane < lanes; lane++) {
      square_magnitudes(s.row(lane), s);
      for (int64_t k = 0; k <= s.half; k++) *keys++ = key_of(s.magnitudes[k]);
    }
  }
}

static void collect_spectra(const Blocked& job, Candidates& to, float* parts, int64_t begin, int64_t end,
                            void* scratch) {
  Spectra s(job, scratch);
  Words seen = {};
  int64_t total = 0;
  const int64_t last = end * kTogether < job.blocks() ? end * kTogether : job.blocks();
  for (int64_t first = begin * kTogether; first < last; first += kLanes) {
    const int lanes = last - first < kLanes ? (int)(last - first) : kLanes;
    analyse(job, first, 1, lanes, s);
    for (int lane = 0; lane < lanes; lane++) {
      const float* row = s.row(lane);
      const uint32_t base = (uint32_t)((first + lane) * job.components());
      square_magnitudes(row, s);
      const int64_t found = compact(s.magnitudes, s.half + 1, to.least, base, s.indices, s.values, nullptr, seen);
      total += found;
      to.places[first + lane] = Place{0, 0};
      if (!found) continue;
      const int64_t place = __atomic_fetch_add(&to.used, found, __ATOMIC_RELAXED);
      if (place + found > to.capacity) continue;
      to.places[first + lane] = Place{place, found};
      std::memcpy(to.indices + place, s.indices, 4 * found), std::memcpy(to.values + place, s.values, 4 * found);
      for (int64_t j = 0; j < found; j++) {
        const float* at = row + (s.indices[j] - base);
        parts[2 * (place + j)] = at[0], parts[2 * (place + j) + 1] = at[s.second];
      }
    }
  }
  uint32_t bad = 0;
  for (int i = 0; i < kLanes; i++) bad |= seen[i] >> 31;
  __atomic_fetch_add(&to.total, total, __ATOMIC_RELAXED);
  if (bad) __atomic_store_n(&to.nonfinite, 1, __ATOMIC_RELAXED);
}

// Calls visit(block) for the blocks of pieces [begin, end).
template <class Visit>
static void for_blocks(const Blocked& job, int64_t begin, int64_t end, Visit visit) {
  const int64_t last = end * kTogether < job.blocks() ? end * kTogether : job.blocks();
  for (int64_t b = begin * kTogether; b < last; b++) visit(b);
}

static bool store_spectra(const Blocked& job, const Stored& to, int64_t begin, int64_t end, void* scratch) {
  Spectra s(job, scratch);
  Words seen = {};
  const int64_t last = end * kTogether < job.blocks() ? end * kTogether : job.blocks();
  for (int64_t first = begin * kTogether; first < last; first += kLanes) {
    const int lanes = last - first < kLanes ? (int)(last - first) : kLanes;
    analyse(job, first, 1, lanes, s);
    for (int lane = 0; lane < lanes; lane++) {
      const float *re = s.row(lane), *im = re + s.second;
      float *real = to.real(first + lane), *imaginary = to.imaginary(first + lane), *squares = to.squares(first + lane);
      for (int64_t t = 0; t < s.half; t += kLanes) {
        const Floats a = load<Floats>(re + t), b = load<Floats>(im + t), square = a * a + b * b;
        store(real + t, a), store(imaginary + t, b), store(squares + t, square);
        seen |= (bits_of<Words>(square) & 0x7FFFFFFF) + 0x00800000; // of Inf and NaN, the sign bit
      }
      const float a = re[s.half], b = im[s.half], square = a * a + b * b;
      real[s.half] = a, imaginary[s.half] = b, squares[s.half] = square;
      seen |= splat(key_of(square)) + 0x00800000;
    }
  }
  uint32_t bad = 0;
  for (int i = 0; i < kLanes; i++) bad |= seen[i] >> 31;
  return !bad;
}

static void split_spectra(const Blocked& job, const Stored& from, Split& split, int64_t begin, int64_t end,
                          void* scratch) {
  Spectra s(job, scratch);
  Words seen = {};
  int64_t above = 0;
  for_blocks(job, begin, end, [&](int64_t b) {
    const int64_t found = compact(from.squares(b), s.half + 1, split.low, 0, s.indices, s.values, nullptr, seen);
    int64_t between = 0;
    for (int64_t j = 0; j < found; j++) {
      const uint32_t key = key_of(s.values[j]);
      s.indices[between] = key;
      between += key < split.high;
    }
    above += found - between;
    const int64_t place = __atomic_fetch_add(&split.used, between, __ATOMIC_RELAXED);
    std::memcpy(split.keys + place, s.indices, 4 * between);
  });
  __atomic_fetch_add(&split.above, above, __ATOMIC_RELAXED);
}

static void count_chosen(const Blocked& job, const Stored& from, const Chosen& chosen, int64_t begin, int64_t end) {
  const Ints kth = (Ints)splat(chosen.kth);
  for_blocks(job, begin, end, [&](int64_t b) {
    const float* squares = from.squares(b);
    const int64_t half = job.block / 2;
    Ints greater = {}, equal = {};
    for (int64_t t = 0; t < half; t += kLanes) {
      const Ints key = (Ints)least(load<Words>(squares + t) & 0x7FFFFFFF, splat(kNanKey));
      greater -= key > kth, equal -= key == kth;
    }
    const uint32_t last = key_of(squares[half]);
    int64_t above = last > chosen.kth, same = last == chosen.kth;
    for (int i = 0; i < kLanes; i++) above += greater[i], same += equal[i];
    chosen.above[b] = above, chosen.ties[b] = same;
  });
}

static void choose_stored(const Blocked& job, const Stored& from, const Chosen& chosen, int64_t begin, int64_t end,
                          void* scratch) {
  Spectra s(job, scratch);
  Words seen = {};
  for_blocks(job, begin, end, [&](int64_t b) {
    const float *real = from.real(b), *imaginary = from.imaginary(b), *squares = from.squares(b);
    const int64_t base = b * job.components();
    int64_t ties = chosen.ties[b];
    const uint32_t least = ties ? chosen.kth : chosen.kth + 1;
    const int64_t found = compact(squares, s.half + 1, least, 0, s.indices, s.values, nullptr, seen);
    int64_t n = found;
    if (found > chosen.above[b] + ties) { // fewer than have it
      n = 0;
      for (int64_t j = 0; j < found; j++) {
        const bool tie = key_of(s.values[j]) == chosen.kth;
        s.indices[n] = s.indices[j];
        n += !tie || ties > 0, ties -= tie && ties > 0;
      }
    }
    int32_t* const indices = chosen.indices + chosen.start[b];
    float* const parts = chosen.parts + 2 * chosen.start[b];
    for (int64_t j = 0; j < n; j++) {
      const uint32_t at = s.indices[j];
      indices[j] = (int32_t)(base + at), parts[2 * j] = real[at], parts[2 * j + 1] = imaginary[at];
    }
  });
}

// From the rows of components to blocks of y: the transform of conjugates, conjugated.
static void synthesise(const Blocked& job, int64_t first, int lanes, float scale, bool add, Spectra& s) {
  const float factor = scale / std::sqrt((float)job.block);
  Floats re[kLanes], im[kLanes], back_re[kLanes], back_im[kLanes];
  for (int64_t t = 0; t < s.half; t += kLanes) {
    const int64_t back = s.half - t - (kLanes - 1); // the components half - t - i, from the last on
    for (int lane = 0; lane < kLanes; lane++) {
      const float* row = s.row(lane);
      re[lane] = load<Floats>(row + t), im[lane] = load<Floats>(row + s.second + t);
      back_re[lane] = load<Floats>(row + back), back_im[lane] = load<Floats>(row + s.second + back);
    }
    transpose(re), transpose(im), transpose(back_re), transpose(back_im);
    for (int i = 0; i < kLanes; i++) {
      const Complex a = {re[i], im[i]}, b = {back_re[kLanes - 1 - i], back_im[kLanes - 1 - i]};
      const float w[2] = {job.roots[2 * (t + i)], -job.roots[2 * (t + i) + 1]};
      const Complex odd = times(Complex{a.re - b.re, a.im + b.im}, w);
      s.z[t + i] = Complex{(a.re + b.re - odd.im) * factor, (b.im - a.im - odd.re) * factor};
    }
  }
  transform(s.z, s.half, job.roots, 2);
  for (int64_t t = 0; t < job.block; t += kLanes) {
    for (int i = 0; i < kLanes; i += 2) {
      const Complex v = s.z[s.order[(t + i) / 2]];
      re[i] = v.re, re[i + 1] = Floats{} - v.im;
    }
    transpose(re);
    for (int lane = 0; lane < lanes; lane++) store(s.row(lane) + t, re[lane]);
  }
  void* const y = const_cast<void*>(job.span.x);
  for (int lane = 0; lane < lanes; lane++) {
    const int64_t at = (first + lane) * job.block, start = job.span.start + at;
    const int64_t n = job.span.numel - at < job.block ? job.span.numel - at : job.block;
    float* const signal = s.row(lane);
    if (add) {
      float* const before = reinterpret_cast<float*>(s.z);
      read_floats(y, job.span.dtype, start, n, before);
      for (int64_t i = 0; i < n; i++) signal[i] += before[i];
    }
    write_floats(signal, n, y, job.span.dtype, start);
  }
}

// The number of indices below `bound`.
static inline int64_t count_below(const Sent& message, int64_t bound) {
  int64_t low = 0, high = message.count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    message.indices[middle] < bound ? low = middle + 1 : high = middle;
  }
  return low;
}

static void restore(const Blocked& job, const Sent* messages, int64_t count, float scale, bool add, int64_t begin,
                    int64_t end, void* scratch) {
  Spectra s(job, scratch);
  const int64_t last = end * kTogether < job.blocks() ? end * kTogether : job.blocks(), width = job.components();
  for (int64_t first = begin * kTogether; first < last; first += kLanes) {
    const int lanes = last - first < kLanes ? (int)(last - first) : kLanes;
    for (int lane = 0; lane < kLanes; lane++) {
      std::memset(s.row(lane), 0, 4 * width), std::memset(s.row(lane) + s.second, 0, 4 * width);
    }
    for (int64_t m = 0; m < count; m++) {
      const Sent& message = messages[m];
      int64_t j = count_below(message, first * width);
      for (int lane = 0; lane < lanes; lane++) {
        const int64_t base = (first + lane) * width;
        for (; j < message.count && message.indices[j] < base + width; j++) {
          float* const to = s.row(lane) + (message.indices[j] - base);
          to[0] += message.parts[2 * j], to[s.second] += message.parts[2 * j + 1];
        }
      }
    }
    for (int lane = 0; lane < lanes; lane++) s.row(lane)[s.second] = s.row(lane)[s.second + s.half] = 0.0f; // of real values
    synthesise(job, first, lanes, scale, add, s);
  }
}
