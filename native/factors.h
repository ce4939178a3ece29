// Products of a matrix with a narrow one, each in one pass over the matrix, and bases of narrow ones. Additions have an
// order of their own, the same at every level: rows and ranks in turn, and 16 lanes of columns.
#pragma once
#include "dispatch.h"

namespace thinwire {

constexpr int kTogetherColumns = 4;     // of a narrow matrix
constexpr int64_t kBlockColumns = 256;  // of a matrix that one piece of work adds up
constexpr int64_t kBasisLanes = 16;     // of sums over columns

// `count` matrices of rows x columns, `stride` elements apart, and what they are multiplied with.
struct Factored {
  int64_t count = 0, stride = 0, rows = 0, columns = 0, rank = 0;
  float* matrix = nullptr;      // [count, rows, columns]
  const float* left = nullptr;  // [count, rows, rank]
  const float* right = nullptr; // [count, columns, rank]
  float* out = nullptr;         // [count, rows, rank] or [count, columns, rank]
  float scale = 1.0f;
  bool add = false;
  bool normalized = false; // whether each right factor is multiplied by a power of two, to about 1 at most

  int64_t padded() const { return ceil_div(rank, kTogetherColumns) * kTogetherColumns; }
};

struct FactorKernels {
  // Of one matrix, `wide` being its right factor transposed, [padded rank, columns]: out = matrix @ right, rows
  // [begin, end).
  void (*rows)(const Factored&, const float* wide, int64_t begin, int64_t end);
  // out = matrix^T @ left, blocks [begin, end) of columns.
  void (*columns)(const Factored&, int64_t begin, int64_t end);
  // matrix = scale * left @ right^T, or matrix += that: rows [begin, end).
  void (*product)(const Factored&, const float* wide, int64_t begin, int64_t end);
  // An orthonormal basis of `rank` columns of `pitch` elements, a multiple of kBasisLanes; those behind the rows are zero.
  // The columns, whose largest elements are about 1, are overwritten; `factors` is room for `rank` numbers.
  void (*basis)(float* columns, float* basis, float* factors, int64_t pitch, int64_t rank);
};

#if defined(THINWIRE_LEVEL)

namespace THINWIRE_LEVEL {
namespace {

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

const FactorKernels factor_kernels = {factor_rows, factor_columns, factor_product, factor_basis};

} // namespace
} // namespace THINWIRE_LEVEL

#else

namespace {

// `job` for one of its matrices.
Factored one_of(const Factored& job, int64_t which) {
  Factored one = job;
  one.matrix += which * job.stride;
  if (one.left) one.left += which * job.rows * job.rank;
  if (one.right) one.right += which * job.columns * job.rank;
  return one;
}

// The power of two that makes the largest of so many values about 1, or as much of that as fp32 holds.
float power_to_one(const float* values, int64_t n) {
  constexpr int kLargestExponent = 100;
  float most = 0.0f;
  for (int64_t i = 0; i < n; i++) most = std::max(most, std::fabs(values[i]));
  int exponent = 0;
  if (std::isfinite(most)) std::frexp(most, &exponent);
  return std::ldexp(1.0f, -std::clamp(exponent, -kLargestExponent, kLargestExponent));
}

// NaN if any of so many values is not finite, else 0.
float not_finite(const float* values, int64_t n) {
  float sum = 0.0f;
  for (int64_t i = 0; i < n; i++) sum += values[i] * 0.0f;
  return sum;
}

// Runs work(job of a matrix, its right factor transposed and padded with zeros) for every matrix. A product that is set
// is NaN as a whole where a right factor is not finite.
template <class Work>
Status with_wide(const Factored& job, Work work) {
  const Memory memory(4 * job.padded() * job.columns);
  if (!memory.at) return kNoMemory;
  float* const wide = memory.as<float>();
  std::fill(wide, wide + job.padded() * job.columns, 0.0f);
  for (int64_t which = 0; which < job.count; which++) {
    const Factored one = one_of(job, which);
    const int64_t values = job.columns * job.rank;
    const float power = job.normalized ? power_to_one(one.right, values) : 1.0f;
    const bool is_set = !job.out && !job.add;
    const float poison = is_set ? not_finite(one.right, values) : 0.0f;
    for (int64_t c = 0; c < job.columns; c++) {
      for (int64_t k = 0; k < job.rank; k++) wide[k * job.columns + c] = one.right[c * job.rank + k] * power + poison;
    }
    if (!work(one, which, wide)) return kThreadsFailed;
  }
  return kDone;
}


Status factor_rows(const Machine& machine, const Factored& job) {
  return with_wide(job, [&](Factored one, int64_t which, const float* wide) {
    one.out += which * job.rows * job.rank;
    auto work = [&](int64_t begin, int64_t end) { machine.kernels->factors->rows(one, wide, begin, end); };
    return run(machine, job.rows, job.rows * job.columns, work);
  });
}

Status factor_columns(const Machine& machine, const Factored& job) {
  for (int64_t which = 0; which < job.count; which++) {
    Factored one = one_of(job, which);
    one.out += which * job.columns * job.rank;
    auto work = [&](int64_t begin, int64_t end) { machine.kernels->factors->columns(one, begin, end); };
    if (!run(machine, ceil_div(job.columns, kBlockColumns), job.rows * job.columns, work)) return kThreadsFailed;
  }
  return kDone;
}

Status factor_product(const Machine& machine, const Factored& job) {
  return with_wide(job, [&](const Factored& one, int64_t, const float* wide) {
    auto work = [&](int64_t begin, int64_t end) { machine.kernels->factors->product(one, wide, begin, end); };
    return run(machine, job.rows, job.rows * job.columns, work);
  });
}

Status factor_basis(const Machine& machine, const Factored& job) {
  const int64_t rows = job.rows, rank = job.rank, pitch = ceil_div(rows, kBasisLanes) * kBasisLanes;
  const Memory memory(4 * rank * (2 * pitch + 1));
  if (!memory.at) return kNoMemory;
  float *const columns = memory.as<float>(), *const basis = columns + rank * pitch;
  for (int64_t which = 0; which < job.count; which++) {
    const float* const from = job.left + which * rows * rank;
    float* const to = job.out + which * rows * rank;
    const float poison = not_finite(from, rows * rank);
    for (int64_t k = 0; k < rank; k++) {
      float* const column = columns + k * pitch;
      for (int64_t i = 0; i < pitch; i++) column[i] = i < rows ? from[i * rank + k] : 0.0f;
      const float power = power_to_one(column, rows); // no square overflows or vanishes
      for (int64_t i = 0; i < rows; i++) column[i] *= power;
    }
    machine.kernels->factors->basis(columns, basis, basis + rank * pitch, pitch, rank);
    for (int64_t i = 0; i < rows; i++) {
      for (int64_t k = 0; k < rank; k++) to[i * rank + k] = basis[k * pitch + i] + poison;
    }
  }
  return kDone;
}

// matrix, count, stride, rows, columns, rank
Factored read_factored(Arguments& in) {
  Factored job;
  job.matrix = in.address<float>(), job.count = in.integer(), job.stride = in.integer();
  job.rows = in.integer(), job.columns = in.integer(), job.rank = in.integer();
  in.require(job.count >= 0 && job.rows >= 0 && job.columns >= 0 && job.rank >= 1, "sizes are at least 0, ranks 1");
  return job;
}

PyObject* on_matrices(Arguments& in, const Factored& job, Status (*work)(const Machine&, const Factored&)) {
  if (in.failed()) return nullptr;
  const int64_t elements = job.count * job.rows * job.columns;
  return none_if(call(elements, [&](const Machine& now) { return work(now, job); }));
}

PyObject* py_factor_rows(Arguments& in) {
  Factored job = read_factored(in);
  job.right = in.address<const float>(), job.out = in.address<float>(), job.normalized = in.flag();
  return on_matrices(in, job, factor_rows);
}

PyObject* py_factor_columns(Arguments& in) {
  Factored job = read_factored(in);
  job.left = in.address<const float>(), job.out = in.address<float>();
  return on_matrices(in, job, factor_columns);
}

PyObject* py_factor_product(Arguments& in) {
  Factored job = read_factored(in);
  job.left = in.address<const float>(), job.right = in.address<const float>();
  job.scale = in.real(), job.add = in.flag();
  return on_matrices(in, job, factor_product);
}

PyObject* py_factor_basis(Arguments& in) {
  Factored job;
  job.count = in.integer(), job.rows = in.integer(), job.rank = in.integer(), job.columns = job.rank;
  job.left = in.address<const float>(), job.out = in.address<float>();
  in.require(job.count >= 0 && job.rank >= 1 && job.rows >= job.rank, "as many rows as columns, at least");
  return on_matrices(in, job, factor_basis);
}

} // namespace

#endif

} // namespace thinwire
