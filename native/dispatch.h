// What calls from Python have in common: the instruction-set level, threads, memory, arguments. Families of kernels add
// their functions, which binding.cpp includes. Kernels themselves, where THINWIRE_LEVEL is defined, need core.h only.
#pragma once
#include "core.h"

#if !defined(THINWIRE_LEVEL)

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace thinwire {

#if defined(THINWIRE_X86_LEVELS)
namespace x86_64_v2 { extern const Kernels kernels; }
namespace x86_64_v3 { extern const Kernels kernels; }
namespace x86_64_v4 { extern const Kernels kernels; }
#endif
namespace generic { extern const Kernels kernels; }

namespace {

// torch_parallel_for of PyTorch's stable C interface: runs body(from, to, context) over [begin, end) on its threads, in
// pieces of at least `grain`, and returns 0.
using Body = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);

enum Status { kDone, kNoMemory, kThreadsFailed };

// Levels of this build that this CPU supports, best first; null-terminated.
const Kernels* const* levels() {
  static const Kernels* found[5] = {};
  if (found[0]) return found;
  int n = 0;
#if defined(THINWIRE_X86_LEVELS)
  // Features that are not tested come with those that are, on every existing CPU (lzcnt with bmi2, for instance).
  const bool v2 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
  const bool v3 =
      v2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
  if (v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found[n++] = &x86_64_v4::kernels;
  }
  if (v3) found[n++] = &x86_64_v3::kernels;
  if (v2) found[n++] = &x86_64_v2::kernels;
#endif
  found[n] = &generic::kernels;
  return found;
}

// The level and threads of a call. Set while the interpreter's lock is held, copied before it is released.
struct Machine {
  const Kernels* kernels;
  ParallelFor parallel_for; // null: the calling thread alone
};

Machine machine = {levels()[0], nullptr};

constexpr int64_t kParallelElements = 131072; // below this, waking threads costs more than it saves
constexpr int64_t kTaskElements = 65536;      // elements of a thread, at least

// Subnormal values are kept (torch.set_flush_denormal would flush them and change bytes).
class FloatMode {
#if defined(__SSE2__)
  const unsigned saved = _mm_getcsr();

public:
  FloatMode() { _mm_setcsr(saved & ~0xE040u); } // round to nearest, no flush to zero, no denormals as zero
  ~FloatMode() { _mm_setcsr(saved); }
#endif
};

template <class Work>
bool run(const Machine& machine, int64_t pieces, int64_t elements, Work& work) {
  if (pieces == 0) return true;
  if (!machine.parallel_for || elements < kParallelElements || pieces == 1) {
    [[maybe_unused]] const FloatMode mode;
    work(0, pieces);
    return true;
  }
  const int64_t grain = ceil_div(pieces * kTaskElements, elements);
  const Body body = [](int64_t begin, int64_t end, void* context) {
    [[maybe_unused]] const FloatMode mode;
    (*static_cast<Work*>(context))(begin, end);
  };
  return machine.parallel_for(0, pieces, grain, body, &work) == 0;
}

// Of rows, or of other parts that have a number of elements.
struct Size {
  int64_t elements = 0, tiles = 0;

  template <class Part>
  Size(const Part* parts, int64_t count) {
    for (int64_t i = 0; i < count; i++) elements += parts[i].numel, tiles += ceil_div(parts[i].numel, kTile);
  }
};

// The tiles of all parts, of which a kernel takes [begin, end).
template <class Part>
Status on_tiles(const Machine& machine, const Part* parts, int64_t count,
                void (*kernel)(const Part*, int64_t, int64_t, int64_t)) {
  const Size size(parts, count);
  auto work = [&](int64_t begin, int64_t end) { kernel(parts, count, begin, end); };
  return run(machine, size.tiles, size.elements, work) ? kDone : kThreadsFailed;
}

template <class AnyJob>
Status on_tiles(const Machine& machine, const AnyJob& job, void (*kernel)(const AnyJob&, int64_t, int64_t)) {
  const Size size(job.rows, job.num_rows);
  auto work = [&](int64_t begin, int64_t end) { kernel(job, begin, end); };
  return run(machine, size.tiles, size.elements, work) ? kDone : kThreadsFailed;
}

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

constexpr int64_t kReleaseElements = 16384; // below this, releasing the interpreter's lock may cost more than the call
constexpr int64_t kMaxMessages = 4096;

// Reads positional arguments in order; once one fails, all further ones do, and failed() is true.
class Arguments {
  PyObject* const* args;
  const Py_ssize_t count;
  Py_ssize_t at = 0;
  bool bad = false;
  const uint8_t* only = nullptr;

  PyObject* next() {
    if (bad) return nullptr;
    if (at < count) return args[at++];
    PyErr_Format(PyExc_TypeError, "missing argument %zd", at);
    bad = true;
    return nullptr;
  }

public:
  Arguments(PyObject* const* args, Py_ssize_t count) : args(args), count(count) {}

  int64_t integer() {
    PyObject* object = next();
    const int64_t value = object ? PyLong_AsLongLong(object) : 0;
    bad = bad || (value == -1 && PyErr_Occurred());
    return value;
  }
  uint64_t bits64() {
    PyObject* object = next();
    const uint64_t value = object ? PyLong_AsUnsignedLongLong(object) : 0;
    bad = bad || (value == UINT64_MAX && PyErr_Occurred());
    return value;
  }
  template <class T>
  T* address() {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(bits64()));
  }
  float real() {
    PyObject* object = next();
    const double value = object ? PyFloat_AsDouble(object) : 0.0;
    bad = bad || (value == -1.0 && PyErr_Occurred());
    return static_cast<float>(value);
  }
  bool flag() {
    PyObject* object = next();
    const int value = object ? PyObject_IsTrue(object) : 0;
    bad = bad || value < 0;
    return value > 0;
  }
  Dtype dtype() {
    const int64_t code = integer();
    require(code >= 0 && code <= 2, "dtype must be 0, 1 or 2");
    return static_cast<Dtype>(code);
  }
  int64_t numel() {
    const int64_t value = integer();
    require(value >= 0, "a tensor has at least 0 elements");
    return value;
  }
  Py_ssize_t num_left() const { return count - at; }
  // x, dtype, rows, num_rows
  void source(Job& job) {
    job.own = address<const void>(), job.own_dtype = dtype();
    rows(job);
  }
  // y, dtype
  void values(Job& job) { job.y = address<void>(), job.y_dtype = dtype(); }
  // rows, num_rows, y, dtype
  void target(Job& job) { rows(job), values(job); }
  void rows(Job& job) {
    job.rows = address<const Row>();
    job.num_rows = integer();
    require(job.num_rows >= 0 && (job.rows || !job.num_rows), "rows must not be null");
  }
  void format(Job& job) { // thinwire.kernels.Format.packed
    Format& form = job.form;
    const int64_t code = integer();
    form.bucket = integer(), form.clip = real();
    form.bits = code & 0xFF, form.midrise = code >> 24 & 1, form.steps = static_cast<int>(code >> 32);
    const int64_t scheme = code >> 8 & 0xFF, rounding = code >> 16 & 0xFF;
    require(form.bits >= 1 && form.bits <= 8, "bits must be 1 to 8");
    require(form.bucket >= 1 && form.bucket <= (int64_t(1) << 62), "bucket must be 1 to 2**62");
    require(scheme <= kSign && rounding <= kShift && form.steps >= 1 && form.clip >= 0.0f, "no such format");
    form.scheme = static_cast<Scheme>(scheme), form.rounding = static_cast<Rounding>(rounding);
    require(form.max_code() < (1 << form.bits), "more levels than codes");
  }
  void residual(Job& job) {
    job.now = address<const float>(), job.next = address<float>(), job.loss_scale = real();
    require(!job.now == !job.next, "a residual has two tensors");
  }
  // A job's only message. The job may be used as long as these arguments.
  void message(Job& job) {
    only = address<const uint8_t>();
    job.messages = &only, job.num_messages = 1;
  }
  void messages(Job& job, const uint8_t** into) {
    job.messages = into;
    job.num_messages = count - at;
    require(job.num_messages <= kMaxMessages, "more than 4096 messages");
    for (int64_t i = 0; i < job.num_messages && !bad; i++) into[i] = address<const uint8_t>();
  }
  void require(bool ok, const char* text) {
    if (ok || bad) return;
    PyErr_SetString(PyExc_ValueError, text);
    bad = true;
  }
  bool is_bad() const { return bad; }
  bool failed() {
    if (!bad && at < count) require(false, "too many arguments");
    return bad;
  }
};

