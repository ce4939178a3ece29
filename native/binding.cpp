// The Python extension module, in the stable interface (abi3). Arguments are integers, addresses included, because
// reading a tensor's address in Python takes 0.1 us, and passing the tensor itself 6 us. thinwire.kernels.ops has
// checked them.
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <cstring>
#include <memory>
#include <new>

#include "dispatch.h"
#include "shared_words.h"

namespace {

using namespace thinwire;

constexpr int64_t kReleaseElements = 16384; // below this, releasing the interpreter's lock may cost more than the call
constexpr int64_t kMaxMessages = 4096;

Machine machine = {levels()[0], nullptr};

// Reads positional arguments in order; once one fails, all further ones do, and failed() is true.
class Arguments {
  PyObject* const* args;
  const Py_ssize_t count;
  Py_ssize_t at = 0;
  bool bad = false;

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

int64_t num_elements(const Job& job) {
  int64_t total = 0;
  for (int64_t r = 0; r < job.num_rows; r++) total += job.rows[r].numel;
  return total;
}

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

// x, dtype, rows, num_rows
void read_source(Arguments& in, Job& job) {
  job.own = in.address<const void>(), job.own_dtype = in.dtype();
  in.rows(job);
}

// y, dtype
void read_values(Arguments& in, Job& job) { job.y = in.address<void>(), job.y_dtype = in.dtype(); }

// rows, num_rows, y, dtype
void read_target(Arguments& in, Job& job) {
  in.rows(job);
  read_values(in, job);
}

// The last argument has been read: runs function(machine, job) if all were right.
template <class AnyJob>
PyObject* run_job(Arguments& in, const AnyJob& job, Status (*function)(const Machine&, const AnyJob&)) {
  if (in.failed()) return nullptr;
  return none_if(call(num_elements(job), [&](const Machine& now) { return function(now, job); }));
}

// encode(x, dtype, rows, num_rows, message, *format, key, *residual)
PyObject* py_encode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  Job job;
  read_source(in, job);
  job.out = in.address<uint8_t>();
  in.format(job);
  job.key = in.bits64();
  in.residual(job);
  return run_job(in, job, encode);
}

// decode(message, rows, num_rows, y, dtype, *format, add, scale)
PyObject* py_decode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  Job job;
  const uint8_t* message = in.address<const uint8_t>();
  job.messages = &message, job.num_messages = 1;
  read_target(in, job);
  in.format(job);
  job.add = in.flag(), job.scale = in.real();
  return run_job(in, job, decode);
}

// sum(own or 0, dtype, rows, num_rows, y, dtype, *format, scale, *messages)
PyObject* py_sum(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  Job job;
  const uint8_t* messages[kMaxMessages];
  read_source(in, job), read_values(in, job);
  in.format(job);
  job.scale = in.real();
  in.messages(job, messages);
  return run_job(in, job, sum);
}

// reduce(own, dtype, rows, num_rows, out_message, y, dtype, *format, scale, key, *residual, *messages)
PyObject* py_reduce(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  Job job;
  const uint8_t* messages[kMaxMessages];
  read_source(in, job);
  job.out = in.address<uint8_t>();
  read_values(in, job);
  in.format(job);
  job.scale = in.real();
  job.key = in.bits64();
  in.residual(job);
  in.messages(job, messages);
  return run_job(in, job, encode);
}

// raw_encode(x, dtype, rows, num_rows, message)
PyObject* py_raw_encode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  Job job;
  read_source(in, job);
  job.out = in.address<uint8_t>();
  return run_job(in, job, raw_encode);
}

// raw_decode(message, rows, num_rows, y, dtype, add, scale)
PyObject* py_raw_decode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  Job job;
  const uint8_t* message = in.address<const uint8_t>();
  job.messages = &message, job.num_messages = 1;
  read_target(in, job);
  job.add = in.flag(), job.scale = in.real();
  return run_job(in, job, raw_decode);
}

// raw_sum(own, dtype, rows, num_rows, y, dtype, out_message or 0, scale, *messages)
PyObject* py_raw_sum(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  Job job;
  const uint8_t* messages[kMaxMessages];
  read_source(in, job), read_values(in, job);
  job.out = in.address<uint8_t>(), job.scale = in.real();
  in.messages(job, messages);
  return run_job(in, job, raw_sum);
}

// rows_add(x, dtype, rows, num_rows, other, dtype, out, dtype, alpha)
PyObject* py_rows_add(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  RowJob job;
  read_source(in, job);
  job.other = in.address<const void>(), job.other_dtype = in.dtype();
  read_values(in, job);
  job.by = in.real();
  return run_job(in, job, rows_add);
}

