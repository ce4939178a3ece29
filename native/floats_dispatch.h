// Element-wise formats as the binding calls them. Included at the end of dispatch.cpp.

namespace {

// Writes the properties of the rows into headers.
void put_headers(const FloatJob& job, bool params) {
  for (int64_t r = 0; r < job.num_rows; r++) {
    if (!job.rows[r].numel) continue;
    uint8_t* header = job.out + job.rows[r].payload;
    const int64_t saturated = job.found[r].saturated;
    const uint32_t words[2] = {job.found[r].nonfinite != 0, saturated < UINT32_MAX ? (uint32_t)saturated : UINT32_MAX};
    std::memset(header, 0, kHeader);
    std::memcpy(header, words, 8);
    std::memcpy(header + 8, &job.shift, 4);
    if (!params) continue;
    const float m = job.params[2 * r + 1];
    const bool whole = m >= 0 && m <= 22 && m == static_cast<float>(static_cast<int>(m));
    const int32_t mantissa = whole ? static_cast<int>(m) : -1;
    std::memcpy(header + 8, job.params + 2 * r, 4), std::memcpy(header + 12, &mantissa, 4);
  }
}

using FloatWork = void (*)(const FloatJob&, int64_t, int64_t);

// Blocks of whole buckets, which are measured before they are coded.
Status run_blocks(const Machine& machine, const FloatJob& job, FloatWork kernel) {
  int64_t blocks = 0, elements = 0;
  for (int64_t r = 0; r < job.num_rows; r++) {
    const int64_t numel = job.rows[r].numel;
    if (numel) blocks += ceil_div(numel, levels_block(numel, job.bucket)), elements += numel;
  }
  auto work = [&](int64_t begin, int64_t end) { kernel(job, begin, end); };
  return run(machine, blocks, elements, work) ? kDone : kThreadsFailed;
}

// With a count for each row, which is written into headers or `clipped`.
Status run_counted(const Machine& machine, FloatJob job, FloatWork kernel, bool params, int64_t* clipped) {
  Found few[16] = {};
  void* memory = job.num_rows <= 16 ? nullptr : std::calloc(job.num_rows, sizeof(Found));
  if (job.num_rows > 16 && !memory) return kNoMemory;
  job.found = memory ? static_cast<Found*>(memory) : few;
  const Status status = on_tiles(machine, job, kernel);
  if (clipped) {
    for (int64_t r = 0; r < job.num_rows; r++) clipped[r] = job.found[r].saturated;
  } else {
    put_headers(job, params);
  }
  std::free(memory);
  return status;
}

} // namespace

Status natural_encode(const Machine& machine, const FloatJob& job) {
  return run_counted(machine, job, machine.kernels->floats->natural_encode, false, nullptr);
}

Status range_encode(const Machine& machine, const FloatJob& job) {
  return run_counted(machine, job, machine.kernels->floats->range_encode, true, nullptr);
}

Status int_round(const Machine& machine, const FloatJob& job, int64_t* clipped) {
  return run_counted(machine, job, machine.kernels->floats->int_round, false, clipped);
}

Status natural_decode(const Machine& machine, const FloatJob& job) {
  return on_tiles(machine, job, machine.kernels->floats->natural_decode);
}

Status range_decode(const Machine& machine, const FloatJob& job) {
  return on_tiles(machine, job, machine.kernels->floats->range_decode);
}

Status int_decode(const Machine& machine, const FloatJob& job) {
  return on_tiles(machine, job, machine.kernels->floats->int_decode);
}

Status levels_decode(const Machine& machine, const FloatJob& job) {
  return on_tiles(machine, job, machine.kernels->floats->levels_decode);
}

Status magnitudes_decode(const Machine& machine, const FloatJob& job) {
  return on_tiles(machine, job, machine.kernels->floats->magnitudes_decode);
}

Status levels_encode(const Machine& machine, const FloatJob& job) {
  return run_blocks(machine, job, machine.kernels->floats->levels_encode);
}

Status magnitudes_encode(const Machine& machine, const FloatJob& job) {
  return run_blocks(machine, job, machine.kernels->floats->magnitudes_encode);
}
