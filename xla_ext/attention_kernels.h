// The loops over a tile of attention's scores, as a table of functions for each ISA; attention_loops.h is the loops.
#pragma once

#include <cstdint>

#include "element.h"

namespace jaxfuse::attention {

// Some rows of scores: row i at s + i·stride, `keys` of them. What the softmax is taken of is scale·s + bias, and `fill` where
// the mask is 0; what it gives is multiplied by the factor. Of bias, mask and factor, which may be null, keys lie side by side,
// and *_row elements are from a row to the next.
struct Scores {
  float* s;
  int64_t rows, keys, stride;
  float scale, fill;
  Element bias_element;
  const void* bias;
  const uint8_t* mask;
  int64_t bias_row, mask_row;
  const float* factor;
  int64_t factor_row;
};

// Of each row, over the keys so far: the largest score, Σe^(score - largest), and Σe^(score - largest)·factor·v, `columns` wide.
struct Softmax {
  float *largest, *total, *sums;
  int64_t columns, stride;  // of the sums
};

// Of each row: its softmax p is e^(score - largest)·inverse; delta = Σ p·factor·dp over all keys, which is Σ dy·y, or null: these
// are all keys. dp = dy·vᵀ lies as the scores do.
struct Gradient {
  const float *largest, *inverse, *delta;
  float* dp;
  float* dscores;  // or null: not wanted; the gradient of scale·s + bias
  int64_t dscores_row;
};

struct Kernels {
  // s = e^(score - largest)·factor, with the new largest of each row; what was summed before is scaled to it. `first`: nothing was.
  void (*softmax)(const Scores&, const Softmax&, bool first);
  // y = sums / total; largest (-Inf: 0) and 1/total of every row, where they are wanted.
  void (*finish)(const Softmax&, int64_t rows, Element, void* y, int64_t y_row, float* largest, float* inverse);
  // s = p·factor, and dp = p·(factor·dp - delta)·scale, 0 where the mask is.
  void (*gradient)(const Scores&, const Gradient&);
  // Σ a·b of each row.
  void (*row_products)(Element, const void* a, int64_t a_row, const void* b, int64_t b_row, int64_t rows, int64_t columns,
                       float* sums);
  // Rows of f32 as sums of two of bf16, of which high has them rounded and low rounds what that leaves.
  void (*split)(const float* from, int64_t stride, int64_t rows, int64_t columns, void* high, void* low, int64_t to_row);
  // Rows of f32, rounded.
  void (*write)(const float* from, int64_t stride, int64_t rows, int64_t columns, Element, void* to, int64_t to_row);
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels;

}  // namespace jaxfuse::attention
