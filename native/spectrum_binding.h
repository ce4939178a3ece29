// The Python functions of spectra. Included by binding.cpp.

// block, roots, kept, tops
void read_spectra(Arguments& in, SpectrumJob& job) {
  job.block = in.integer(), job.roots = in.address<const float>();
  job.kept = in.address<const int64_t>(), job.tops = in.address<float>();
  in.require(job.block >= kLeastBlock && job.block <= kMostBlock && !(job.block & (job.block - 1)),
             "a block has a power of two of elements, 64 to 16384");
  for (int64_t r = 0; r < job.num_rows && !in.is_bad(); r++) {
    const int64_t total = job.blocked(r, nullptr, kFloat32).total();
    in.require(total <= kMaxIndex, "there are at most 2**31 - 1 components");
    in.require(job.kept[r] >= 0 && job.kept[r] <= total, "of a row's components 0 to all are kept");
  }
}

// spectrum_encode(x, dtype, rows, num_rows, message, parts, block, roots, kept, tops)
PyObject* py_spectrum_encode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  SpectrumJob job;
  read_source(in, job);
  job.out = in.address<uint8_t>(), job.parts = in.address<float>();
  read_spectra(in, job);
  return run_job(in, job, spectrum_encode);
}

// spectrum_decode(rows, num_rows, y, dtype, block, roots, kept, tops, add, scale, *(message, parts))
PyObject* py_spectrum_decode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  SpectrumJob job;
  const uint8_t* messages[kMaxMessages];
  const float* received[kMaxMessages];
  read_target(in, job);
  read_spectra(in, job);
  job.add = in.flag(), job.scale = in.real();
  job.messages = messages, job.received = received, job.num_messages = (count - 10) / 2;
  in.require(count >= 10 && count % 2 == 0 && job.num_messages <= kMaxMessages, "up to 4096 messages and their parts");
  for (int64_t m = 0; m < job.num_messages && !in.is_bad(); m++) {
    messages[m] = in.address<const uint8_t>(), received[m] = in.address<const float>();
  }
  return run_job(in, job, spectrum_decode);
}

#define THINWIRE_SPECTRUM_METHODS                                                                                      \
  {"spectrum_encode", method(py_spectrum_encode), METH_FASTCALL, nullptr},                                             \
      {"spectrum_decode", method(py_spectrum_decode), METH_FASTCALL, nullptr}
