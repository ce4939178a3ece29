// Spectra as the binding calls them. Included in dispatch.cpp, after sparse_dispatch.h.

namespace {

constexpr int64_t kCachedElements = int64_t(1) << 20; // of a segment whose spectra stay in a cache
constexpr int64_t kCheapness = 64;                    // of a pass over candidates, beside transforms

// Runs work(begin, end, scratch) over `count` parts of a job, with memory for each call, and `extra` bytes behind it. It
// costs as much as transforms of `elements`: threads are not woken for little.
template <class Work>
Status run_spectra(const Machine& machine, const Blocked& job, int64_t count, int64_t elements, int64_t extra,
                   Work work) {
  int32_t failed = 0;
  auto with_memory = [&](int64_t begin, int64_t end) {
    const Memory scratch(machine.kernels->spectrum->scratch_bytes(job) + extra);
    if (scratch.at) return work(begin, end, scratch.at);
    __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
  };
  if (!run(machine, count, elements, with_memory)) return kThreadsFailed;
  return failed ? kNoMemory : kDone;
}

// Counts of the keys of a sample's components, by their first 11 bits.
struct Sample {
  int32_t counts[kBins] = {};
  int64_t groups = 0;

  // Keys that the k-th largest of `total` components is not below, and is below, all but certainly: where it lies in the
  // sample, and so many standard errors more, and a share, because groups differ.
  void guess(int64_t total, int64_t k, uint32_t from, double share, uint32_t& low, uint32_t& high) const {
    constexpr int64_t kFewest = 1024;
    low = from, high = kNanKey + 1;
    int64_t num = 0;
    for (int bin = (int)(from >> 20); bin < kBins; bin++) num += counts[bin];
    if (num < kFewest) return;
    const double expected = (double)k * (double)num / (double)total;
    const double margin = 4.0 * std::sqrt(expected) + expected * share / std::sqrt((double)groups) + 4.0;
    int64_t first = (int64_t)(expected - margin), last = (int64_t)(expected + margin);
    if (first > 0) high = std::min((uint32_t)(bin_of(counts, first) + 1) << 20, high);
    if (last < num) low = std::min((uint32_t)bin_of(counts, last) << 20, kNanKey);
  }
};

// Writes the k largest candidates, by index.
Status choose_largest(const Machine& machine, const Blocked& job, int64_t k, const Sample& sample, uint32_t* room,
                      Largest& of) {
  const uint32_t* const keys = of.candidates.keys;
  uint32_t low, high;
  sample.guess(of.used, k, of.least, 0.25, low, high); // in groups that differ keys are distributed alike
  int64_t above = 0, ties = 0, n = 0;
  const int64_t between = machine.kernels->sparse->narrow(keys, of.used, low, high, room, above), rank = k - above;
  of.kth = rank > 0 && rank <= between ? kth_of(machine, room, between, low, high, rank, room, ties)
                                       : kth_of(machine, keys, of.used, of.least, kNanKey + 1, k, room, ties);
  for (int64_t g = 0; g < job.groups(); g++) {
    const int32_t *key = reinterpret_cast<const int32_t*>(keys + of.places[g].at), *end = key + of.places[g].count;
    int32_t more = 0, same = 0;
    for (; key < end; key++) more += *key > (int32_t)of.kth, same += *key == (int32_t)of.kth;
    of.ties[g] = std::min<int64_t>(same, ties), ties -= of.ties[g];
    of.start[g] = n, n += more + of.ties[g];
  }
  auto choose = [&](int64_t begin, int64_t end, void* scratch) {
    machine.kernels->spectrum->choose(job, of, begin, end, scratch);
  };
  return run_spectra(machine, job, job.groups(), of.used / kCheapness, 0, choose);
}

// The k components of largest magnitude, and the largest magnitude among their parts; NaN: a component is not finite.
Status pick_components(const Machine& machine, const Blocked& job, int64_t k, int32_t* indices, float* parts,
                       float& top) {
  const int64_t groups = job.groups(), total = job.total(), pitch = GroupRows::pitch_of(job);
  const int64_t numel = job.span.numel;
  Sample counted;
  while (job.sampled(counted.groups) < groups) counted.groups++;
  const Memory sampled(64 + 8 * pitch * counted.groups), table((16 + (int64_t)sizeof(Place)) * groups);
  if (!sampled.at || !table.at) return kNoMemory;
  const GroupRows rows{reinterpret_cast<float*>(((uintptr_t)sampled.at + 63) / 64 * 64), pitch};
  auto sample = [&](int64_t begin, int64_t end, void* scratch) {
    machine.kernels->spectrum->sample(job, rows, counted.counts, begin, end, scratch);
  };
  Status status = run_spectra(machine, job, counted.groups, numel / kOneIn, 0, sample);
  if (status != kDone) return status;
  uint32_t high;
  Largest of{};
  counted.guess(total, k, 0, 1.0, of.least, high);
  of.ties = table.as<int64_t>(), of.start = of.ties + groups, of.places = reinterpret_cast<Place*>(of.start + groups);
  of.indices = indices, of.parts = parts;
  auto collect = [&](int64_t begin, int64_t end, void* scratch) {
    machine.kernels->spectrum->collect(job, rows, of, begin, end, scratch);
  };
  for (of.capacity = of.least ? std::min(total, 2 * k + kGroupElements) : total;; of.capacity = total) {
    const Memory candidates(Components::kBytes * of.capacity), keys(4 * of.capacity);
    if (!candidates.at || !keys.at) return kNoMemory;
    of.candidates = Components::in(candidates.at, of.capacity), of.used = 0;
    status = run_spectra(machine, job, groups, numel, 0, collect);
    if (status != kDone) return status;
    if (of.used < k) {
      of.least = 0; // the sample was unlike the rest
    } else if (of.used <= of.capacity) {
      if (k) status = choose_largest(machine, job, k, counted, keys.as<uint32_t>(), of);
      if (status != kDone) return status;
      break;
    }
  }
  if (of.nonfinite) of.top = 0x7FC00000;
  std::memcpy(&top, &of.top, 4);
  return kDone;
}

Status restore_signal(const Machine& machine, const Blocked& job, const Sent* messages, int64_t count, float scale,
                      bool add) {
  const int64_t room = (machine.kernels->spectrum->scratch_bytes(job) + 7) / 8 * 8, extra = 8 * count + 8;
  auto restore = [&](int64_t begin, int64_t end, void* scratch) {
    int64_t* const next = reinterpret_cast<int64_t*>(static_cast<char*>(scratch) + room);
    machine.kernels->spectrum->restore(job, messages, count, scale, add, begin, end, next, scratch);
  };
  return run_spectra(machine, job, job.blocks(), job.span.numel, extra, restore);
}

// Runs work(machine, row) for all rows that are transformed: those that are much of all, or too large for a cache, by all
// threads together, and then the others by a thread each, the largest first.
template <class Work>
Status for_spectra(const Machine& machine, const SpectrumJob& job, Work work) {
  const Memory memory(8 * job.num_rows);
  int64_t* const others = memory.as<int64_t>();
  if (!others) return kNoMemory;
  int64_t elements = 0, count = 0, next = 0;
  int32_t worst = kDone;
  for (int64_t r = 0; r < job.num_rows; r++) elements += job.transforms(r) ? job.rows[r].numel : 0;
  for (int64_t r = 0; r < job.num_rows; r++) {
    if (!job.transforms(r)) continue;
    if (job.rows[r].numel <= kCachedElements && 4 * job.rows[r].numel <= elements) {
      others[count++] = r;
    } else if (const Status status = work(machine, r); status != kDone) {
      return status;
    }
  }
  std::sort(others, others + count, [&](int64_t a, int64_t b) { return job.rows[a].numel > job.rows[b].numel; });
  auto share = [&](int64_t, int64_t) {
    const Machine alone{machine.kernels, nullptr};
    for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count;) {
      const Status status = work(alone, others[i]);
      if (status != kDone) __atomic_store_n(&worst, status, __ATOMIC_RELAXED);
    }
  };
  if (!run(machine, count, elements, share)) return kThreadsFailed;
  return static_cast<Status>(worst);
}

} // namespace

