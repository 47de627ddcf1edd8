// The elementwise loops around a convolution, as a table of functions for each ISA, and the choice among them.
// conv.cc and conv_bwd.cc run them on threads; conv_loops.h is the loops.
#pragma once

#include <cstdint>

#include "activation.h"

namespace jaxfuse::conv {

// A tensor seen as (outer, features, inner), row-major; f32 or bf16. Channels-last is inner == 1.
struct EpilogueArgs {
  bool bf16;
  int64_t features, inner;
  Activation activation;
  Parameters parameters;
  const void* in;        // or null: zeros
  bool in_f32;           // whatever y is
  const float* scale;    // or null: ones
  const float* bias;     // or null: zeros
  const void* residual;  // or null: zeros
  bool residual_last;    // added after the activation
  void* y;               // may be `in`
};

struct GradientArgs {
  bool bf16;
  int64_t features, inner;
  Activation activation;
  Parameters parameters;
  const void* dy;
  const void* told;  // y if by_value, else z: what tells the derivative; not read for Activation::none
  bool by_value;
  void* g;             // or null
};

struct Kernels {
  // y = activation(scale·in + bias + residual), or the residual last, for rows [begin, end) of `inner` elements; row = outer·features + feature.
  // For inner == 1 begin and end are multiples of `features`.
  void (*epilogue)(const EpilogueArgs&, int64_t begin, int64_t end);
  // y = activation(in) + residual where `in`, which is like y, is not finite, for such rows; nothing else is read.
  void (*restore)(const EpilogueArgs&, int64_t begin, int64_t end);
  // g = dy·activation'(z) for such rows. sums (or null) receives Σg: per feature for inner == 1, else one per row.
  void (*gradient)(const GradientArgs&, int64_t begin, int64_t end, float* sums);
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels;

}  // namespace jaxfuse::conv
