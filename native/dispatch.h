// The kernels as the binding calls them: instruction-set level chosen, work spread over threads.
#pragma once
#include "core.h"

namespace thinwire {

// torch_parallel_for of PyTorch's stable C interface: runs body(from, to, context) over [begin, end) on its threads, in
// pieces of at least `grain`, and returns 0.
using Body = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);

enum Status { kDone, kNoMemory, kThreadsFailed };

// Levels that this build has and this CPU runs, best first; null-terminated.
const Kernels* const* levels();

// What a call runs on. Set under the interpreter's lock, copied before it is released.
struct Machine {
  const Kernels* kernels;
  ParallelFor parallel_for; // null: the calling thread alone
};

Status encode(const Machine&, const Job&);
Status decode(const Machine&, const Job&);
Status sum(const Machine&, const Job&);
Status checksum(const Machine&, const uint8_t* message, int64_t num_bytes, uint64_t& result);

} // namespace thinwire
