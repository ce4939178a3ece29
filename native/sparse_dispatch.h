// Sparse selection and packed indices as the binding calls them. Included at the end of dispatch.cpp: code of
// the standard library must be compiled once, for every CPU.

namespace {

constexpr int64_t kCrowd = 1 << 19; // candidates in excess of twice k for which a list is still faster

// Memory that a thread keeps for its next calls. The system's allocator returns more than a little to the system, whose
// pages then cost more than a pass over them.
struct KeptMemory {
  void* at = nullptr;
  int64_t bytes = 0;
  ~KeptMemory() { std::free(at); }
};

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kMostKept = 0; // bytes: of memory that is longer than what was asked for, no end would be noticed
#else
constexpr int64_t kMostKept = int64_t(1) << 22;
#endif
thread_local KeptMemory kept_memory[4];

struct Memory {
  void* at = nullptr;
  explicit Memory(int64_t num_bytes) : bytes(num_bytes > 0 ? num_bytes : 1) {
    for (KeptMemory& kept : kept_memory) {
      if (kept.bytes < bytes || kept.bytes > 2 * bytes + 4096) continue;
      std::swap(at, kept.at), bytes = kept.bytes, kept.bytes = 0;
      return;
    }
    at = std::malloc(bytes);
  }
  ~Memory() {
    KeptMemory* least = kept_memory;
    for (KeptMemory& kept : kept_memory) least = kept.bytes < least->bytes ? &kept : least;
    if (at && bytes <= kMostKept && bytes > least->bytes) std::swap(at, least->at), least->bytes = bytes;
    std::free(at);
  }
  Memory(const Memory&) = delete;
  int64_t bytes;
  template <class T>
  T* as() const {
    return static_cast<T*>(at);
  }
};

uint32_t key_of(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  bits &= 0x7FFFFFFF;
  return bits < kNanKey ? bits : kNanKey;
}

bool collect(const Machine& machine, const Span& span, Candidates& to) {
  to.used = to.total = 0, to.nonfinite = 0;
  auto work = [&](int64_t begin, int64_t end) { machine.kernels->sparse->collect(span, to, begin, end); };
  return run(machine, ceil_div(span.numel, kTile), span.numel, work);
}

bool count_bins(const Machine& machine, const Span& span, const Histogram& job) {
  std::memset(job.counts, 0, kBins * sizeof(int32_t));
  auto work = [&](int64_t begin, int64_t end) { machine.kernels->sparse->histogram(span, job, begin, end); };
  return run(machine, ceil_div(span.numel, kTile), span.numel, work);
}

// The bin in which the k-th largest lies; `k` becomes its rank inside.
int bin_of(const int32_t* counts, int64_t& k) {
  int bin = kBins - 1;
  for (; bin > 0 && counts[bin] < k; bin--) k -= counts[bin];
  return bin;
}

template <class Visit>
void for_candidates(const Candidates& from, int64_t blocks, Visit visit) {
  for (int64_t b = 0; b < blocks; b++) {
    const Place place = from.places[b];
    for (int64_t j = place.at; j < place.at + place.count; j++) visit(from.indices[j], from.values[j]);
  }
}

// The rank-th largest of n keys of at least `low` and below `high`, and how many of those that equal it are among the
// `rank`. `room` is for n keys, and may be `keys` itself.
uint32_t kth_of(const Machine& machine, const uint32_t* keys, int64_t n, uint32_t low, uint32_t high, int64_t rank,
                uint32_t* room, int64_t& ties) {
  int shift = 0;
  while ((high - 1 - low) >> shift >= (uint32_t)kBins) shift++;
  int32_t counts[kBins] = {};
  for (int64_t i = 0; i < n; i++) counts[(keys[i] - low) >> shift]++;
  const uint32_t bin = (uint32_t)bin_of(counts, rank);
  const uint32_t first = low + (bin << shift), last = std::min(first + (1u << shift), high);
  int64_t above = 0;
  const int64_t num = machine.kernels->sparse->narrow(keys, n, first, last, room, above);
  std::nth_element(room, room + (rank - 1), room + num, std::greater<uint32_t>());
  const uint32_t kth = room[rank - 1];
  ties = rank;
  for (int64_t i = 0; i < num; i++) ties -= room[i] > kth;
  return kth;
}

// The key of the k-th largest candidate, as above.
uint32_t kth_key(const Machine& machine, const Candidates& from, int64_t blocks, int64_t k, uint32_t* keys,
                 int64_t& ties) {
  uint32_t most = from.least;
  int64_t n = 0;
  for_candidates(from, blocks, [&](uint32_t, float v) { keys[n] = key_of(v), most = std::max(most, keys[n]), n++; });
  return kth_of(machine, keys, n, from.least, most + 1, k, keys, ties);
}

// Writes the candidates above `kth`, and the first `ties` of those that have it.
int64_t emit(const Candidates& from, int64_t blocks, uint32_t kth, int64_t ties, int64_t k, Picked& to) {
  int64_t n = 0;
  for_candidates(from, blocks, [&](uint32_t index, float v) {
    const uint32_t key = key_of(v);
    const bool tie = key == kth && ties > 0;
    if (n < k) to.indices[n] = (int32_t)index, to.values[n] = v;
    ties -= tie, n += (key > kth) | tie;
  });
  return n;
}

// Writes the k largest candidates, or all if they are fewer.
void emit_largest(const Machine& machine, const Candidates& from, int64_t blocks, int64_t k, uint32_t* keys,
                  Picked& to) {
  uint32_t kth = 0;
  int64_t ties = 0;
  if (from.total > k) kth = kth_key(machine, from, blocks, k, keys, ties);
  to.count = emit(from, blocks, kth, ties, k, to);
}

// Candidates and the first `ties` elements with the key `tied`, by index.
Status emit_with_ties(const Machine& machine, const Span& span, const Candidates& from, int64_t blocks, uint32_t tied,
                      int64_t ties, Picked& to) {
  const Memory memory(4 * (ties + 1));
  uint32_t* const found = memory.as<uint32_t>();
  if (!found) return kNoMemory;
  const int64_t count = machine.kernels->sparse->find(span, tied, ties, found);
  const float* const x = static_cast<const float*>(span.x) + span.start;
  int64_t n = 0, t = 0;
  const auto put_ties = [&](uint32_t before) {
    for (; t < count && found[t] < before; t++, n++) {
      to.indices[n] = (int32_t)found[t];
      if (span.dtype == kFloat32) to.values[n] = x[found[t]];
    }
  };
  for_candidates(from, blocks, [&](uint32_t index, float v) {
    put_ties(index);
    to.indices[n] = (int32_t)index, to.values[n] = v, n++;
  });
  put_ties(UINT32_MAX);
  if (span.dtype != kFloat32) machine.kernels->sparse->gather(span, to.indices, n, to.values);
  to.count = n;
  return kDone;
}

// The exact k largest, where candidates were too few or too many. A histogram yields the eighth of an octave in which
// the k-th largest lies; if many candidates are in it, two more yield its key.
Status pick_by_histogram(const Machine& machine, const Span& span, int64_t k, Place* places, Picked& to) {
  const int64_t blocks = ceil_div(span.numel, kTile);
  int32_t counts[kBins];
  int64_t rank = k;
  uint32_t prefix = 0;
  int above = 31;
  for (const int shift : {20, 9, 0}) {
    if (!count_bins(machine, span, Histogram{shift, above, prefix, true, counts})) return kThreadsFailed;
    const int bin = bin_of(counts, rank);
    prefix = prefix << (above - shift) | ((uint32_t)bin & ((1u << (above - shift)) - 1)), above = shift;
    const int64_t reach = k - rank + counts[bin];
    if (!shift || reach > 2 * k + kCrowd || !prefix) continue;
    const Memory memory(12 * reach);
    uint32_t* const indices = memory.as<uint32_t>();
    if (!indices) return kNoMemory;
    Candidates all{prefix << shift, reach, indices, memory.as<float>() + reach, places, 0, 0, 0};
    if (!collect(machine, span, all)) return kThreadsFailed;
    return emit_largest(machine, all, blocks, k, indices + 2 * reach, to), kDone;
  }
  const int64_t greater = k - rank;
  const Memory memory(8 * greater);
  if (!memory.at) return kNoMemory;
  Candidates all{prefix + 1, greater, memory.as<uint32_t>(), memory.as<float>() + greater, places, 0, 0, 0};
  if (!collect(machine, span, all)) return kThreadsFailed;
  return emit_with_ties(machine, span, all, blocks, prefix, rank, to);
}

} // namespace

