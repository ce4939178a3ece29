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

// gradient, numel, *square, *momentum, eps, factor
void read_layer(Arguments& in, Normalize& layer) {
  layer.gradient = in.address<float>(), layer.numel = read_numel(in);
  layer.square = read_moving(in), layer.momentum = read_moving(in);
  layer.eps = in.real(), layer.factor = in.real();
  in.require(layer.square.before || !layer.numel, "a second moment is needed");
}

// weights, update, numel, *momentum, kept, size
void read_layer(Arguments& in, Apply& layer) {
  layer.weights = in.address<float>(), layer.update = in.address<const float>(), layer.numel = read_numel(in);
  layer.momentum = read_moving(in);
  layer.kept = in.real(), layer.size = in.real();
}

// Runs `work` on layers of kFields arguments each, end to end.
template <class Layer, int kFields>
PyObject* on_layers(PyObject* const* args, Py_ssize_t count, Status (*work)(const Machine&, const Layer*, int64_t)) {
  Arguments in(args, count);
  const int64_t num_layers = ceil_div(count, kFields);
  const std::unique_ptr<Layer[]> layers(new (std::nothrow) Layer[num_layers]);
  if (!layers) return PyErr_NoMemory();
  int64_t elements = 0;
  for (int64_t i = 0; i < num_layers; i++) read_layer(in, layers[i]), elements += layers[i].numel;
  if (in.failed()) return nullptr;
  return none_if(call(elements, [&](const Machine& now) { return work(now, layers.get(), num_layers); }));
}

// adam_normalize(*layers)
PyObject* py_adam_normalize(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return on_layers<Normalize, 12>(args, count, adam_normalize);
}

// adam_apply(*layers)
PyObject* py_adam_apply(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return on_layers<Apply, 9>(args, count, adam_apply);
}

#define THINWIRE_ADAM_METHODS                                                                                          \
  {"adam_normalize", method(py_adam_normalize), METH_FASTCALL, nullptr},                                               \
      {"adam_apply", method(py_adam_apply), METH_FASTCALL, nullptr}
