// The inner loops of product.cc as a table of functions for each ISA; product_loops.h is the loops.
#pragma once

#include <cstdint>

#include "element.h"

namespace jaxfuse::product {

// Columns of a tile, and a multiple of the rows that a tile has with any instruction set.
constexpr int64_t kColumns = 16, kMostRows = 12;

// Rows of a matrix, or columns: element k of vector v is at data + v·step + k·inner_step.
struct Vectors {
  Element element;
  const void* data;
  int64_t step, inner_step;
};

// Steps along panels. Line l of b begins at b + l·steps·b_step, and is multiplied with what lies from a + lines[l] on, a_step
// further with each of its `steps`. From one row of a to the next it is a_row: 1 where they are packed; and b_panel from one panel of b to
// the next.
struct Panels {
  const float *a, *b;
  const int64_t* lines;
  int64_t count, steps, a_step, b_step, a_row = 1;
  int64_t columns = kColumns, b_panel = 0;  // at most a tile's; whole panels are computed, or the half of one that has them
};

struct Kernels {
  int64_t rows, columns;  // of a tile, whose sums fill the registers
  // `inner` elements of each of `count` vectors in panels of `rows` or of kColumns: element k of vector v goes to
  // to[(v / size·inner + k)·size + v % size]; the last panel is filled up with zeros.
  void (*pack_rows)(const Vectors&, int64_t count, int64_t inner, float* to);
  void (*pack_columns)(const Vectors&, int64_t count, int64_t inner, float* to);
  // sums[i·stride + j] = Σ a_i·b_j over all steps, i < rows, added to what is there unless `first`.
  void (*outer_products)(const Panels&, int64_t rows, float* sums, int64_t stride, bool first);
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels;

}  // namespace jaxfuse::product
