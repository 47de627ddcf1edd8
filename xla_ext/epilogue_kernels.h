// The epilogue of a product or a convolution, and its gradient, as a table of functions for each ISA. epilogue.cc runs them on
// threads; other kernels hand over tiles of sums that are still in the cache. epilogue_loops.h is the loops.
#pragma once

#include <cstdint>

#include "activation.h"
#include "element.h"

namespace jaxfuse::epilogue {

// Rows of `columns` elements. Scale and bias are the columns', or the rows': with row_features, row r is of feature r % row_features.
struct Tile {
  Element element;       // of residual, z and y
  int64_t columns;
  int64_t stride;        // from row to row of residual, z and y
  int64_t row_features;  // or 0: features are the columns
  Activation activation;
  Parameters parameters;
  const void* sums;      // or null: zeros
  int64_t sums_stride;
  bool sums_f32;         // or like y
  const float* scale;    // or null: ones
  const float* bias;     // or null: zeros
  const void* residual;  // or null: zeros
  bool residual_last;    // added after the activation
  void* z;               // or null: not saved
  void* y;               // may be the sums
};

// Such rows without gaps, of the gradient.
struct GradientTile {
  Element element;
  int64_t columns;
  int64_t row_features;
  Activation activation;
  Parameters parameters;
  bool derivative_from_y;
  const void* dy;
  const void* saved;  // y if derivative_from_y, else z; not read for Activation::none
  void* g;            // or null
};

struct Kernels {
  // z = scale·sums + bias + residual and y = activation(z), or the residual last, for rows [begin, end).
  void (*apply)(const Tile&, int64_t begin, int64_t end);
  // z becomes activation(z).
  void (*activate)(Activation, const Parameters&, float* z, int64_t count);
  // y = activation(sums) + residual where the sums, which lie as y does, are not finite.
  void (*restore)(const Tile&, int64_t begin, int64_t end);
  // g = dy·activation'(z) for such rows. sums (or null) receives Σg: of each column, or with row_features of each row.
  void (*gradient)(const GradientTile&, int64_t begin, int64_t end, float* sums);
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels;

}  // namespace jaxfuse::epilogue
