// Spectra as the binding calls them. Included in dispatch.cpp, after sparse_dispatch.h.

namespace {

constexpr int64_t kSampledBlocks = 48, kSampledKeys = 4096;
constexpr int64_t kStoredElements = int64_t(1) << 20; // of a job whose spectra stay in a cache

constexpr int64_t kCheapness = 16; // of a pass over a stored spectrum, beside a transform

// Runs work(begin, end, scratch) over pieces of blocks, with memory for each call. It costs as much as transforms of
// `elements`: threads are not woken for little.
template <class Work>
Status run_spectra(const Machine& machine, const Blocked& job, int64_t elements, Work work) {
  int32_t failed = 0;
  auto with_memory = [&](int64_t begin, int64_t end) {
    const Memory scratch(job.scratch());
    if (scratch.at) return work(begin, end, scratch.at);
    __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
  };
  if (!run(machine, job.pieces(), elements, with_memory)) return kThreadsFailed;
  return failed ? kNoMemory : kDone;
}

// The candidates from a key on, and their parts. They may be more than there is room for: then only `total` is right.
struct Components {
  const int64_t capacity;
  const Memory memory, table;
  Candidates some;
  float* const parts;

  Components(const Blocked& job, uint32_t least, int64_t capacity)
      : capacity(capacity), memory(20 * capacity), table(job.blocks() * (int64_t)sizeof(Place)),
        some{least, capacity, memory.as<uint32_t>(), memory.as<float>() + capacity, table.as<Place>(), 0, 0, 0},
        parts(memory.as<float>() + 3 * capacity) {}
  uint32_t* keys() const { return memory.as<uint32_t>() + 2 * capacity; }
};

Status collect(const Machine& machine, const Blocked& job, Components& into) {
  if (!into.memory.at || !into.table.at) return kNoMemory;
  return run_spectra(machine, job, job.span.numel, [&](int64_t begin, int64_t end, void* scratch) {
    machine.kernels->spectrum->collect(job, into.some, into.parts, begin, end, scratch);
  });
}

// The k largest candidates, block by block: places of the result are counted first, so that threads can fill them.
Status emit_components(const Machine& machine, const Blocked& job, const Components& from, int64_t k, int32_t* indices,
                       float* parts) {
  const int64_t blocks = job.blocks();
  const Candidates& some = from.some;
  int64_t ties = 0;
  const uint32_t kth = some.total > k ? kth_key(some, blocks, k, from.keys(), ties) : 0;
  const Memory starts(16 * (blocks + 1));
  int64_t* const start = starts.as<int64_t>();
  int64_t* const tie = start + blocks + 1;
  if (!start) return kNoMemory;
  auto count = [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) {
      const float* v = some.values + some.places[b].at;
      int64_t above = 0, same = 0;
      for (int64_t j = 0; j < some.places[b].count; j++) above += key_of(v[j]) > kth, same += key_of(v[j]) == kth;
      if (!kth) above += same, same = 0; // all of them
      start[b] = above, tie[b] = same;
    }
  };
  if (!run(machine, blocks, some.total, count)) return kThreadsFailed;
  int64_t n = 0;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t above = start[b], same = std::min(tie[b], ties);
    start[b] = n, n += above + same, ties -= same, tie[b] = same;
  }
  auto fill = [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) {
      const Place place = some.places[b];
      int64_t to = start[b], left = tie[b];
      for (int64_t j = place.at; j < place.at + place.count && to < k; j++) {
        const uint32_t key = key_of(some.values[j]);
        const bool same = kth && key == kth && left > 0;
        indices[to] = (int32_t)some.indices[j];
        parts[2 * to] = from.parts[2 * j], parts[2 * to + 1] = from.parts[2 * j + 1];
        left -= same, to += (key > kth) | same | !kth;
      }
    }
  };
  return run(machine, blocks, some.total, fill) ? kDone : kThreadsFailed;
}

// The key of the k-th largest component, k > 0, and how many components with that key belong to the k largest. A sample
// says between which keys it lies, all but certainly; what lies there is sorted.
Status stored_kth_key(const Machine& machine, const Blocked& job, const Stored& stored, int64_t k, uint32_t* keys,
                      uint32_t& kth, int64_t& ties) {
  const int64_t total = job.total(), width = job.components(), num = std::min(total, kSampledKeys);
  for (int64_t i = 0; i < num; i++) {
    // Anywhere in its part: spectra have periods, of rows of a matrix for instance, that even steps would meet or miss.
    const int64_t jitter = (int64_t)((uint32_t)i * 2654435761u >> 8) % (total / num);
    const int64_t at = i * total / num + jitter;
    keys[i] = key_of(stored.squares(at / width)[at % width]);
  }
  const double expected = (double)k * (double)num / (double)total, margin = 4.0 * std::sqrt(expected) + 4.0;
  const int64_t first = (int64_t)(expected - margin), last = (int64_t)(expected + margin);
  Split split{0, kNanKey + 1, keys, 0, 0};
  if (first > 0) std::nth_element(keys, keys + first, keys + num, std::greater<uint32_t>()), split.high = keys[first];
  if (last < num) {
    std::nth_element(keys + std::max<int64_t>(first, 0), keys + last, keys + num, std::greater<uint32_t>());
    split.low = keys[last];
  }
  auto work = [&](int64_t begin, int64_t end, void* scratch) {
    machine.kernels->spectrum->split(job, stored, split, begin, end, scratch);
  };
  if (const Status status = run_spectra(machine, job, job.span.numel / kCheapness, work); status != kDone) return status;
  if (split.above >= k || split.above + split.used < k) {
    split = Split{0, kNanKey + 1, keys, 0, 0};
    if (const Status status = run_spectra(machine, job, job.span.numel / kCheapness, work); status != kDone) return status;
  }
  ties = k - split.above;
  std::nth_element(keys, keys + (ties - 1), keys + split.used, std::greater<uint32_t>());
  kth = keys[ties - 1];
  int64_t greater = 0;
  for (int64_t i = 0; i < split.used; i++) greater += keys[i] > kth;
  ties -= greater;
  return kDone;
}

