// The Python functions of sparse selection. Included by binding.cpp.

constexpr int64_t kMaxIndex = INT32_MAX;

// x, dtype, start, numel
Span read_span(Arguments& in) {
  Span span;
  span.x = in.address<const void>(), span.dtype = in.dtype();
  span.start = in.integer(), span.numel = in.integer();
  in.require(span.start >= 0 && span.numel >= 0 && span.numel <= kMaxIndex, "a span has 0 to 2**31 - 1 elements");
  return span;
}

// pick(x, dtype, start, numel, k, least, partial, sampled, offset, stride, num_samples, rank, indices, values)
// -> (picked, that reached the threshold, finite)
PyObject* py_pick(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  const Span span = read_span(in);
  Pick job;
  job.k = in.integer();
  const int64_t least = in.integer();
  job.least = static_cast<uint32_t>(least);
  job.partial = in.flag(), job.sampled = in.flag();
  job.offset = in.integer(), job.stride = in.integer(), job.num_samples = in.integer(), job.rank = in.integer();
  Picked to = {in.address<int32_t>(), in.address<float>(), 0, 0, true};
  in.require(least >= 1 && least <= kNanKey + 1, "no such key");
  in.require(job.k >= 0 && job.k <= kMaxIndex && (job.k <= span.numel || job.partial), "k is 0 to numel");
  in.require(job.rank >= 0 && job.rank <= job.num_samples && job.num_samples <= span.numel,
             "rank is within the sample");
  in.require(!job.num_samples || (job.offset >= 0 && job.stride >= 1 && job.stride <= span.numel &&
                                  job.offset + (job.num_samples - 1) * job.stride < span.numel),
             "the sample is within the span");
  if (in.failed() || !call(span.numel, [&](const Machine& now) { return pick(now, span, job, to); })) return nullptr;
  return Py_BuildValue("(LLN)", static_cast<long long>(to.count), static_cast<long long>(to.total),
                       PyBool_FromLong(to.finite));
}

// abs_histogram(x, dtype, start, numel, counts)
PyObject* py_abs_histogram(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  const Span span = read_span(in);
  int32_t* counts = in.address<int32_t>();
  if (in.failed()) return nullptr;
  return none_if(call(span.numel, [&](const Machine& now) { return abs_histogram(now, span, counts); }));
}

IndexList read_list(Arguments& in) {
  IndexList list;
  list.numel = in.integer(), list.k = in.integer(), list.bitmap = in.flag();
  in.require(list.numel >= 0 && list.numel <= kMaxIndex && list.k >= 0 && list.k <= list.numel, "k is 0 to numel");
  return list;
}

// pack_indices(indices, count, numel, k, bitmap, bytes) -> whether they ascend within 0..numel
PyObject* py_pack_indices(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  const int32_t* indices = in.address<const int32_t>();
  const int64_t num = in.integer();
  const IndexList list = read_list(in);
  uint8_t* bytes = in.address<uint8_t>();
  in.require(num >= 0 && num <= list.k, "more than k indices");
  if (in.failed()) return nullptr;
  bool good = false;
  const auto work = [&](const Machine&) { return good = pack_indices(indices, num, list, bytes), kDone; };
  return call(list.bitmap ? list.numel / 8 : num, work) ? PyBool_FromLong(good) : nullptr;
}

// unpack_indices(bytes, numel, k, bitmap, indices) -> how many
PyObject* py_unpack_indices(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  const uint8_t* bytes = in.address<const uint8_t>();
  const IndexList list = read_list(in);
  int32_t* indices = in.address<int32_t>();
  if (in.failed()) return nullptr;
  int64_t found = 0;
  const auto work = [&](const Machine&) { return found = unpack_indices(bytes, list, indices), kDone; };
  return call(list.bitmap ? list.numel / 8 : list.k, work) ? PyLong_FromLongLong(found) : nullptr;
}

// sparse_scatter(y, dtype, start, numel, indices, values or 0, count, scale) -> whether all indices were inside
PyObject* py_sparse_scatter(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  const Span span = read_span(in);
  const int32_t* indices = in.address<const int32_t>();
  const void* values = in.address<const void>();
  const int64_t num = in.integer();
  const float scale = in.real();
  in.require(num >= 0, "a count is at least 0");
  if (in.failed()) return nullptr;
  bool inside = false;
  const auto work = [&](const Machine& now) {
    inside = are_inside(indices, num, span.numel);
    if (inside) scatter(now, const_cast<void*>(span.x), span.dtype, span.start, indices, values, num, scale);
    return kDone;
  };
  return call(num, work) ? PyBool_FromLong(inside) : nullptr;
}

#define THINWIRE_SPARSE_METHODS                                                                                        \
  {"pick", method(py_pick), METH_FASTCALL, nullptr},                                                                   \
      {"abs_histogram", method(py_abs_histogram), METH_FASTCALL, nullptr},                                             \
      {"pack_indices", method(py_pack_indices), METH_FASTCALL, nullptr},                                               \
      {"unpack_indices", method(py_unpack_indices), METH_FASTCALL, nullptr},                                           \
      {"sparse_scatter", method(py_sparse_scatter), METH_FASTCALL, nullptr}
