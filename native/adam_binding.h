// The Python functions of Adam's moments. Included by binding.cpp.

// before or 0, after or 0, kept, added
Moving read_moving(Arguments& in) {
  Moving moving;
  moving.before = in.address<const float>(), moving.after = in.address<float>();
  moving.kept = in.real(), moving.added = in.real();
  in.require(!moving.before == !moving.after, "a moving average has two tensors");
  return moving;
}

int64_t read_numel(Arguments& in) {
  const int64_t numel = in.integer();
  in.require(numel >= 0, "a tensor has at least 0 elements");
  return numel;
}

// adam_normalise(gradient, numel, *square, *momentum, eps, factor)
PyObject* py_adam_normalise(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  Normalise job;
  job.gradient = in.address<float>(), job.numel = read_numel(in);
  job.square = read_moving(in), job.momentum = read_moving(in);
  job.eps = in.real(), job.factor = in.real();
  in.require(job.square.before || !job.numel, "a second moment is needed");
  if (in.failed()) return nullptr;
  return none_if(call(job.numel, [&](const Machine& now) { return adam_normalise(now, job); }));
}

// adam_apply(weights, update, numel, *momentum, kept, size)
PyObject* py_adam_apply(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  Apply job;
  job.weights = in.address<float>(), job.update = in.address<const float>(), job.numel = read_numel(in);
  job.momentum = read_moving(in);
  job.kept = in.real(), job.size = in.real();
  if (in.failed()) return nullptr;
  return none_if(call(job.numel, [&](const Machine& now) { return adam_apply(now, job); }));
}

#define THINWIRE_ADAM_METHODS                                                                                          \
  {"adam_normalise", method(py_adam_normalise), METH_FASTCALL, nullptr},                                               \
      {"adam_apply", method(py_adam_apply), METH_FASTCALL, nullptr}
