// The Python functions of norms. Included by binding.cpp, after adam_binding.h.

bool is_power_of_two(int64_t value) { return value >= 1 && !(value & (value - 1)); }

// vector, numel, lanes, out
void read_layer(Arguments& in, SquareSum& job) {
  job.vector = in.address<const float>(), job.numel = read_numel(in);
  job.lanes = in.integer(), job.out = in.address<double>();
  in.require(is_power_of_two(job.lanes) && job.lanes <= kMostSquareLanes, "lanes are a power of two, up to 65536");
}

// vector, numel, lanes, size, runs, order, signs, out
void read_layer(Arguments& in, Sketch& job) {
  job.vector = in.address<const float>(), job.numel = read_numel(in);
  job.lanes = in.integer(), job.size = in.integer();
  in.require(is_power_of_two(job.lanes) && is_power_of_two(job.size), "lanes and sizes are powers of two");
  job.runs = in.address<const int64_t>(), job.order = in.address<const int64_t>();
  job.signs = in.address<const float>(), job.out = in.address<double>();
}

// square_sums(*vectors)
PyObject* py_square_sums(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return on_layers<SquareSum, 4>(args, count, square_sums);
}

// sketches(*vectors)
PyObject* py_sketches(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return on_layers<Sketch, 8>(args, count, sketches);
}

#define THINWIRE_NORM_METHODS                                                                                          \
  {"square_sums", method(py_square_sums), METH_FASTCALL, nullptr},                                                     \
      {"sketches", method(py_sketches), METH_FASTCALL, nullptr}
