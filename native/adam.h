// Adam's moments: gradients normalized by the root of their second moment, and a step of the weights. One pass each,
// one rounding per operation.
#pragma once
#include "dispatch.h"

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

#if defined(THINWIRE_LEVEL)

namespace THINWIRE_LEVEL {
namespace {

// Calls visit(layer, first element, last element) for what the tiles [begin, end) of all layers hold of each.
template <class Layer, class Visit>
static void for_layers(const Layer* layers, int64_t count, int64_t begin, int64_t end, Visit visit) {
  int64_t before = 0;
  for (const Layer* layer = layers; layer < layers + count && before < end; layer++) {
    const int64_t tiles = ceil_div(layer->numel, kTile);
    const int64_t first = begin > before ? begin - before : 0, last = end - before < tiles ? end - before : tiles;
    if (first < last) visit(*layer, first * kTile, last < tiles ? last * kTile : layer->numel);
    before += tiles;
  }
}

// A moment after the step is not read soon.
static inline void put_moment(float* to, Floats moment, bool past_caches) {
  past_caches ? store_past_caches(to, moment) : store(to, moment);
}

template <bool kMomentum>
THINWIRE_APART static void normalize_layer(const Normalize& job, int64_t begin, int64_t end) {
  const float square_kept = job.square.kept, square_added = job.square.added;
  const float momentum_kept = job.momentum.kept, momentum_added = job.momentum.added;
  const float eps = job.eps, factor = job.factor;
  // Returns what is sent in the place of g; v and m are the moments before and then after.
  const auto normalize = [&](Floats g, Floats& v, Floats& m) {
    v = v * square_kept + (g * square_added) * g;
    m = kMomentum ? m * momentum_kept + g * momentum_added : g;
    return m / (root(v) + eps) * factor;
  };
  float *gradient = job.gradient, *square = job.square.after, *momentum = job.momentum.after;
  const bool squares_past = (uintptr_t)square % sizeof(Floats) == 0;
  const bool momenta_past = (uintptr_t)momentum % sizeof(Floats) == 0;
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    Floats v = load<Floats>(job.square.before + i), m = {};
    if (kMomentum) m = load<Floats>(job.momentum.before + i);
    const Floats sent = normalize(load<Floats>(gradient + i), v, m);
    put_moment(square + i, v, squares_past);
    if (kMomentum) put_moment(momentum + i, m, momenta_past);
    store(gradient + i, sent);
  }
  if (const int64_t bytes = 4 * (end - i)) {
    Floats g = {}, v = {}, m = {};
    std::memcpy(&g, gradient + i, bytes), std::memcpy(&v, job.square.before + i, bytes);
    if (kMomentum) std::memcpy(&m, job.momentum.before + i, bytes);
    const Floats sent = normalize(g, v, m);
    std::memcpy(square + i, &v, bytes), std::memcpy(gradient + i, &sent, bytes);
    if (kMomentum) std::memcpy(momentum + i, &m, bytes);
  }
}

static void normalize(const Normalize* layers, int64_t count, int64_t begin, int64_t end) {
  for_layers(layers, count, begin, end, [](const Normalize& job, int64_t first, int64_t last) {
    job.momentum.before ? normalize_layer<true>(job, first, last) : normalize_layer<false>(job, first, last);
  });
  settle_stores();
}

// The loops are vectorized by the compiler.
THINWIRE_APART static void apply_layer(const Apply& job, int64_t begin, int64_t end) {
  float* __restrict weights = job.weights;
  const float* __restrict update = job.update;
  float* __restrict momentum = job.momentum.after;
  const float momentum_kept = job.momentum.kept, momentum_added = job.momentum.added;
  const float kept = job.kept, size = job.size;
  if (!momentum) {
    for (int64_t i = begin; i < end; i++) weights[i] = weights[i] * kept - update[i] * size;
    return;
  }
  for (int64_t i = begin; i < end; i++) {
    const float m = momentum[i] * momentum_kept + update[i] * momentum_added;
    momentum[i] = m;
    weights[i] = weights[i] * kept - m * size;
  }
}

static void apply(const Apply* layers, int64_t count, int64_t begin, int64_t end) {
  for_layers(layers, count, begin, end, apply_layer);
}

const AdamKernels adam_kernels = {normalize, apply};

} // namespace
} // namespace THINWIRE_LEVEL

#else

namespace {

// before or 0, after or 0, kept, added
Moving read_moving(Arguments& in) {
  Moving moving;
  moving.before = in.address<const float>(), moving.after = in.address<float>();
  moving.kept = in.real(), moving.added = in.real();
  in.require(!moving.before == !moving.after, "a moving average has two tensors");
  return moving;
}

// gradient, numel, *square, *momentum, eps, factor
void read_part(Arguments& in, Normalize& layer) {
  layer.gradient = in.address<float>(), layer.numel = in.numel();
  layer.square = read_moving(in), layer.momentum = read_moving(in);
  layer.eps = in.real(), layer.factor = in.real();
  in.require(layer.square.before || !layer.numel, "a second moment is needed");
}

// weights, update, numel, *momentum, kept, size
void read_part(Arguments& in, Apply& layer) {
  layer.weights = in.address<float>(), layer.update = in.address<const float>(), layer.numel = in.numel();
  layer.momentum = read_moving(in);
  layer.kept = in.real(), layer.size = in.real();
}

PyObject* py_adam_normalize(Arguments& in) {
  return on_parts<Normalize, 12>(in, [](const Machine& now, const Normalize* layers, int64_t count) {
    return on_tiles(now, layers, count, now.kernels->adam->normalize);
  });
}

PyObject* py_adam_apply(Arguments& in) {
  return on_parts<Apply, 9>(in, [](const Machine& now, const Apply* layers, int64_t count) {
    return on_tiles(now, layers, count, now.kernels->adam->apply);
  });
}

} // namespace

#endif

} // namespace thinwire
