// The Python functions of products with narrow matrices. Included by binding.cpp.

// matrix, count, stride, rows, columns, rank
Factored read_factored(Arguments& in) {
  Factored job;
  job.matrix = in.address<float>(), job.count = in.integer(), job.stride = in.integer();
  job.rows = in.integer(), job.columns = in.integer(), job.rank = in.integer();
  in.require(job.count >= 0 && job.rows >= 0 && job.columns >= 0 && job.rank >= 1, "sizes are at least 0, ranks 1");
  return job;
}

PyObject* on_matrices(const Factored& job, Status (*work)(const Machine&, const Factored&)) {
  const int64_t elements = job.count * job.rows * job.columns;
  return none_if(call(elements, [&](const Machine& now) { return work(now, job); }));
}

// factor_rows(matrix, count, stride, rows, columns, rank, right, out, normalized)
PyObject* py_factor_rows(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  Factored job = read_factored(in);
  job.right = in.address<const float>(), job.out = in.address<float>(), job.normalized = in.flag();
  return in.failed() ? nullptr : on_matrices(job, factor_rows);
}

// factor_columns(matrix, count, stride, rows, columns, rank, left, out)
PyObject* py_factor_columns(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  Factored job = read_factored(in);
  job.left = in.address<const float>(), job.out = in.address<float>();
  return in.failed() ? nullptr : on_matrices(job, factor_columns);
}

// factor_product(matrix, count, stride, rows, columns, rank, left, right, scale, add)
PyObject* py_factor_product(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  Factored job = read_factored(in);
  job.left = in.address<const float>(), job.right = in.address<const float>();
  job.scale = in.real(), job.add = in.flag();
  return in.failed() ? nullptr : on_matrices(job, factor_product);
}

// factor_basis(count, rows, rank, left, out)
PyObject* py_factor_basis(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  Factored job;
  job.count = in.integer(), job.rows = in.integer(), job.rank = in.integer(), job.columns = job.rank;
  job.left = in.address<const float>(), job.out = in.address<float>();
  in.require(job.count >= 0 && job.rank >= 1 && job.rows >= job.rank, "as many rows as columns, at least");
  return in.failed() ? nullptr : on_matrices(job, factor_basis);
}

#define THINWIRE_FACTOR_METHODS                                                                                        \
  {"factor_rows", method(py_factor_rows), METH_FASTCALL, nullptr},                                                     \
      {"factor_columns", method(py_factor_columns), METH_FASTCALL, nullptr},                                           \
      {"factor_product", method(py_factor_product), METH_FASTCALL, nullptr},                                           \
      {"factor_basis", method(py_factor_basis), METH_FASTCALL, nullptr}
