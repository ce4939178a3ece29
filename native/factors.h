// Products of a matrix with a narrow one, each in one pass over the matrix, and bases of narrow ones. Additions have an
// order of their own, the same at every level: rows and ranks in turn, and 16 lanes of columns. Included inside a level's
// namespace.

constexpr int kFactorVectors = kSumLanes / kLanes;
typedef float Quad __attribute__((vector_size(16)));

// Four sums, each of 16 lanes: halves upon halves.
static inline Quad across_sums(const Floats (*sums)[kFactorVectors]) {
  Quad rows[4];
  for (int j = 0; j < 4; j++) {
    float lanes[kSumLanes];
    for (int v = 0; v < kFactorVectors; v++) store(lanes + v * kLanes, sums[j][v]);
    const Quad even = load<Quad>(lanes) + load<Quad>(lanes + 8), odd = load<Quad>(lanes + 4) + load<Quad>(lanes + 12);
    rows[j] = even + odd;
  }
  Quad columns[4];
  for (int i = 0; i < 4; i++) columns[i] = Quad{rows[0][i], rows[1][i], rows[2][i], rows[3][i]};
  return (columns[0] + columns[2]) + (columns[1] + columns[3]);
}

THINWIRE_APART static void factor_rows(const Factored& job, const float* wide, int64_t begin, int64_t end) {
  const int64_t columns = job.columns, whole = columns / kSumLanes * kSumLanes;
  for (int64_t row = begin; row < end; row++) {
    const float* m = job.matrix + row * columns;
    for (int64_t k = 0; k < job.rank; k += kTogetherColumns) {
      const float* w[kTogetherColumns];
      Floats sums[kTogetherColumns][kFactorVectors] = {};
      for (int j = 0; j < kTogetherColumns; j++) w[j] = wide + (k + j) * columns;
      for (int64_t c = 0; c < whole; c += kSumLanes) {
        for (int v = 0; v < kFactorVectors; v++) {
          const Floats here = load<Floats>(m + c + v * kLanes);
          for (int j = 0; j < kTogetherColumns; j++) sums[j][v] += here * load<Floats>(w[j] + c + v * kLanes);
        }
      }
      const Quad whole_sums = across_sums(sums);
      for (int j = 0; j < kTogetherColumns && k + j < job.rank; j++) {
        float sum = whole_sums[j];
        for (int64_t c = whole; c < columns; c++) sum += m[c] * w[j][c];
        job.out[row * job.rank + k + j] = sum;
      }
    }
  }
}

// Adds what two rows (or one, `next` being null) have to `sums`, [kTogetherColumns, kBlockColumns].
template <bool kTwo>
static inline void add_rows(const float* m, const float* next, int64_t width, const float* left, const float* below,
                            float* sums) {
  Floats a[kTogetherColumns], b[kTogetherColumns];
  for (int j = 0; j < kTogetherColumns; j++) a[j] = splat(left[j]), b[j] = splat(kTwo ? below[j] : 0.0f);
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) {
    const Floats here = load<Floats>(m + c), under = kTwo ? load<Floats>(next + c) : Floats{};
    for (int j = 0; j < kTogetherColumns; j++) {
      float* at = sums + j * kBlockColumns + c;
      Floats sum = load<Floats>(at) + here * a[j];
      if (kTwo) sum += under * b[j];
      store(at, sum);
    }
  }
  for (; c < width; c++) {
    for (int j = 0; j < kTogetherColumns; j++) {
      float sum = sums[j * kBlockColumns + c] + m[c] * left[j];
      if (kTwo) sum += next[c] * below[j];
      sums[j * kBlockColumns + c] = sum;
    }
  }
}

THINWIRE_APART static void factor_columns(const Factored& job, int64_t begin, int64_t end) {
  const int64_t columns = job.columns, rows = job.rows, rank = job.rank;
  for (int64_t block = begin; block < end; block++) {
    const int64_t first = block * kBlockColumns;
    const int64_t width = columns - first < kBlockColumns ? columns - first : kBlockColumns;
    for (int64_t k = 0; k < rank; k += kTogetherColumns) {
      const int64_t some = rank - k < kTogetherColumns ? rank - k : kTogetherColumns;
      float sums[kTogetherColumns * kBlockColumns] = {};
      for (int64_t row = 0; row < rows; row += 2) {
        const float* m = job.matrix + row * columns + first;
        float left[kTogetherColumns] = {}, below[kTogetherColumns] = {};
        const bool two = row + 1 < rows;
        for (int64_t j = 0; j < some; j++) {
          left[j] = job.left[row * rank + k + j];
          if (two) below[j] = job.left[(row + 1) * rank + k + j];
        }
        two ? add_rows<true>(m, m + columns, width, left, below, sums)
            : add_rows<false>(m, nullptr, width, left, below, sums);
      }
      for (int64_t c = 0; c < width; c++) {
        for (int64_t j = 0; j < some; j++) job.out[(first + c) * rank + k + j] = sums[j * kBlockColumns + c];
      }
    }
  }
}

