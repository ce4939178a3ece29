// Counters in memory that several processes have mapped: one process raises a word, others sleep until it has. They use
// Linux's futex for memory shared between processes, where the kernel identifies a word by file and offset.
#pragma once
#include "dispatch.h"

#include <cstdint>

#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace thinwire {

constexpr bool kHaveSharedWords = true;

// The type that the kernel reads: two longs, whatever time_t is in this C library.
struct FutexTime {
  long seconds, nanoseconds;
};

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory"); // as long as x86's pause; yield is a no-op
#endif
}

// A process that sees the word also sees everything that was written before it.
inline void shared_post(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline uint32_t shared_read(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

// Counters wrap: a value less than 2^31 ahead counts as reached.
inline bool shared_reached(uint32_t present, uint32_t value) { return static_cast<int32_t>(present - value) >= 0; }

// Returns whether the word reached the value in time. Spins for spin_ns, then sleeps.
inline bool shared_wait(const uint32_t* word, uint32_t value, int64_t timeout_ns, int64_t spin_ns) {
  if (shared_reached(shared_read(word), value)) return true;
  const int64_t start = now_ns();
  for (int64_t passed = 0; passed < spin_ns && passed < timeout_ns; passed = now_ns() - start) {
    for (int i = 0; i < 16; i++) {
      if (shared_reached(shared_read(word), value)) return true;
      pause_briefly();
    }
    sched_yield(); // the other process may be waiting for this core
  }
  for (;;) {
    const uint32_t present = shared_read(word);
    if (shared_reached(present, value)) return true;
    const int64_t left = timeout_ns - (now_ns() - start);
    if (left <= 0) return false;
    const FutexTime time = {static_cast<long>(left / 1000000000), static_cast<long>(left % 1000000000)};
    // Returns at once if the word has changed since it was read; a signal interrupts it.
    syscall(SYS_futex, word, FUTEX_WAIT, present, &time, nullptr, 0);
  }
}

} // namespace thinwire

#else

namespace thinwire {

constexpr bool kHaveSharedWords = false;

inline void shared_post(uint32_t*, uint32_t) {}
inline uint32_t shared_read(const uint32_t*) { return 0; }
inline bool shared_wait(const uint32_t*, uint32_t, int64_t, int64_t) { return false; }

} // namespace thinwire

#endif

namespace thinwire {
namespace {

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

PyObject* py_shared_post(Arguments& in) {
  uint32_t* word = read_word(in);
  const uint32_t value = read_count(in);
  if (in.failed()) return nullptr;
  shared_post(word, value);
  return none_if(true);
}

// shared_read(word) -> value
PyObject* py_shared_read(Arguments& in) {
  const uint32_t* word = read_word(in);
  if (in.failed()) return nullptr;
  return PyLong_FromUnsignedLong(shared_read(word));
}

// shared_wait(word, value, timeout_ns, spin_ns) -> whether it reached the value
PyObject* py_shared_wait(Arguments& in) {
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

} // namespace
} // namespace thinwire