// rows_scale(x, dtype, rows, num_rows, out, dtype, by, over)
PyObject* py_rows_scale(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  RowJob job;
  read_source(in, job), read_values(in, job);
  job.by = in.real(), job.over = in.real();
  return run_job(in, job, rows_scale);
}

// checksum(message, num_bytes) -> int
PyObject* py_checksum(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  const uint8_t* message = in.address<const uint8_t>();
  const int64_t num_bytes = in.integer();
  in.require(num_bytes >= 0, "a message has at least 0 bytes");
  if (in.failed()) return nullptr;
  uint64_t result = 0;
  const auto work = [&](const Machine& now) { return checksum(now, message, num_bytes, result); };
  if (!call(num_bytes / 4, work)) return nullptr;
  return PyLong_FromUnsignedLongLong(result);
}

// interface() -> the hash of _native.pyi as it was when this was built
PyObject* py_interface(PyObject*, PyObject*) { return PyUnicode_FromString(THINWIRE_INTERFACE); }

// levels() -> list of the instruction-set levels of this machine and build, best first
PyObject* py_levels(PyObject*, PyObject*) {
  PyObject* list = PyList_New(0);
  for (const Kernels* const* k = levels(); list && *k; k++) {
    PyObject* name = PyUnicode_FromString((*k)->level);
    if (!name || PyList_Append(list, name) < 0) Py_CLEAR(list);
    Py_XDECREF(name);
  }
  return list;
}

PyObject* py_level(PyObject*, PyObject*) { return PyUnicode_FromString(machine.kernels->level); }

PyObject* py_set_level(PyObject*, PyObject* name) {
  PyObject* text = PyUnicode_AsUTF8String(name);
  if (!text) return nullptr;
  const Kernels* found = nullptr;
  for (const Kernels* const* k = levels(); *k; k++) {
    if (std::strcmp((*k)->level, PyBytes_AsString(text)) == 0) found = *k;
  }
  Py_DECREF(text);
  if (!found) {
    PyErr_SetString(PyExc_ValueError, "no such level on this machine");
    return nullptr;
  }
  machine.kernels = found;
  return none_if(true);
}

// set_parallel_for(address of torch_parallel_for, or 0 for the calling thread alone)
PyObject* py_set_parallel_for(PyObject*, PyObject* address) {
  const uint64_t value = PyLong_AsUnsignedLongLong(address);
  if (value == UINT64_MAX && PyErr_Occurred()) return nullptr;
  machine.parallel_for = reinterpret_cast<ParallelFor>(static_cast<uintptr_t>(value));
  return none_if(true);
}

template <class Function>
PyCFunction method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

#include "adam_binding.h"
#include "factors_binding.h"
#include "floats_binding.h"
#include "norms_binding.h"
#include "shared_binding.h"
#include "sparse_binding.h"
#include "spectrum_binding.h"

PyMethodDef methods[] = {
    THINWIRE_ADAM_METHODS,
    THINWIRE_FACTOR_METHODS,
    THINWIRE_FLOAT_METHODS,
    THINWIRE_NORM_METHODS,
    THINWIRE_SPARSE_METHODS,
    THINWIRE_SPECTRUM_METHODS,
    THINWIRE_SHARED_METHODS,
    {"encode", method(py_encode), METH_FASTCALL, nullptr},
    {"decode", method(py_decode), METH_FASTCALL, nullptr},
    {"sum", method(py_sum), METH_FASTCALL, nullptr},
    {"reduce", method(py_reduce), METH_FASTCALL, nullptr},
    {"raw_encode", method(py_raw_encode), METH_FASTCALL, nullptr},
    {"raw_decode", method(py_raw_decode), METH_FASTCALL, nullptr},
    {"raw_sum", method(py_raw_sum), METH_FASTCALL, nullptr},
    {"rows_add", method(py_rows_add), METH_FASTCALL, nullptr},
    {"rows_scale", method(py_rows_scale), METH_FASTCALL, nullptr},
    {"checksum", method(py_checksum), METH_FASTCALL, nullptr},
    {"interface", py_interface, METH_NOARGS, nullptr},
    {"levels", py_levels, METH_NOARGS, nullptr},
    {"level", py_level, METH_NOARGS, nullptr},
    {"set_level", py_set_level, METH_O, nullptr},
    {"set_parallel_for", py_set_parallel_for, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "The native CPU core: see thinwire.kernels.native.", -1, methods,
    nullptr, nullptr, nullptr, nullptr,
};

} // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&module); }
