// Values without a code: the segments of a table into messages, out of them, their sums and other arithmetic. Included
// inside a level's namespace.

static inline uint8_t* bytes_at(const void* values, Dtype dtype, int64_t element) {
  return (uint8_t*)values + element * size_of(dtype);
}

static void raw_encode_tiles(const Job& job, int64_t begin, int64_t end) {
  const int64_t size = size_of(job.own_dtype);
  for_tiles(job, begin, end, [&](const Row& row, int64_t at, int64_t n) {
    std::memcpy(job.out + row.payload + size * at, bytes_at(job.own, job.own_dtype, row.start + at), size * n);
  });
}

// Elements [at, at + n), at most a tile, of a row's payload, which may lie at any address.
static inline void read_payload(const uint8_t* message, const Row& row, Dtype dtype, int64_t at, int64_t n, float* to) {
  const uint8_t* from = message + row.payload + size_of(dtype) * at;
  if (dtype == kFloat32) {
    std::memcpy(to, from, 4 * n);
    return;
  }
  alignas(64) uint16_t halves[kTile];
  std::memcpy(halves, from, 2 * n);
  read_floats(halves, dtype, 0, n, to);
}

static void raw_decode_tiles(const Job& job, int64_t begin, int64_t end) {
  alignas(64) float received[kTile], values[kTile];
  const int64_t size = size_of(job.y_dtype);
  for_tiles(job, begin, end, [&](const Row& row, int64_t at, int64_t n) {
    const uint8_t* message = job.messages[0];
    const int64_t start = row.start + at;
    if (!job.add && job.scale == 1.0f) {
      std::memcpy(bytes_at(job.y, job.y_dtype, start), message + row.payload + size * at, size * n);
      return;
    }
    read_payload(message, row, job.y_dtype, at, n, received);
    for (int64_t j = 0; j < n; j++) received[j] *= job.scale;
    if (job.add) {
      read_floats(job.y, job.y_dtype, start, n, values);
      for (int64_t j = 0; j < n; j++) received[j] = values[j] + received[j];
    }
    write_floats(received, n, job.y, job.y_dtype, start);
  });
}

static void raw_sum_tiles(const Job& job, int64_t begin, int64_t end) {
  alignas(64) float total[kTile], received[kTile];
  const int64_t size = size_of(job.y_dtype);
  const float before = before_sum(job.scale), after = job.scale / before;
  for_tiles(job, begin, end, [&](const Row& row, int64_t at, int64_t n) {
    const int64_t start = row.start + at;
    read_floats(job.own, job.own_dtype, start, n, total);
    for (int64_t j = 0; j < n; j++) total[j] *= before;
    for (int64_t m = 0; m < job.num_messages; m++) {
      read_payload(job.messages[m], row, job.y_dtype, at, n, received);
      for (int64_t j = 0; j < n; j++) total[j] += received[j] * before;
    }
    for (int64_t j = 0; j < n; j++) total[j] *= after;
    write_floats(total, n, job.y, job.y_dtype, start);
    if (job.out) std::memcpy(job.out + row.payload + size * at, bytes_at(job.y, job.y_dtype, start), size * n);
  });
}

// Elements [at, at + n), at most a tile, as fp32: where they are, or in `room`.
static inline const float* floats_at(const void* values, Dtype dtype, int64_t at, int64_t n, float* room) {
  if (dtype == kFloat32) return (const float*)values + at;
  read_floats(values, dtype, at, n, room);
  return room;
}

// Calls work(first element, elements, own, to) with `to` in y, or in a tile that is then written to it.
template <class Work>
static void map_tiles(const RowJob& job, int64_t begin, int64_t end, Work work) {
  alignas(64) float from[kTile], result[kTile];
  for_tiles(job, begin, end, [&](const Row& row, int64_t at, int64_t n) {
    const int64_t start = row.start + at;
    const float* own = floats_at(job.own, job.own_dtype, start, n, from);
    if (job.y_dtype == kFloat32) return work(start, n, own, (float*)job.y + start);
    work(start, n, own, result);
    write_floats(result, n, job.y, job.y_dtype, start);
  });
}

static void add_tiles(const RowJob& job, int64_t begin, int64_t end) {
  alignas(64) float room[kTile];
  map_tiles(job, begin, end, [&](int64_t start, int64_t n, const float* own, float* to) {
    add_scaled(own, floats_at(job.other, job.other_dtype, start, n, room), job.by, n, to);
  });
}

static void scale_tiles(const RowJob& job, int64_t begin, int64_t end) {
  map_tiles(job, begin, end, [&](int64_t, int64_t n, const float* own, float* to) {
    if (job.over != 1.0f) {
      for (int64_t j = 0; j < n; j++) to[j] = own[j] / job.over;
    } else {
      for (int64_t j = 0; j < n; j++) to[j] = own[j] * job.by;
    }
  });
}