template <bool kAdd>
THINWIRE_APART static void multiply(const Factored& job, const float* wide, int64_t begin, int64_t end) {
  constexpr int64_t kVectors = 4;
  const int64_t columns = job.columns, rank = job.rank;
  for (int64_t row = begin; row < end; row++) {
    float* m = job.matrix + row * columns;
    const float* left = job.left + row * rank;
    const bool past_caches = !kAdd && (uintptr_t)m % sizeof(Floats) == 0;
    int64_t c = 0;
    for (; c + kVectors * kLanes <= columns; c += kVectors * kLanes) {
      Floats sums[kVectors] = {};
      for (int64_t k = 0; k < rank; k++) {
        const Floats factor = splat(left[k] * job.scale);
        for (int v = 0; v < kVectors; v++) sums[v] += factor * load<Floats>(wide + k * columns + c + v * kLanes);
      }
      for (int v = 0; v < kVectors; v++) {
        float* at = m + c + v * kLanes;
        if (kAdd) store(at, load<Floats>(at) + sums[v]);
        else past_caches ? store_past_caches(at, sums[v]) : store(at, sums[v]);
      }
    }
    for (; c < columns; c++) {
      float sum = 0.0f;
      for (int64_t k = 0; k < rank; k++) sum += left[k] * job.scale * wide[k * columns + c];
      m[c] = kAdd ? m[c] + sum : sum;
    }
  }
  if (!kAdd) settle_stores();
}

static void factor_product(const Factored& job, const float* wide, int64_t begin, int64_t end) {
  job.add ? multiply<true>(job, wide, begin, end) : multiply<false>(job, wide, begin, end);
}

static_assert(kBasisLanes == kSumLanes, "columns are whole sums");

static inline float dot(const float* a, const float* b, int64_t n) {
  Floats sums[kFactorVectors] = {};
  for (int64_t i = 0; i < n; i += kSumLanes) {
    for (int v = 0; v < kFactorVectors; v++) {
      sums[v] += load<Floats>(a + i + v * kLanes) * load<Floats>(b + i + v * kLanes);
    }
  }
  float lanes[kSumLanes];
  for (int v = 0; v < kFactorVectors; v++) store(lanes + v * kLanes, sums[v]);
  return across(lanes);
}

// x -= factor * (v . x) * v
static inline void reflect(float* x, const float* v, float factor, int64_t n) {
  const Floats times = splat(factor * dot(v, x, n));
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, load<Floats>(x + i) - times * load<Floats>(v + i));
}

// Householder's reflections: that of column k makes it zero below row k, and the basis is what all of them in turn make
// of the first unit vectors. So it is orthonormal even where columns are zero or equal.
THINWIRE_APART static void factor_basis(float* columns, float* basis, float* factors, int64_t pitch, int64_t rank) {
  constexpr float kLeast = 1e-12f; // of a column that is more than what rounding has left
  for (int64_t k = 0; k < rank; k++) {
    float* const v = columns + k * pitch;
    for (int64_t i = 0; i < k; i++) v[i] = 0.0f;
    const float size = __builtin_sqrtf(dot(v, v, pitch));
    factors[k] = size > kLeast ? 1.0f / (size * (size + __builtin_fabsf(v[k]))) : 0.0f;
    v[k] += __builtin_copysignf(size, v[k]);
    for (int64_t j = k + 1; j < rank; j++) reflect(columns + j * pitch, v, factors[k], pitch);
  }
  for (int64_t k = rank - 1; k >= 0; k--) {
    for (int64_t i = 0; i < pitch; i++) basis[k * pitch + i] = i == k ? 1.0f : 0.0f;
    for (int64_t j = k; j < rank; j++) reflect(basis + j * pitch, columns + k * pitch, factors[k], pitch);
  }
}
