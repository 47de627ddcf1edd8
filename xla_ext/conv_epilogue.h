// The elementwise passes around a convolution, on threads.
#pragma once

#include "conv_kernels.h"
#include "handler.h"

namespace jaxfuse::conv {

struct Epilogue {
  Activation activation;
  Parameters parameters;
  const void* in;        // or null: zeros
  DType in_dtype;        // y's or f32
  const float* scale;    // or null: ones
  const float* bias;     // or null: zeros
  const void* residual;  // or null: zeros
  bool residual_last;    // added after the activation
};

// y = activation(scale·in + bias + residual), or the residual last; `in` and `residual` are shaped like y and may be y.
void run_epilogue(const Tensor& y, int64_t feature_position, const Epilogue& epilogue);

// y = activation(z) + added (or null: zeros) where z, which is like y, is not finite.
void restore_not_finite(const Tensor& y, int64_t feature_position, const void* z, Activation activation, const Parameters& parameters,
                        const void* added);

struct Gradient {
  Activation activation;
  Parameters parameters;
  const void* told;  // y if by_value, else z = what the activation was applied to; not read for Activation::none
  bool by_value;
  void* g;  // or null
};

// g = dy·activation'(z); db (or null) = Σ g over all but the feature, f32.
void run_gradient(const Tensor& dy, int64_t feature_position, const Gradient& gradient, float* db);

}  // namespace jaxfuse::conv