Status pick(const Machine& machine, const Span& span, const Pick& job, Picked& to) {
  const int64_t k = job.k, blocks = ceil_div(span.numel, kTile);
  to.count = to.total = 0, to.finite = true;
  if (!span.numel) return kDone;
  uint32_t least = job.least;
  bool partial = job.partial;
  if (job.rank) {
    const Memory memory(4 * job.num_samples);
    uint32_t* const keys = memory.as<uint32_t>();
    if (!keys) return kNoMemory;
    machine.kernels->sparse->sample(span, job.offset, job.stride, job.num_samples, keys);
    std::nth_element(keys, keys + (job.rank - 1), keys + job.num_samples, std::greater<uint32_t>());
    partial = job.sampled && keys[job.rank - 1] > 0;
    least = std::max(keys[job.rank - 1], least);
  }
  const int64_t capacity = k ? std::min(span.numel, k + k / 2 + 65536) : 0;
  const Memory memory(12 * capacity), table(blocks * (int64_t)sizeof(Place));
  if (!memory.at || !table.at) return kNoMemory;
  uint32_t* const indices = memory.as<uint32_t>();
  uint32_t* const keys = indices + 2 * capacity;
  Candidates some{k || job.partial ? least : kNanKey + 1, capacity, indices, memory.as<float>() + capacity,
                  table.as<Place>(), 0, 0, 0};
  if (!collect(machine, span, some)) return kThreadsFailed;
  to.finite = !some.nonfinite, to.total = some.total;
  if (!k) return kDone;
  if (some.total < k && !partial) {
    if (least == 1) return emit_with_ties(machine, span, some, blocks, 0, k - some.total, to); // the rest is zeros
    return pick_by_histogram(machine, span, k, table.as<Place>(), to);
  }
  if (some.total > capacity) return pick_by_histogram(machine, span, k, table.as<Place>(), to);
  emit_largest(machine, some, blocks, k, keys, to);
  return kDone;
}

