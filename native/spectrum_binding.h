// The Python functions of spectra. Included by binding.cpp.

// x, dtype, start, numel, block, roots
Blocked read_blocked(Arguments& in) {
  Blocked job;
  job.span = read_span(in);
  job.block = in.integer(), job.roots = in.address<const float>();
  in.require(job.block >= kLeastBlock && job.block <= kMostBlock && !(job.block & (job.block - 1)),
             "a block has a power of two of elements, 64 to 16384");
  if (!in.is_bad()) in.require(job.total() <= kMaxIndex, "there are at most 2**31 - 1 components");
  return job;
}

// spectrum_pick(x, dtype, start, numel, block, roots, k, indices, parts) -> finite
PyObject* py_spectrum_pick(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  const Blocked job = read_blocked(in);
  const int64_t k = in.integer();
  int32_t* indices = in.address<int32_t>();
  float* parts = in.address<float>();
  if (in.failed()) return nullptr;
  in.require(k >= 0 && k <= job.total(), "k is 0 to the number of components");
  if (in.failed()) return nullptr;
  bool finite = true;
  const auto work = [&](const Machine& now) { return pick_components(now, job, k, indices, parts, finite); };
  return call(job.span.numel, work) ? PyBool_FromLong(finite) : nullptr;
}

// spectrum_sum(y, dtype, start, numel, block, roots, add, scale, *(indices, parts, count)) -> whether indices ascended
PyObject* py_spectrum_sum(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  const Blocked job = read_blocked(in);
  const bool add = in.flag();
  const float scale = in.real();
  const int64_t num = (count - 8) / 3;
  in.require(count >= 8 && (count - 8) % 3 == 0 && num <= kMaxMessages, "up to 4096 messages of three arguments");
  if (in.is_bad()) return nullptr;
  Sent* messages = static_cast<Sent*>(PyMem_Malloc(sizeof(Sent) * (num + 1)));
  if (!messages) return PyErr_NoMemory();
  for (int64_t m = 0; m < num; m++) {
    messages[m].indices = in.address<const int32_t>(), messages[m].parts = in.address<const float>();
    messages[m].count = in.integer();
  }
  bool good = true;
  bool done = !in.failed();
  if (done) {
    done = call(job.span.numel, [&](const Machine& now) {
      for (int64_t m = 0; m < num; m++) good = good && ascend_within(messages[m], job.total());
      return good ? restore_signal(now, job, messages, num, scale, add) : kDone;
    });
  }
  PyMem_Free(messages);
  return done ? PyBool_FromLong(good) : nullptr;
}

#define THINWIRE_SPECTRUM_METHODS                                                                                      \
  {"spectrum_pick", method(py_spectrum_pick), METH_FASTCALL, nullptr},                                                 \
      {"spectrum_sum", method(py_spectrum_sum), METH_FASTCALL, nullptr}
