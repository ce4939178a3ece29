// The arguments of norms and sketches of vectors. Included after core.h.
#pragma once
#include "core.h"

namespace thinwire {

constexpr int64_t kMostSquareLanes = 1 << 16;

// The sum of a vector's squares, in so many lanes: see thinwire.kernels.norms.
struct SquareSum {
  const float* vector = nullptr;
  int64_t numel = 0;
  int64_t lanes = 0; // a power of two, up to kMostSquareLanes
  double* out = nullptr;
};

// Random signs of a vector's elements, added up: see thinwire.kernels.norms.
struct Sketch {
  const float* vector = nullptr;
  int64_t numel = 0;
  int64_t lanes = 0, size = 0;     // powers of two
  const int64_t* runs = nullptr;   // of `lanes` elements each: a sign, and the lane of the first one
  const int64_t* order = nullptr;  // of the lanes
  const float* signs = nullptr;    // of the lanes
  double* out = nullptr;           // [size]

  int64_t num_runs() const { return ceil_div(numel, lanes); }
};

} // namespace thinwire
