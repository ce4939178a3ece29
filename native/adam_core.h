// The arguments of the kernels of Adam's moments. Included after core.h.
#pragma once
#include "core.h"

namespace thinwire {

// A moving average: kept * before + added * value.
struct Moving {
  const float* before = nullptr; // null: none
  float* after = nullptr;
  float kept = 0.0f, added = 0.0f;
};

struct Normalize {
  float* gradient = nullptr; // in place
  int64_t numel = 0;
  Moving square, momentum; // the momentum may be none
  float eps = 0.0f, factor = 1.0f;
};

struct Apply {
  float* weights = nullptr; // in place
  const float* update = nullptr;
  int64_t numel = 0;
  Moving momentum;   // in place; may be none
  float kept = 1.0f; // of the weights
  float size = 1.0f; // of the momentum, or of the update without one, in the step
};

struct AdamKernels {
  // Tiles [begin, end) of kTile elements of all layers, in order.
  void (*normalize)(const Normalize* layers, int64_t count, int64_t begin, int64_t end);
  void (*apply)(const Apply* layers, int64_t count, int64_t begin, int64_t end);
};

} // namespace thinwire
