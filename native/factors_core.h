// The arguments of products of a matrix with a narrow one. Included after core.h.
#pragma once
#include "core.h"

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

} // namespace thinwire
