// Spectra of blocks: their largest components, and values again. Included inside a level's namespace.

// The scratch memory of a call: a transform, one block's values, components and squared magnitudes, and what is chosen of
// it.
struct Spectra {
  const Fourier fourier;
  const int64_t half;
  float* const block;
  const BlockRows rows;
  float *const squares, *const values;
  uint32_t* const indices;

  Spectra(const Blocked& job, void* scratch)
      : fourier(job.block, job.roots, scratch), half(job.block / 2),
        block(reinterpret_cast<float*>(static_cast<char*>(scratch) + Fourier::bytes(job.block))),
        rows{block + job.block, BlockRows::pitch_of(job)}, squares(rows.real(1)), values(squares + half + 64),
        indices(reinterpret_cast<uint32_t*>(values + half + 64)) {}

  // Writes the components of a block.
  void analyse(const Blocked& job, int64_t number, const BlockRows& to) const {
    const int64_t at = number * job.block, start = job.span.start + at;
    const int64_t n = job.span.numel - at < job.block ? job.span.numel - at : job.block;
    const float* x = static_cast<const float*>(job.span.x) + start;
    if (n < job.block || job.span.dtype != kFloat32) {
      read_floats(job.span.x, job.span.dtype, start, n, block);
      std::memset(block + n, 0, 4 * (job.block - n));
      x = block;
    }
    fourier.analyse(x, to.real(number), to.imaginary(number));
  }

  // The squared magnitudes of a block's components.
  const float* measure(const BlockRows& of, int64_t number) const {
    const float *re = of.real(number), *im = of.imaginary(number);
    float* const to = squares;
    for (int64_t t = 0; t <= half; t += kLanes) {
      const Floats a = load<Floats>(re + t), b = load<Floats>(im + t);
      store(to + t, a * a + b * b);
    }
    return to;
  }

  // Sets a block of y to the values of the scratch memory's row, or adds them.
  void synthesise(const Blocked& job, int64_t number, float scale, bool add) const {
    void* const y = const_cast<void*>(job.span.x);
    const int64_t at = number * job.block, start = job.span.start + at;
    const int64_t n = job.span.numel - at < job.block ? job.span.numel - at : job.block;
    const bool direct = n == job.block && job.span.dtype == kFloat32 && !add;
    fourier.synthesise(rows.real(0), rows.imaginary(0), scale, direct ? static_cast<float*>(y) + start : block);
    if (direct) return;
    if (add) {
      float* const before = rows.real(0);
      read_floats(y, job.span.dtype, start, n, before);
      for (int64_t i = 0; i < n; i++) block[i] += before[i];
    }
    write_floats(block, n, y, job.span.dtype, start);
  }
};

static int64_t scratch_bytes(const Blocked& job) {
  return Fourier::bytes(job.block) + 4 * (job.block + 2 * BlockRows::pitch_of(job) + 3 * (job.block / 2 + 64));
}

static void store_spectra(const Blocked& job, const BlockRows& stored, int32_t* counts, int64_t begin, int64_t end,
                          void* scratch) {
  constexpr int64_t kRun = 16, kOneIn = 8; // components of a run, and which run of so many is sampled
  const Spectra s(job, scratch);
  int32_t own[kBins] = {};
  for (int64_t b = begin; b < end; b++) {
    s.analyse(job, b, stored);
    const float *re = stored.real(b), *im = stored.imaginary(b);
    // Not the same runs of all blocks: spectra have periods, of rows of a matrix for instance.
    for (int64_t run = b * 5 % kOneIn * kRun; run < s.half; run += kOneIn * kRun) {
      for (int64_t k = run; k < run + kRun; k++) own[key_of(re[k] * re[k] + im[k] * im[k]) >> 20]++;
    }
  }
  for (int k = 0; k < kBins; k++) {
    if (own[k]) __atomic_fetch_add(counts + k, own[k], __ATOMIC_RELAXED);
  }
}

static void split_spectra(const Blocked& job, const BlockRows& stored, Largest& to, int64_t begin, int64_t end,
                          void* scratch) {
  const Spectra s(job, scratch);
  Words seen = {};
  for (int64_t b = begin; b < end; b++) {
    const int64_t found = compact(s.measure(stored, b), s.half + 1, to.low, 0, s.indices, s.values, nullptr, seen);
    int64_t between = 0;
    for (int64_t j = 0; j < found; j++) {
      const uint32_t key = key_of(s.values[j]);
      s.indices[between] = key, between += key < to.high;
    }
    to.above[b] = found - between;
    to.places[b] = Place{__atomic_fetch_add(&to.used, between, __ATOMIC_RELAXED), between};
    std::memcpy(to.keys + to.places[b].at, s.indices, 4 * between);
  }
  uint32_t bad = 0;
  for (int i = 0; i < kLanes; i++) bad |= seen[i] >> 31;
  if (bad) __atomic_store_n(&to.nonfinite, 1, __ATOMIC_RELAXED);
}

static void choose_components(const Blocked& job, const BlockRows& stored, Largest& of, int64_t begin, int64_t end,
                              void* scratch) {
  const Spectra s(job, scratch);
  Words seen = {};
  Ints top = {};
  for (int64_t b = begin; b < end; b++) {
    int64_t ties = of.ties[b];
    const uint32_t least = ties ? of.kth : of.kth + 1;
    const int64_t found = compact(s.measure(stored, b), s.half + 1, least, 0, s.indices, s.values, nullptr, seen);
    int64_t n = found;
    if (found > of.above[b] + ties) { // fewer than have it
      n = 0;
      for (int64_t j = 0; j < found; j++) {
        const bool tie = key_of(s.values[j]) == of.kth;
        s.indices[n] = s.indices[j];
        n += !tie || ties > 0, ties -= tie && ties > 0;
      }
    }
    const float *real = stored.real(b), *imaginary = stored.imaginary(b);
    const int64_t base = b * job.components();
    int32_t* const indices = of.indices + of.start[b];
    float* const parts = of.parts + 2 * of.start[b];
    for (int64_t j = 0; j < n; j++) {
      const uint32_t at = s.indices[j];
      indices[j] = (int32_t)(base + at), parts[2 * j] = real[at], parts[2 * j + 1] = imaginary[at];
    }
    int64_t i = 0;
    for (; i + kLanes <= 2 * n; i += kLanes) top = greater_int(top, magnitude(load<Floats>(parts + i)));
    for (; i < 2 * n; i++) top = greater_int(top, magnitude(splat(parts[i])));
  }
  uint32_t own = 0, before = __atomic_load_n(&of.top, __ATOMIC_RELAXED);
  for (int i = 0; i < kLanes; i++) own = (uint32_t)top[i] > own ? (uint32_t)top[i] : own;
  while (own > before && !__atomic_compare_exchange_n(&of.top, &before, own, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
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
  const Spectra s(job, scratch);
  const int64_t width = job.components();
  for (int64_t b = begin; b < end; b++) {
    const int64_t base = b * width;
    float *real = s.rows.real(0), *imaginary = s.rows.imaginary(0);
    std::memset(real, 0, 4 * width), std::memset(imaginary, 0, 4 * width);
    for (int64_t m = 0; m < count; m++) {
      const Sent& message = messages[m];
      for (int64_t j = count_below(message, base); j < message.count && message.indices[j] < base + width; j++) {
        const int64_t at = message.indices[j] - base;
        real[at] += message.parts[2 * j], imaginary[at] += message.parts[2 * j + 1];
      }
    }
    imaginary[0] = imaginary[s.half] = 0.0f; // those of real values
    s.synthesise(job, b, scale, add);
  }
}
