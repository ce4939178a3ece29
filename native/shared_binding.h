// The Python functions of words in shared memory. Included by binding.cpp.

constexpr int64_t kMaxWait = int64_t(1) << 62; // ns

uint32_t* read_word(Arguments& in) {
  uint32_t* word = in.address<uint32_t>();
  in.require(kHaveSharedWords, "words in shared memory need Linux");
  in.require(word && reinterpret_cast<uintptr_t>(word) % alignof(uint32_t) == 0, "a word is at a multiple of 4 bytes");
  return word;
}

uint32_t read_count(Arguments& in) {
  const int64_t value = in.integer();
  in.require(value >= 0 && value <= UINT32_MAX, "a word holds 0 to 2**32 - 1");
  return static_cast<uint32_t>(value);
}

// shared_post(word, value)
PyObject* py_shared_post(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  uint32_t* word = read_word(in);
  const uint32_t value = read_count(in);
  if (in.failed()) return nullptr;
  shared_post(word, value);
  return none_if(true);
}

// shared_read(word) -> value
PyObject* py_shared_read(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  const uint32_t* word = read_word(in);
  if (in.failed()) return nullptr;
  return PyLong_FromUnsignedLong(shared_read(word));
}

// shared_wait(word, value, timeout_ns, spin_ns) -> whether it reached the value
PyObject* py_shared_wait(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments in(args, count);
  const uint32_t* word = read_word(in);
  const uint32_t value = read_count(in);
  const int64_t timeout_ns = in.integer(), spin_ns = in.integer();
  in.require(timeout_ns >= 0 && timeout_ns <= kMaxWait && spin_ns >= 0 && spin_ns <= kMaxWait, "no such time");
  if (in.failed()) return nullptr;
  bool reached = shared_wait(word, value, 0, 0);
  if (!reached && timeout_ns) {
    PyThreadState* state = PyEval_SaveThread();
    reached = shared_wait(word, value, timeout_ns, spin_ns);
    PyEval_RestoreThread(state);
  }
  return PyBool_FromLong(reached);
}

#define THINWIRE_SHARED_METHODS                                                                                        \
  {"shared_post", method(py_shared_post), METH_FASTCALL, nullptr},                                                     \
      {"shared_read", method(py_shared_read), METH_FASTCALL, nullptr},                                                 \
      {"shared_wait", method(py_shared_wait), METH_FASTCALL, nullptr}
