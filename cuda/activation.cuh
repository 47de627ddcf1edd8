// The activations and their derivatives on CUDA: which one is known when the kernel runs.
#pragma once

#include "activation.h"
#include "number.cuh"

namespace jaxfuse::cuda {

namespace formulas {
using N = float;

HOST_DEVICE float broadcast(float x) { return x; }
HOST_DEVICE float absolute(float x) { return fabsf(x); }
HOST_DEVICE float exp(float x) { return expf(x); }
HOST_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
HOST_DEVICE float expm1_of_negative(float x) { return expm1f(x); }
HOST_DEVICE float log1p_up_to_1(float x) { return log1pf(x); }
HOST_DEVICE float tanh(float x) { return tanhf(x); }
HOST_DEVICE float normal_cdf(float x) { return 0.5f * erfcf(-0.707106781f * x); }

#define FUNCTION HOST_DEVICE
#include "activation_math.h"
#include "activation_formulas.h"
#undef FUNCTION

template <Activation activation, bool is_known = has_derivative_from_y(activation)>
HOST_DEVICE float pullback_from_y(float g, float y, const Parameters& p) {
  if constexpr (is_known) {
    return Formulas<activation>::pullback_from_y(g, y, p);
  } else {
    return g;  // never called
  }
}
}  // namespace formulas
using formulas::is_gate, formulas::slope_at;

HOST_DEVICE float activated(Activation activation, float z, const Parameters& p) {
#define JAXFUSE_ROW(name, ...) \
  case Activation::name: return formulas::Formulas<Activation::name>::value(z, p);
  switch (activation) { JAXFUSE_ACTIVATIONS(JAXFUSE_ROW) }
#undef JAXFUSE_ROW
  return z;
}

// g·activation'(z)
HOST_DEVICE float pulled_back(Activation activation, float g, float z, const Parameters& p) {
#define JAXFUSE_ROW(name, ...) \
  case Activation::name: return formulas::Formulas<Activation::name>::pullback(g, z, p);
  switch (activation) { JAXFUSE_ACTIVATIONS(JAXFUSE_ROW) }
#undef JAXFUSE_ROW
  return g;
}

// The same from y = activation(z), where it is a function of y: has_derivative_from_y.
HOST_DEVICE float pulled_back_from_y(Activation activation, float g, float y, const Parameters& p) {
#define JAXFUSE_ROW(name, ...) \
  case Activation::name: return formulas::pullback_from_y<Activation::name>(g, y, p);
  switch (activation) { JAXFUSE_ACTIVATIONS(JAXFUSE_ROW) }
#undef JAXFUSE_ROW
  return g;
}

}  // namespace jaxfuse::cuda
