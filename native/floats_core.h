// The arguments of the kernels of element-wise floats, learned levels, magnitudes and integers. Included after core.h.
#pragma once
#include "core.h"

namespace thinwire {

constexpr int64_t kHeader = 64; // bytes at the start of a payload of floats

enum class FloatRounding : int { kTruncate = 0, kNearest = 1, kStochastic = 2 };

struct Found { // properties of a row's values; merged atomically
  int64_t saturated, nonfinite;
};

struct FloatJob : Job {
  const float* params = nullptr; // per row: max and mantissa, levels, alpha, or factor; for all rows: magnitudes
  FloatRounding rounding = FloatRounding::kTruncate;
  int bits = 0;
  int shift = 0;         // of the exponents of powers of two
  int64_t bucket = 0;    // of learned levels and magnitudes
  bool nearest = false;  // of integers
  int width = 0;         // bytes of an integer
  float clip = 0.0f;
  uint8_t* integers = nullptr;
  Found* found = nullptr; // per row
};

struct FloatKernels {
  // Tiles [begin, end) of kTile elements of all rows, in table order.
  void (*natural_encode)(const FloatJob&, int64_t begin, int64_t end);
  void (*natural_decode)(const FloatJob&, int64_t begin, int64_t end);
  void (*range_encode)(const FloatJob&, int64_t begin, int64_t end);
  void (*range_decode)(const FloatJob&, int64_t begin, int64_t end);
  void (*levels_decode)(const FloatJob&, int64_t begin, int64_t end);
  void (*int_round)(const FloatJob&, int64_t begin, int64_t end);
  void (*int_decode)(const FloatJob&, int64_t begin, int64_t end);
  // Blocks [begin, end) of levels_block() elements.
  void (*levels_encode)(const FloatJob&, int64_t begin, int64_t end);
  void (*magnitudes_encode)(const FloatJob&, int64_t begin, int64_t end);
  // Tiles, as above.
  void (*magnitudes_decode)(const FloatJob&, int64_t begin, int64_t end);
};

namespace {

// Elements of a block whose buckets are measured and then coded: whole buckets and groups, or a whole row.
inline int64_t levels_block(int64_t numel, int64_t bucket) {
  constexpr int64_t kWhole = int64_t(1) << 20;
  if (bucket > kWhole) return numel;
  int64_t twos = 1;
  while (twos < kGroup && bucket % (2 * twos) == 0) twos *= 2;
  const int64_t grain = bucket * (kGroup / twos);
  return grain >= kLoaded ? grain : kLoaded / grain * grain;
}

} // namespace
} // namespace thinwire
