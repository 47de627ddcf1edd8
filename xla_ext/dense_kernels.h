// The elementwise loops around a matrix product, as a table of functions for each ISA, and the choice among them.
// dense.cc and dense_bwd.cc run them on threads; dense_loops.h is the loops.
#pragma once

#include <cstdint>

#include "activation.h"
#include "element.h"

namespace jaxfuse::dense {

// `columns` columns of row-major matrices.
struct EpilogueArgs {
  Element element;  // residual, z and y
  int64_t columns;
  int64_t stride, in_stride;  // from row to row: of residual, z and y; of in
  Activation activation;
  Parameters parameters;
  const float* in;       // may be y
  const float* scale;    // or null: ones
  const float* bias;     // or null: zeros
  const void* residual;  // or null: zeros
  bool residual_last;    // added after the activation
  void* z;               // or null: not wanted
  void* y;
};

struct GradientArgs {
  Element element;
  int64_t columns;
  Activation activation;
  Parameters parameters;
  bool by_value;     // told is y, not z
  const void* dy;
  const void* told;  // not read for Activation::none
  void* g;           // or null
};

struct Kernels {
  // z = scale·in + bias + residual, y = activation(z), or the residual last, for rows [begin, end).
  void (*epilogue)(const EpilogueArgs&, int64_t begin, int64_t end);
  // g = dy·activation'(z) for such rows; sums (or null), one for each column, receives Σg.
  void (*gradient)(const GradientArgs&, int64_t begin, int64_t end, float* sums);
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels;

}  // namespace jaxfuse::dense