Status spectrum_encode(const Machine& machine, const SpectrumJob& job) {
  return for_spectra(machine, job, [&](const Machine& threads, int64_t r) {
    const Blocked blocked = job.blocked(r, job.own, job.own_dtype);
    const int64_t k = job.kept[r];
    const Memory memory(4 * k);
    int32_t* const indices = memory.as<int32_t>();
    if (!indices) return kNoMemory;
    float* const parts = job.parts + job.first_part(r);
    const Status status = pick_components(threads, blocked, k, indices, parts, job.tops[r]);
    if (status != kDone) return status;
    uint8_t* const payload = job.out + job.rows[r].payload;
    std::memset(payload, 0, kHeader);
    payload[0] = std::isnan(job.tops[r]);
    put_indices(indices, k, IndexList::shorter(blocked.total(), k), payload + kHeader);
    return kDone;
  });
}

Status spectrum_decode(const Machine& machine, const SpectrumJob& job) {
  return for_spectra(machine, job, [&](const Machine& threads, int64_t r) {
    const Blocked blocked = job.blocked(r, job.y, job.y_dtype);
    const int64_t k = job.kept[r], first = job.first_part(r), width = 4 * k + (int64_t)sizeof(Sent);
    const Memory memory(width * job.num_messages);
    Sent* const sent = memory.as<Sent>();
    if (!sent) return kNoMemory;
    int32_t* const indices = reinterpret_cast<int32_t*>(sent + job.num_messages);
    bool finite = true;
    for (int64_t m = 0; m < job.num_messages; m++) {
      const uint8_t* payload = job.messages[m] + job.rows[r].payload;
      uint32_t nonfinite;
      std::memcpy(&nonfinite, payload, 4);
      finite &= !nonfinite;
      const IndexList list = IndexList::shorter(blocked.total(), k);
      const int64_t count = unpack_indices(payload + kHeader, list, indices + m * k);
      sent[m] = Sent{indices + m * k, job.received[m] + first, count};
    }
    job.tops[r] = finite ? 0.0f : __builtin_nanf("");
    return finite ? restore_signal(threads, blocked, sent, job.num_messages, job.scale, job.add) : kDone;
  });
}
