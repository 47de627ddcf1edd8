// The elementwise loops around a convolution, as a table of functions for each ISA, and the choice among them.
// conv.cc and conv_bwd.cc run them on threads; conv_loops.h is the loops.
#pragma once

#include <cstdint>

namespace jaxfuse::conv {

enum class Activation {
  none, relu, relu6, leaky_relu, elu, sigmoid, tanh, silu, gelu, gelu_tanh, hard_swish, softplus
};

// A tensor seen as (outer, features, inner), row-major; f32 or bf16. Channels-last is inner == 1.
struct EpilogueArgs {
  bool bf16;
  int64_t features, inner;
  Activation activation;
  float alpha;
  const void* in;        // or null: zeros
  bool in_f32;           // whatever y is
  const float* scale;    // or null: ones
  const float* bias;     // or null: zeros
  const void* residual;  // or null: zeros
  void* y;               // may be `in`
};

struct GradientArgs {
  bool bf16;
  int64_t features, inner;
  Activation activation;
  float alpha;
  const void *dy, *y;  // y is not read for Activation::none
  void* g;             // or null
};

struct Kernels {
  // y = activation(scale·in + bias + residual) for rows [begin, end) of `inner` elements; row = outer·features + feature.
  // For inner == 1 begin and end are multiples of `features`.
  void (*epilogue)(const EpilogueArgs&, int64_t begin, int64_t end);
  // y = activation(in) where `in` is not finite, for such rows; `in` is like y, nothing else is read.
  void (*restore)(const EpilogueArgs&, int64_t begin, int64_t end);
  // g = dy·activation'(y) for such rows. sums (or null) receives Σg: per feature for inner == 1, else one per row.
  void (*gradient)(const GradientArgs&, int64_t begin, int64_t end, float* sums);
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels;

}  // namespace jaxfuse::conv
