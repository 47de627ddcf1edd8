// The inner loops of conv_winograd.cc as a table of functions for each ISA; conv_winograd_loops.h is the loops.
#pragma once

#include "contraction_kernels.h"
#include "product_kernels.h"

namespace jaxfuse::conv::winograd {

constexpr int64_t kSide = 4, kPoints = kSide * kSide;  // of a transformed tile; it gives 2×2 outputs

// The taps of a filter: tap (i, j) from channel c to feature k is at w + i·line + j·column + c·channel + k·feature.
struct Filter {
  const float* w;
  int64_t line, column, channel, feature;
};

// The products of one line of points for `tiles` tiles beside one another, `columns` features of each: from point to point it is `point`,
// from tile to tile `row`. The tiles' outputs have two lines of 2·tiles pixels, `row` apart.
struct Outputs {
  const float* m;
  int64_t point, row, tiles, columns;
  float* z[2];
};

// Of the gradient of a filter.
struct FilterKernels {
  int64_t rows, columns;  // of a tile of products, whose sums fill the registers
  // Line `line` of A·g·Aᵀ of one tile, whose 2×2 pixels are given line by line; as transform_input.
  void (*transform_gradient)(const float* const* pixels, int64_t line, int64_t channels, float* to, int64_t point);
  // sums[i·stride + j] = Σ a_i·b_j over panels.steps, added to what is there unless `first`.
  void (*multiply)(const product::Panels& panels, int64_t rows, int64_t columns, float* sums, int64_t stride, bool first);
  // What line `line` of m contributes to Gᵀ·m·G, added to `count` numbers of each of nine taps; whether all of them are finite.
  bool (*add_taps)(const float* m, int64_t point, int64_t line, int64_t count, float* taps, int64_t tap);
};

// Points are taken line by line: a line's memory stays in the cache, where that of all of them would not.
struct Kernels {
  // G·g·Gᵀ of `count` features for each channel; point p of channel c is at to + p·point + c·columns, with zeros behind the features.
  void (*transform_filter)(const Filter&, int64_t channels, int64_t count, float* to, int64_t columns, int64_t point);
  // Line `line` of Bᵀ·d·B of one tile, whose 4×4 pixels are given line by line: channel c of its point j goes to to[j·point + c]. What is
  // written are whole vectors.
  void (*transform_input)(const float* const* pixels, int64_t line, int64_t channels, float* to, int64_t point);
  // What line `line` of m contributes to Aᵀ·m·A, added to the outputs, or written where it is the first that does; whether what is
  // there now is finite.
  bool (*add_outputs)(const Outputs&, int64_t line);

  FilterKernels filter;
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels;

}  // namespace jaxfuse::conv::winograd