Status abs_histogram(const Machine& machine, const Span& span, int32_t* counts) {
  return count_bins(machine, span, Histogram{20, 31, 0, false, counts}) ? kDone : kThreadsFailed;
}

bool are_inside(const int32_t* indices, int64_t count, int64_t numel) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; i++) most = std::max(most, (uint32_t)indices[i]);
  return !count || most < numel;
}

void scatter(const Machine& machine, void* y, Dtype dtype, int64_t start, const int32_t* indices, const void* values,
             int64_t count, float scale) {
  auto work = [&](int64_t, int64_t) {
    machine.kernels->sparse->scatter(y, dtype, start, indices, values, count, scale);
  };
  run(machine, 1, count, work);
}

bool pack_indices(const int32_t* indices, int64_t count, const IndexList& to, uint8_t* bytes) {
  bool bad = count && (indices[0] < 0 || indices[count - 1] >= to.numel);
  for (int64_t i = 1; i < count; i++) bad |= indices[i] <= indices[i - 1];
  if (!bad) put_indices(indices, count, to, bytes);
  return !bad;
}

void put_indices(const int32_t* indices, int64_t count, const IndexList& to, uint8_t* bytes) {
  if (to.bitmap) {
    std::memset(bytes, 0, to.num_bytes());
    uint64_t bits = 0;
    int32_t word = -1;
    for (int64_t i = 0; i < count; i++) { // without a branch or a load of what has been stored
      const int32_t own = indices[i] >> 6;
      bits = (own == word ? bits : 0) | uint64_t(1) << (indices[i] & 63), word = own;
      std::memcpy(bytes + 8 * (int64_t)word, &bits, 8);
    }
    return;
  }
  uint8_t* offsets = bytes + 4 * to.blocks();
  int64_t i = 0;
  for (int64_t b = 0; b < to.blocks(); b++) {
    const int64_t first = i, end = (b + 1) * kIndexBlock;
    for (; i < count && indices[i] < end; i++) {
      const uint16_t offset = (uint16_t)indices[i];
      std::memcpy(offsets + 2 * i, &offset, 2);
    }
    const uint32_t in = (uint32_t)(i - first);
    std::memcpy(bytes + 4 * b, &in, 4);
  }
  std::memset(offsets + 2 * count, 0, to.num_bytes() - 4 * to.blocks() - 2 * count);
}

int64_t unpack_indices(const uint8_t* bytes, const IndexList& from, int32_t* indices) {
  int64_t n = 0;
  if (from.bitmap) {
    for (int64_t at = 0; at < from.numel && n < from.k; at += 64) { // the bitmap is padded to 64 bytes
      uint64_t word;
      std::memcpy(&word, bytes + at / 8, 8);
      if (from.numel - at < 64) word &= (uint64_t(1) << (from.numel - at)) - 1;
      for (; word && n < from.k; word &= word - 1) indices[n++] = (int32_t)(at + __builtin_ctzll(word));
    }
    return n;
  }
  const uint8_t* offsets = bytes + 4 * from.blocks();
  int64_t last = -1, taken = 0;
  for (int64_t b = 0; b < from.blocks() && taken < from.k; b++) {
    uint32_t in;
    std::memcpy(&in, bytes + 4 * b, 4);
    const int64_t end = std::min<int64_t>(from.k, taken + in);
    for (; taken < end; taken++) {
      uint16_t offset;
      std::memcpy(&offset, offsets + 2 * taken, 2);
      const int64_t index = b * kIndexBlock + offset;
      indices[n] = (int32_t)index;
      n += index > last && index < from.numel; // others were not written by pack_indices
      last = std::max(last, index);
    }
  }
  return n;
}
