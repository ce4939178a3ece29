// Rows whose buckets are too wide for a block: scales are computed piece by piece, then the codes. Included inside a
// level's namespace.

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
      const int64_t left = job.form.bucket - (at + i) % job.form.bucket;
      const int64_t count = left < block.n - i ? left : block.n - i;
      float low = 0.0f, high;
      encoder.measure(block.x + i, count, low, high);
      if (kHidesNan && job.form.scheme == kMinMax && holds_nan(block.x + i, count)) {
        low = high = quiet_nan(); // a key above that of infinity
      }
      merge(wide.low_key + k, to_key(low), true), merge(wide.high_key + k, to_key(high), false);
      i += count;
    }
  }
}

// The order of sums is fixed, so a bucket is summed by one thread. Its pieces start at multiples of the lanes.
static void wide_sums(const Job& job, const Row& row, const Wide& wide, int64_t begin, int64_t end) {
  Scratch scratch;
  Block block;
  const Encoder encoder(job, row, scratch);
  for (int64_t k = begin; k < end; k++) {
    const int64_t left = row.numel - k * job.form.bucket;
    const int64_t stop = row.numel - left + (left < job.form.bucket ? left : job.form.bucket);
    Gathered found(job.form);
    for (int64_t at = k * job.form.bucket, n; at < stop; at += n) {
      const int64_t before = at % kGroup;
      n = stop - at < kLoaded - kGroup ? stop - at : kLoaded - kGroup;
      encoder.load(block, at - before, before + n);
      found.add(block.x + before, n);
    }
    found.finish(wide.low[k], wide.inverse[k]);
  }
}

static void wide_scales(const Job& job, const Row& row, const Wide& wide) {
  const int64_t count = num_buckets(row.numel, job.form.bucket);
  float* const high = wide.inverse; // becomes the factor in place
  for (int64_t k = 0; k < count && !job.form.summed(); k++) {
    wide.low[k] = from_key(wide.low_key[k]), high[k] = from_key(wide.high_key[k]);
  }
  finish_scales(job.form, wide.low, high, wide.unit, wide.inverse, count);
  Scratch scratch;
  const Encoder encoder(job, row, scratch);
  const float* sent = wide.low;
  if (job.form.rounding == kShift) {
    float* shifted = (float*)wide.low_key; // the keys are not needed any more
    shift_lows(wide.low, wide.unit, count, encoder.shift(), shifted), sent = shifted;
  }
  encoder.send_scales(job.form.num_scales() == 2 ? sent : nullptr, wide.unit, 0, count);
}

static void wide_codes(const Job& job, const Row& row, const Wide& wide, int64_t begin, int64_t end) {
  Scratch scratch;
  Block block;
  const Encoder encoder(job, row, scratch);
  for (int64_t at = begin * kLoaded; at < end * kLoaded && at < row.numel; at += kLoaded) {
    encoder.load(block, at, row.numel - at < kLoaded ? row.numel - at : kLoaded);
    const int64_t count = num_buckets(at + block.n, job.form.bucket) - block.first;
    block.count = count;
    std::memcpy(block.low, wide.low + block.first, 4 * count);
    std::memcpy(block.unit, wide.unit + block.first, 4 * count);
    std::memcpy(block.inverse, wide.inverse + block.first, 4 * count);
    if (job.form.rounding == kShift) shift_lows(block.low, block.unit, count, encoder.shift(), block.sent);
    encoder.codes(block, nullptr);
  }
  if (job.next) settle_stores();
}