// Runs work(machine), without the interpreter's lock if it is long. False with an exception set if it fails.
template <class Work>
bool call(int64_t elements, Work work) {
  const Machine now = machine;
  Status status;
  if (elements < kReleaseElements) {
    status = work(now);
  } else {
    PyThreadState* state = PyEval_SaveThread();
    status = work(now);
    PyEval_RestoreThread(state);
  }
  if (status == kNoMemory) PyErr_NoMemory();
  if (status == kThreadsFailed) PyErr_SetString(PyExc_RuntimeError, "PyTorch's threads did not take the work");
  return status == kDone;
}

PyObject* none_if(bool done) {
  if (!done) return nullptr;
  Py_INCREF(Py_None);
  return Py_None;
}

// The last argument has been read: runs work(machine) on the job's rows if all were right.
template <class Work>
PyObject* run_rows(Arguments& in, const Job& job, Work work) {
  return in.failed() ? nullptr : none_if(call(Size(job.rows, job.num_rows).elements, work));
}

template <class AnyJob>
PyObject* run_tiles(Arguments& in, const AnyJob& job, void (*kernel)(const AnyJob&, int64_t, int64_t)) {
  return run_rows(in, job, [&](const Machine& now) { return on_tiles(now, job, kernel); });
}

// Runs work(machine, parts, count) on parts of kFields arguments each, end to end, that read_part() reads.
template <class Part, int kFields, class Work>
PyObject* on_parts(Arguments& in, Work work) {
  const int64_t count = ceil_div(in.num_left(), kFields);
  const std::unique_ptr<Part[]> parts(new (std::nothrow) Part[count]);
  if (!parts) return PyErr_NoMemory();
  int64_t elements = 0;
  for (int64_t i = 0; i < count; i++) read_part(in, parts[i]), elements += parts[i].numel;
  if (in.failed()) return nullptr;
  return none_if(call(elements, [&](const Machine& now) { return work(now, parts.get(), count); }));
}

} // namespace
} // namespace thinwire

#endif
