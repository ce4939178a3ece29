// The Python extension module, in the stable interface (abi3). Arguments are integers, addresses included, because
// reading a tensor's address in Python takes 0.1 us, and passing the tensor itself 6 us. thinwire.kernels.native has
// checked them. Code of the standard library is compiled here only, for every CPU.
#include "adam.h"
#include "dispatch.h"
#include "factors.h"
#include "floats.h"
#include "norms.h"
#include "shared_words.h"
#include "sparse.h"
#include "spectrum.h"

namespace {

using namespace thinwire;

Status encode_wide(const Machine& machine, const Job& job, const Row& row) {
  const int64_t buckets = num_buckets(row.numel, job.form.bucket), pieces = ceil_div(row.numel, kLoaded);
  void* memory = std::malloc(buckets * (2 * sizeof(int32_t) + 3 * sizeof(float)));
  if (!memory) return kNoMemory;
  int32_t* keys = static_cast<int32_t*>(memory);
  float* floats = reinterpret_cast<float*>(keys + 2 * buckets);
  const Wide wide{keys, keys + buckets, floats, floats + buckets, floats + 2 * buckets};
  for (int64_t k = 0; k < buckets; k++) wide.low_key[k] = INT32_MAX, wide.high_key[k] = INT32_MIN;
  auto extrema = [&](int64_t begin, int64_t end) { machine.kernels->wide_extrema(job, row, wide, begin, end); };
  auto scales = [&](int64_t, int64_t) { machine.kernels->wide_scales(job, row, wide); };
  auto codes = [&](int64_t begin, int64_t end) { machine.kernels->wide_codes(job, row, wide, begin, end); };
  auto sums = [&](int64_t begin, int64_t end) { machine.kernels->wide_sums(job, row, wide, begin, end); };
  const bool found =
      job.form.summed() ? run(machine, buckets, row.numel, sums) : run(machine, pieces, row.numel, extrema);
  const bool done = found && run(machine, 1, buckets, scales) &&
                    run(machine, pieces, row.numel, codes);
  std::free(memory);
  return done ? kDone : kThreadsFailed;
}

Status encode(const Machine& machine, const Job& job) {
  const Blocks blocks(job);
  int64_t pieces = 0, elements = 0;
  for (int64_t r = 0; r < job.num_rows; r++) {
    const Row& row = job.rows[r];
    if (blocks.wide(row.numel)) {
      if (const Status status = encode_wide(machine, job, row); status != kDone) return status;
    } else {
      pieces += blocks.count(row.numel), elements += row.numel;
    }
  }
  auto work = [&](int64_t begin, int64_t end) { machine.kernels->encode_blocks(job, begin, end); };
  return run(machine, pieces, elements, work) ? kDone : kThreadsFailed;
}

PyObject* py_encode(Arguments& in) {
  Job job;
  in.source(job), job.out = in.address<uint8_t>();
  in.format(job);
  job.key = in.bits64();
  in.residual(job);
  return run_rows(in, job, [&](const Machine& now) { return encode(now, job); });
}

PyObject* py_decode(Arguments& in) {
  Job job;
  in.message(job), in.target(job);
  in.format(job);
  job.add = in.flag(), job.scale = in.real();
  return run_tiles(in, job, machine.kernels->decode_tiles);
}

PyObject* py_sum(Arguments& in) {
  Job job;
  const uint8_t* messages[kMaxMessages];
  in.source(job), in.values(job);
  in.format(job);
  job.scale = in.real();
  in.messages(job, messages);
  return run_tiles(in, job, machine.kernels->sum_tiles);
}

PyObject* py_reduce(Arguments& in) {
  Job job;
  const uint8_t* messages[kMaxMessages];
  in.source(job), job.out = in.address<uint8_t>();
  in.values(job);
  in.format(job);
  job.scale = in.real();
  job.key = in.bits64();
  in.residual(job);
  in.messages(job, messages);
  return run_rows(in, job, [&](const Machine& now) { return encode(now, job); });
}

PyObject* py_raw_encode(Arguments& in) {
  Job job;
  in.source(job), job.out = in.address<uint8_t>();
  return run_tiles(in, job, machine.kernels->raw_encode_tiles);
}

PyObject* py_raw_decode(Arguments& in) {
  Job job;
  in.message(job), in.target(job);
  job.add = in.flag(), job.scale = in.real();
  return run_tiles(in, job, machine.kernels->raw_decode_tiles);
}

PyObject* py_raw_sum(Arguments& in) {
  Job job;
  const uint8_t* messages[kMaxMessages];
  in.source(job), in.values(job);
  job.out = in.address<uint8_t>(), job.scale = in.real();
  in.messages(job, messages);
  return run_tiles(in, job, machine.kernels->raw_sum_tiles);
}

PyObject* py_rows_add(Arguments& in) {
  RowJob job;
  in.source(job);
  job.other = in.address<const void>(), job.other_dtype = in.dtype();
  in.values(job);
  job.by = in.real();
  return run_tiles(in, job, machine.kernels->add_tiles);
}

PyObject* py_rows_scale(Arguments& in) {
  RowJob job;
  in.source(job), in.values(job);
  job.by = in.real(), job.over = in.real();
  return run_tiles(in, job, machine.kernels->scale_tiles);
}

// checksum(message, num_bytes) -> int
PyObject* py_checksum(Arguments& in) {
  const uint8_t* message = in.address<const uint8_t>();
  const int64_t num_bytes = in.integer();
  in.require(num_bytes >= 0, "a message has at least 0 bytes");
  if (in.failed()) return nullptr;
  uint64_t result = 0;
  const auto all = [&](const Machine& now) {
    const int64_t words = num_bytes / 4;
    auto work = [&](int64_t begin, int64_t end) {
      const int64_t last = std::min(end * kTaskElements, words);
      __atomic_fetch_add(&result, now.kernels->checksum(message, begin * kTaskElements, last), __ATOMIC_RELAXED);
    };
    return run(now, ceil_div(words, kTaskElements), words, work) ? kDone : kThreadsFailed;
  };
  return call(num_bytes / 4, all) ? PyLong_FromUnsignedLongLong(result) : nullptr;
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

PyObject* py_set_parallel_for(PyObject*, PyObject* address) {
  const uint64_t value = PyLong_AsUnsignedLongLong(address);
  if (value == UINT64_MAX && PyErr_Occurred()) return nullptr;
  machine.parallel_for = reinterpret_cast<ParallelFor>(static_cast<uintptr_t>(value));
  return none_if(true);
}

template <PyObject* (*kFunction)(Arguments&)>
PyCFunction method() {
  PyObject* (*const function)(PyObject*, PyObject* const*, Py_ssize_t) = [](PyObject*, PyObject* const* args,
                                                                          Py_ssize_t count) {
    Arguments in(args, count);
    return kFunction(in);
  };
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

#define METHOD(name) {#name, method<py_##name>(), METH_FASTCALL, nullptr}

// Their arguments are in thinwire/kernels/_native.pyi.
PyMethodDef methods[] = {
    METHOD(encode), METHOD(decode), METHOD(sum), METHOD(reduce), METHOD(checksum),
    METHOD(raw_encode), METHOD(raw_decode), METHOD(raw_sum), METHOD(rows_add), METHOD(rows_scale),
    METHOD(adam_normalize), METHOD(adam_apply), METHOD(square_sums), METHOD(sketches),
    METHOD(factor_rows), METHOD(factor_columns), METHOD(factor_product), METHOD(factor_basis),
    METHOD(natural_encode), METHOD(natural_decode), METHOD(rangefloat_encode), METHOD(rangefloat_decode),
    METHOD(levels_encode), METHOD(levels_decode), METHOD(magnitudes_encode), METHOD(magnitudes_decode),
    METHOD(int_round), METHOD(int_decode), METHOD(spectrum_encode), METHOD(spectrum_decode),
    METHOD(pick), METHOD(abs_histogram), METHOD(pack_indices), METHOD(unpack_indices), METHOD(sparse_scatter),
    METHOD(shared_post), METHOD(shared_read), METHOD(shared_wait),
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
