// Spectra as the binding calls them. Included in dispatch.cpp, after sparse_dispatch.h.

namespace {

constexpr int64_t kCachedElements = int64_t(1) << 20; // of a segment whose spectra stay in a cache
constexpr int64_t kCheapness = 16;                     // of a pass over spectra, beside transforms

// Runs work(begin, end, scratch) over blocks, with memory for each call. It costs as much as transforms of
// `elements`: threads are not woken for little.
template <class Work>
Status run_spectra(const Machine& machine, const Blocked& job, int64_t elements, Work work) {
  int32_t failed = 0;
  auto with_memory = [&](int64_t begin, int64_t end) {
    const Memory scratch(machine.kernels->spectrum->scratch_bytes(job));
    if (scratch.at) return work(begin, end, scratch.at);
    __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
  };
  if (!run(machine, job.blocks(), elements, with_memory)) return kThreadsFailed;
  return failed ? kNoMemory : kDone;
}

// The key of the k-th largest component, `rank` among the keys that were kept, and of each block how many components are
// above it, how many of those that have it are among the k, and where they begin.
void find_kth(const Blocked& job, Largest& of, int64_t rank, uint32_t* copy) {
  int64_t ties = 0, n = 0;
  of.kth = kth_of(of.keys, of.used, of.low, of.high, rank, copy, ties);
  for (int64_t b = 0; b < job.blocks(); b++) {
    const uint32_t *key = of.keys + of.places[b].at, *end = key + of.places[b].count;
    int64_t same = 0;
    for (; key < end; key++) of.above[b] += *key > of.kth, same += *key == of.kth;
    of.ties[b] = std::min(same, ties), ties -= of.ties[b];
    of.start[b] = n, n += of.above[b] + of.ties[b];
  }
}

// Between which keys the k-th largest of `total` components lies, all but certainly, by counts of a sample's keys.
void guess_keys(const int32_t* counts, int64_t total, int64_t k, uint32_t& low, uint32_t& high) {
  constexpr int64_t kFewest = 1024;
  low = 0, high = kNanKey + 1;
  int64_t num = 0;
  for (int bin = 0; bin < kBins; bin++) num += counts[bin];
  if (num < kFewest) return;
  const double expected = (double)k * (double)num / (double)total, margin = 4.0 * std::sqrt(expected) + 4.0;
  int64_t first = (int64_t)(expected - margin), last = (int64_t)(expected + margin); // ranks around that of the k-th
  if (first > 0) high = std::min((uint32_t)(bin_of(counts, first) + 1) << 20, high);
  if (last < num) low = std::min((uint32_t)bin_of(counts, last) << 20, kNanKey);
}

// The k components of largest magnitude, and the largest magnitude among their parts; NaN: a component is not finite.
// Spectra are computed once and kept.
Status pick_components(const Machine& machine, const Blocked& job, int64_t k, int32_t* indices, float* parts,
                       float& top) {
  const int64_t blocks = job.blocks(), total = job.total(), pitch = BlockRows::pitch_of(job);
  const Memory spectra(64 + 8 * pitch * blocks), keys(8 * total), table((24 + (int64_t)sizeof(Place)) * blocks);
  if (!spectra.at || !keys.at || !table.at) return kNoMemory;
  const BlockRows rows{reinterpret_cast<float*>(((uintptr_t)spectra.at + 63) / 64 * 64), pitch};
  int32_t counts[kBins] = {};
  auto store = [&](int64_t begin, int64_t end, void* scratch) {
    machine.kernels->spectrum->store(job, rows, counts, begin, end, scratch);
  };
  if (const Status status = run_spectra(machine, job, job.span.numel, store); status != kDone) return status;
  int64_t* const above = table.as<int64_t>();
  Largest of{};
  of.keys = keys.as<uint32_t>(), of.indices = indices, of.parts = parts;
  of.above = above, of.ties = above + blocks, of.start = above + 2 * blocks;
  of.places = reinterpret_cast<Place*>(above + 3 * blocks);
  guess_keys(counts, total, k, of.low, of.high);
  const int64_t elements = job.span.numel / kCheapness;
  auto split = [&](int64_t begin, int64_t end, void* scratch) {
    machine.kernels->spectrum->split(job, rows, of, begin, end, scratch);
  };
  int64_t rank = 0;
  while (true) {
    of.used = 0;
    if (const Status status = run_spectra(machine, job, elements, split); status != kDone) return status;
    rank = k;
    for (int64_t b = 0; b < blocks; b++) rank -= of.above[b];
    if (!k || (rank > 0 && rank <= of.used)) break;
    of.low = 0, of.high = kNanKey + 1; // the sample was unlike the rest
  }
  if (k) {
    find_kth(job, of, rank, of.keys + total);
    auto choose = [&](int64_t begin, int64_t end, void* scratch) {
      machine.kernels->spectrum->choose(job, rows, of, begin, end, scratch);
    };
    if (const Status status = run_spectra(machine, job, elements, choose); status != kDone) return status;
  }
  if (of.nonfinite) of.top = 0x7FC00000;
  std::memcpy(&top, &of.top, 4);
  return kDone;
}

Status restore_signal(const Machine& machine, const Blocked& job, const Sent* messages, int64_t count, float scale,
                      bool add) {
  return run_spectra(machine, job, job.span.numel, [&](int64_t begin, int64_t end, void* scratch) {
    machine.kernels->spectrum->restore(job, messages, count, scale, add, begin, end, scratch);
  });
}

// Runs work(machine, row) for all rows that are transformed: those that are much of all, or too large for a cache, by all
// threads together, and then the others by a thread each.
template <class Work>
Status for_spectra(const Machine& machine, const SpectrumJob& job, Work work) {
  int64_t elements = 0, count = 0, next = 0;
  int32_t worst = kDone;
  for (int64_t r = 0; r < job.num_rows; r++) elements += job.transforms(r) ? job.rows[r].numel : 0;
  const auto is_large = [&](const Row& row) { return row.numel > kCachedElements || 4 * row.numel > elements; };
  for (int64_t r = 0; r < job.num_rows; r++) {
    if (!job.transforms(r)) continue;
    if (!is_large(job.rows[r])) {
      count++;
    } else if (const Status status = work(machine, r); status != kDone) {
      return status;
    }
  }
  auto share = [&](int64_t, int64_t) {
    const Machine alone{machine.kernels, nullptr};
    for (int64_t r; (r = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < job.num_rows;) {
      if (!job.transforms(r) || is_large(job.rows[r])) continue;
      if (const Status status = work(alone, r); status != kDone) __atomic_store_n(&worst, status, __ATOMIC_RELAXED);
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
