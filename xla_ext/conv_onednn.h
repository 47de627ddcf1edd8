// A forward convolution as the target is asked for it, and as much of it as oneDNN does in one pass over y.
#pragma once

#include <optional>

#include "activation.h"
#include "conv.h"

namespace jaxfuse::conv {

// y = activation(scale·(x (*) w) + bias + residual)
struct Forward {
  Geometry geometry;
  Tensor x, w;
  std::optional<Tensor> scale, bias, residual;
  Tensor y;
  Activation activation;
  Parameters parameters;
  bool residual_last = false;  // added after the activation
  std::optional<Tensor> z{};   // where to keep what the activation is applied to
  bool adds = false;           // to what y holds
};

// x (*) w and nothing else, into y.
Forward bare(const Forward& f, const Tensor& y);

// Whether oneDNN can apply it inside a convolution.
bool has_post_ops(Activation activation, const Parameters& parameters, DType dtype);

// All of f but z, into y, whose long sums are cut into slices. False, and nothing done, where oneDNN has no fast code.
bool run_by_onednn(const Forward& f, void* y);

}  // namespace jaxfuse::conv
