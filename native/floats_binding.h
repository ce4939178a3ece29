// The Python functions of the element-wise formats. Included by binding.cpp.

void read_bits(Arguments& in, FloatJob& job, int low, int high) {
  const int64_t bits = in.integer();
  in.require(bits >= low && bits <= high, "bits out of range");
  job.bits = static_cast<int>(bits);
}

void read_bucket(Arguments& in, FloatJob& job) {
  job.bucket = in.integer();
  in.require(job.bucket >= 1 && job.bucket <= (int64_t(1) << 62), "bucket must be 1 to 2**62");
}

void read_width(Arguments& in, FloatJob& job) {
  const int64_t width = in.integer();
  in.require(width == 1 || width == 4, "integers have 1 or 4 bytes");
  job.width = static_cast<int>(width);
}

// natural_encode(x, dtype, rows, num_rows, message, shift, key)
PyObject* py_natural_encode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  FloatJob job;
  read_source(in, job);
  job.out = in.address<uint8_t>();
  const int64_t shift = in.integer();
  in.require(shift >= -18 && shift <= 109, "shift must be -18 to 109");
  job.shift = static_cast<int>(shift), job.key = in.bits64();
  return run_job(in, job, natural_encode);
}

// natural_decode(message, rows, num_rows, y, dtype, add, scale)
PyObject* py_natural_decode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  FloatJob job;
  const uint8_t* message = in.address<const uint8_t>();
  job.messages = &message;
  read_target(in, job);
  job.add = in.flag(), job.scale = in.real();
  return run_job(in, job, natural_decode);
}

// rangefloat_encode(x, dtype, rows, num_rows, message, params, bits, rounding, key)
PyObject* py_range_encode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  FloatJob job;
  read_source(in, job);
  job.out = in.address<uint8_t>(), job.params = in.address<const float>();
  read_bits(in, job, 3, 15);
  const int64_t rounding = in.integer();
  in.require(rounding >= 0 && rounding <= 2, "rounding must be 0, 1 or 2");
  job.rounding = static_cast<FloatRounding>(rounding);
  job.key = in.bits64();
  return run_job(in, job, range_encode);
}

// rangefloat_decode(message, rows, num_rows, y, dtype, bits, add, scale)
PyObject* py_range_decode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  FloatJob job;
  const uint8_t* message = in.address<const uint8_t>();
  job.messages = &message;
  read_target(in, job);
  read_bits(in, job, 3, 15);
  job.add = in.flag(), job.scale = in.real();
  return run_job(in, job, range_decode);
}

// levels_encode(x, dtype, rows, num_rows, message, levels, bits, bucket)
PyObject* py_levels_encode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  FloatJob job;
  read_source(in, job);
  job.out = in.address<uint8_t>(), job.params = in.address<const float>();
  read_bits(in, job, 1, 8);
  read_bucket(in, job);
  return run_job(in, job, levels_encode);
}

// levels_decode(message, rows, num_rows, y, dtype, bits, bucket, add, scale)
PyObject* py_levels_decode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  FloatJob job;
  const uint8_t* message = in.address<const uint8_t>();
  job.messages = &message;
  read_target(in, job);
  read_bits(in, job, 1, 8);
  read_bucket(in, job);
  job.add = in.flag(), job.scale = in.real();
  return run_job(in, job, levels_decode);
}

// magnitudes_encode(x, dtype, rows, num_rows, message, magnitudes, bits, bucket, now, next, loss_scale)
PyObject* py_magnitudes_encode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  FloatJob job;
  read_source(in, job);
  job.out = in.address<uint8_t>(), job.params = in.address<const float>();
  read_bits(in, job, 1, 4);
  read_bucket(in, job);
  in.residual(job);
  return run_job(in, job, magnitudes_encode);
}

// magnitudes_decode(message, rows, num_rows, y, dtype, magnitudes, bits, bucket, add, scale)
PyObject* py_magnitudes_decode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  FloatJob job;
  const uint8_t* message = in.address<const uint8_t>();
  job.messages = &message;
  read_target(in, job);
  job.params = in.address<const float>();
  read_bits(in, job, 1, 4);
  read_bucket(in, job);
  job.add = in.flag(), job.scale = in.real();
  return run_job(in, job, magnitudes_decode);
}

// int_round(x, dtype, rows, num_rows, alphas, out, width, clip, key, nearest, clipped)
PyObject* py_int_round(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  FloatJob job;
  read_source(in, job);
  job.params = in.address<const float>(), job.integers = in.address<uint8_t>();
  read_width(in, job);
  job.clip = in.real(), job.key = in.bits64(), job.nearest = in.flag();
  int64_t* clipped = in.address<int64_t>();
  if (in.failed()) return nullptr;
  return none_if(call(num_elements(job), [&](const Machine& now) { return int_round(now, job, clipped); }));
}

// int_decode(integers, width, rows, num_rows, y, dtype, factors)
PyObject* py_int_decode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  FloatJob job;
  job.integers = in.address<uint8_t>();
  read_width(in, job);
  read_target(in, job);
  job.params = in.address<const float>();
  return run_job(in, job, int_decode);
}

#define THINWIRE_FLOAT_METHODS                                                                                         \
  {"natural_encode", method(py_natural_encode), METH_FASTCALL, nullptr},                                               \
      {"natural_decode", method(py_natural_decode), METH_FASTCALL, nullptr},                                           \
      {"rangefloat_encode", method(py_range_encode), METH_FASTCALL, nullptr},                                          \
      {"rangefloat_decode", method(py_range_decode), METH_FASTCALL, nullptr},                                          \
      {"levels_encode", method(py_levels_encode), METH_FASTCALL, nullptr},                                             \
      {"levels_decode", method(py_levels_decode), METH_FASTCALL, nullptr},                                             \
      {"magnitudes_encode", method(py_magnitudes_encode), METH_FASTCALL, nullptr},                                     \
      {"magnitudes_decode", method(py_magnitudes_decode), METH_FASTCALL, nullptr},                                     \
      {"int_round", method(py_int_round), METH_FASTCALL, nullptr},                                                     \
      {"int_decode", method(py_int_decode), METH_FASTCALL, nullptr}
