// Adam's moments: a gradient normalised by the root of its second moment, and a step of the weights. One pass each, one
// rounding per operation. The loops are vectorised by the compiler. Included inside a level's namespace.

// n elements of a gradient, whose moments afterwards go to `squares` and `momenta`.
template <bool kMomentum>
THINWIRE_APART static void normalise_tile(const Normalise& job, int64_t at, int64_t n, float* __restrict squares,
                                          float* __restrict momenta) {
  float* __restrict gradient = job.gradient + at;
  const float* __restrict square = job.square.before + at;
  const float* __restrict momentum = kMomentum ? job.momentum.before + at : nullptr;
  const float square_kept = job.square.kept, square_added = job.square.added;
  const float momentum_kept = job.momentum.kept, momentum_added = job.momentum.added;
  const float eps = job.eps, factor = job.factor;
  for (int64_t i = 0; i < n; i++) {
    const float g = gradient[i];
    const float v = square[i] * square_kept + (g * square_added) * g;
    const float top = kMomentum ? momentum[i] * momentum_kept + g * momentum_added : g;
    squares[i] = v;
    if (kMomentum) momenta[i] = top;
    gradient[i] = top / (__builtin_sqrtf(v) + eps) * factor;
  }
}

// Elements between two bursts of non-temporal stores: with a whole tile, loads would wait for them.
constexpr int64_t kBurst = 256;

static void normalise(const Normalise& job, int64_t begin, int64_t end) {
  static_assert(kTile % kBurst == 0);
  alignas(64) float squares[kBurst], momenta[kBurst];
  for (int64_t at = begin * kTile; at < end * kTile && at < job.numel; at += kBurst) {
    const int64_t n = job.numel - at < kBurst ? job.numel - at : kBurst;
    if (job.momentum.before) {
      normalise_tile<true>(job, at, n, squares, momenta);
      stream(momenta, n, job.momentum.after + at);
    } else {
      normalise_tile<false>(job, at, n, squares, momenta);
    }
    stream(squares, n, job.square.after + at);
  }
  settle_stores();
}

static void apply(const Apply& job, int64_t begin, int64_t end) {
  const int64_t last = end * kTile < job.numel ? end * kTile : job.numel;
  float* __restrict weights = job.weights;
  const float* __restrict update = job.update;
  float* __restrict momentum = job.momentum.after;
  const float momentum_kept = job.momentum.kept, momentum_added = job.momentum.added;
  const float kept = job.kept, size = job.size;
  if (!momentum) {
    for (int64_t i = begin * kTile; i < last; i++) weights[i] = weights[i] * kept - update[i] * size;
    return;
  }
  for (int64_t i = begin * kTile; i < last; i++) {
    const float m = momentum[i] * momentum_kept + update[i] * momentum_added;
    momentum[i] = m;
    weights[i] = weights[i] * kept - m * size;
  }
}
