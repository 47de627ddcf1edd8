// Products of matrices by our own loops, for CPUs where oneDNN's are the slower ones; see benchmarks/results/kernels.md.
#pragma once

#include <functional>

#include "handler.h"
#include "product_kernels.h"

namespace jaxfuse::product {

// Our loops for this machine.
const Kernels& kernels();

// Of a batch of matrices: the buffer, and the strides, in elements, of the batch axes, the rows and the columns.
struct Matrix {
  void* data;
  DType dtype;
  Shape strides;

  Matrix transposed() const;
  // Beginning at index i of the axis.
  Matrix from(size_t axis, int64_t i) const;
  // One of the matrices, all batch axes taken as one.
  Matrix entry(const Shape& batch, int64_t i) const;
};

// The rows of a matrix, in order of the tiles that they are for: element k of a tile's row i is at data + i·row + k·step, and the next
// tile begins `tile` further.
struct Lines {
  const float* data;
  int64_t row, step, tile;

  // From a tile's first row on.
  Lines from(int64_t first) const { return {data + first / kernels().rows * tile, row, step, tile}; }
};

// Rows of f32 as they lie.
inline Lines lines(const float* data, int64_t row) { return {data, row, 1, kernels().rows * row}; }

// The rows where they lie, if they are lines of f32. Else they are packed, into padded(rows, kMostRows) times `inner` floats.
Lines lines_of(const Matrix&, int64_t rows, int64_t inner, float* memory);
bool lies_in_lines(const Matrix&);

// A matrix's columns as panels of kColumns, filled up with zeros.
void pack_columns(const Matrix&, int64_t columns, int64_t inner, float* to);

// sums[i·stride + j] = Σ rows·columns, added to what is there unless `first`. Of a last panel half is written where that has all columns.
void multiply(const Lines&, int64_t rows, const float* panels, int64_t inner, int64_t columns, float* sums, int64_t stride, bool first);

// Part of one of the batch's products: `rows` × `columns` sums, row i at sums + i·stride.
struct Block {
  int64_t entry, row, rows, column, columns;
  const float* sums;
  int64_t stride;
};

using Finish = std::function<void(const Block&)>;

// a·b for each of the batch: [m, k]·[k, n], of f32, bf16 or f16, in f32. `finish` is called once for every block, on any
// thread, and must not throw. No size may be 0.
void multiply(const Shape& batch, int64_t m, int64_t k, int64_t n, const Matrix& a, const Matrix& b, const Finish& finish);

}  // namespace jaxfuse::product