// The k largest components, of spectra that are computed once and stored.
Status pick_stored(const Machine& machine, const Blocked& job, int64_t k, int32_t* indices, float* parts,
                   bool& finite) {
  const int64_t blocks = job.blocks(), total = job.total();
  const Memory spectra(Stored::bytes(job)), table(24 * blocks), memory(4 * std::max(total, kSampledKeys));
  if (!spectra.at || !table.at || !memory.at) return kNoMemory;
  const Stored stored{reinterpret_cast<float*>(((uintptr_t)spectra.at + 63) / 64 * 64), Stored::pitch_of(job)};
  int32_t bad = 0;
  auto work = [&](int64_t begin, int64_t end, void* scratch) {
    if (!machine.kernels->spectrum->store(job, stored, begin, end, scratch)) __atomic_store_n(&bad, 1, __ATOMIC_RELAXED);
  };
  if (const Status status = run_spectra(machine, job, job.span.numel, work); status != kDone) return status;
  finite = !bad;
  if (!k) return kDone;
  int64_t* const counts = table.as<int64_t>();
  Chosen chosen{0, counts, counts + blocks, counts + 2 * blocks, indices, parts};
  int64_t ties = total;
  if (k < total) {
    const Status status = stored_kth_key(machine, job, stored, k, memory.as<uint32_t>(), chosen.kth, ties);
    if (status != kDone) return status;
  }
  auto count = [&](int64_t begin, int64_t end) { machine.kernels->spectrum->count(job, stored, chosen, begin, end); };
  if (!run(machine, job.pieces(), job.span.numel / kCheapness, count)) return kThreadsFailed;
  int64_t n = 0;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t same = std::min(chosen.ties[b], ties);
    chosen.start[b] = n, n += chosen.above[b] + same, ties -= same, chosen.ties[b] = same;
  }
  return run_spectra(machine, job, job.span.numel / kCheapness, [&](int64_t begin, int64_t end, void* scratch) {
    machine.kernels->spectrum->choose(job, stored, chosen, begin, end, scratch);
  });
}

} // namespace

Status pick_components(const Machine& machine, const Blocked& job, int64_t k, int32_t* indices, float* parts,
                       bool& finite) {
  const int64_t total = job.total();
  if (job.span.numel <= kStoredElements) return pick_stored(machine, job, k, indices, parts, finite);
  uint32_t least = 0;
  if (k < total && job.blocks() >= 2 * kSampledBlocks) {
    const int64_t num = kSampledBlocks * job.components();
    const double expected = (double)k * (double)num / (double)total;
    const int64_t rank = (int64_t)(1.02 * expected + 4.0 * std::sqrt(expected)) + 8;
    const Memory keys(4 * num), scratch(job.scratch());
    if (!keys.at || !scratch.at) return kNoMemory;
    if (rank < num) {
      uint32_t* const sampled = keys.as<uint32_t>();
      const int64_t stride = job.blocks() / kSampledBlocks;
      machine.kernels->spectrum->sample(job, stride, kSampledBlocks, sampled, scratch.at);
      std::nth_element(sampled, sampled + (rank - 1), sampled + num, std::greater<uint32_t>());
      least = sampled[rank - 1];
    }
  }
  if (least) {
    Components some(job, least, std::min(total, k + k / 4 + 65536));
    if (const Status status = collect(machine, job, some); status != kDone) return status;
    finite = !some.some.nonfinite;
    if (some.some.total >= k && some.some.total <= some.capacity) {
      return emit_components(machine, job, some, k, indices, parts);
    }
  }
  Components all(job, 0, total); // the sampled blocks were not like the others
  if (const Status status = collect(machine, job, all); status != kDone) return status;
  finite = !all.some.nonfinite;
  return emit_components(machine, job, all, k, indices, parts);
}

// False: indices that do not ascend within the components. y is then as it was.
bool ascend_within(const Sent& message, int64_t total) {
  bool bad = message.count && (message.indices[0] < 0 || message.indices[message.count - 1] >= total);
  for (int64_t i = 1; i < message.count; i++) bad |= message.indices[i] <= message.indices[i - 1];
  return !bad;
}

Status restore_signal(const Machine& machine, const Blocked& job, const Sent* messages, int64_t count, float scale,
                      bool add) {
  return run_spectra(machine, job, job.span.numel, [&](int64_t begin, int64_t end, void* scratch) {
    machine.kernels->spectrum->restore(job, messages, count, scale, add, begin, end, scratch);
  });
}
