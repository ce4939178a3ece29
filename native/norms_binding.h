// The Python functions of norms. Included by binding.cpp, after adam_binding.h.

bool is_power_of_two(int64_t value) { return value >= 1 && !(value & (value - 1)); }

// square_sum(x, numel, lanes) -> float
PyObject* py_square_sum(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  const float* x = in.address<const float>();
  const int64_t numel = read_numel(in), lanes = in.integer();
  in.require(is_power_of_two(lanes), "lanes are a power of two");
  if (in.failed()) return nullptr;
  double sum = 0.0;
  const bool done = call(numel, [&](const Machine& now) { return square_sum(now, x, numel, lanes, sum); });
  return done ? PyFloat_FromDouble(sum) : nullptr;
}

// sketch(vector, numel, lanes, size, runs, order, signs, out)
PyObject* py_sketch(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  Sketch job;
  job.vector = in.address<const float>(), job.numel = read_numel(in);
  job.lanes = in.integer(), job.size = in.integer();
  in.require(is_power_of_two(job.lanes) && is_power_of_two(job.size), "lanes and sizes are powers of two");
  job.runs = in.address<const int64_t>(), job.order = in.address<const int64_t>();
  job.signs = in.address<const float>(), job.out = in.address<double>();
  if (in.failed()) return nullptr;
  return none_if(call(job.numel, [&](const Machine& now) { return sketch(now, job); }));
}

#define THINWIRE_NORM_METHODS                                                                                          \
  {"square_sum", method(py_square_sum), METH_FASTCALL, nullptr}, {"sketch", method(py_sketch), METH_FASTCALL, nullptr}
