// The activations and their derivatives by the formulas of jax.nn, as xla_ext/activation_loops.h has them. Every comparison
// is written so that NaN takes the branch that keeps it, and derivatives select where JAX's do: 0·g would be NaN for an
// infinite g.
#pragma once

#include "activation.h"
#include "number.cuh"

namespace jaxfuse::cuda {

constexpr float kSeluScale = 1.05070099f, kSeluAlpha = 1.67326324f;

HOST_DEVICE float sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }
HOST_DEVICE float normal_cdf(float z) { return 0.5f * erfcf(-0.707106781f * z); }
// gelu with tanh: z·(1 + tanh u)/2 = z·sigmoid(2u)
HOST_DEVICE float gelu_u(float z) { return 0.797884561f * (z + 0.044715f * z * z * z); }

// tanh(softplus(z)) = n/(n + 2) with n = e^z·(e^z + 2), and 1 less that, which cancels nothing.
struct MishFactor {
  float tanh, rest;

  HOST_DEVICE explicit MishFactor(float z) {
    const float e = expf(-fabsf(z)), n = z > 0.0f ? 1.0f + 2.0f * e : e * (e + 2.0f);
    const float two = z > 0.0f ? 2.0f * e * e : 2.0f;  // both sides times e^(-2z) where that is small
    tanh = n / (n + two);
    rest = two / (n + two);
  }
};

// One piece of a piecewise linear function, continued to all z.
HOST_DEVICE float line(const Piecewise& f, int piece, float z) {
  return f.slopes[piece] == 0.0f ? f.offsets[piece] : f.slopes[piece] * (z - f.center) + f.offsets[piece];
}

HOST_DEVICE float piecewise(const Piecewise& f, float z) {
  if (z != z) return f.at_nan;
  if (f.inward[0] ? z < f.bounds[0] : z <= f.bounds[0]) return line(f, 0, z);
  return (f.inward[1] ? z > f.bounds[1] : z >= f.bounds[1]) ? line(f, 2, z) : line(f, 1, z);
}

// The derivative at x; `bounds` are those of x, or, where x is the value, its ends.
HOST_DEVICE float slope_at(const Piecewise& f, const float (&bounds)[2], float x) {
  float slope = x < bounds[0] ? f.slopes[0] : x > bounds[1] ? f.slopes[2] : f.slopes[1];
  if (x == bounds[0]) slope = f.at_bounds[0];
  if (x == bounds[1]) slope = f.at_bounds[1];
  return x == x ? slope : f.slope_at_nan;
}

HOST_DEVICE float piecewise_gradient(const Piecewise& f, const float (&bounds)[2], float g, float x) {
  const float slope = slope_at(f, bounds, x);
  return slope == 0.0f ? 0.0f : g * slope;
}

// Whether the derivative jumps, perhaps from 0 to 1: it is told by z as rounded to x's dtype, so that a mask, y and what is
// recomputed agree.
HOST_DEVICE bool is_gate(Activation activation) {
  return activation == Activation::relu || activation == Activation::piecewise_linear;
}

HOST_DEVICE float activated(Activation activation, float z, const Parameters& p) {
  switch (activation) {
    case Activation::none: return z;
    case Activation::relu: return z <= 0.0f ? 0.0f : z;
    case Activation::piecewise_linear: return piecewise(p.pieces, z);
    case Activation::piecewise_gate: return z * piecewise(p.pieces, z);
    case Activation::elu: return z < 0.0f ? p.alpha * expm1f(z) : z;
    case Activation::selu: return kSeluScale * (z < 0.0f ? kSeluAlpha * expm1f(z) : z);
    case Activation::celu: return z < 0.0f ? p.alpha * expm1f(z / p.alpha) : z;
    case Activation::sigmoid: return sigmoid(z);
    case Activation::tanh: return tanhf(z);
    case Activation::silu: return z / (1.0f + expf(-z));
    case Activation::gelu: return z * normal_cdf(z);
    case Activation::gelu_tanh: return z / (1.0f + expf(-2.0f * gelu_u(z)));
    case Activation::mish: return z * MishFactor(z).tanh;
    case Activation::softplus: return (z < 0.0f ? 0.0f : z) + log1pf(expf(z < 0.0f ? z : -z));
    case Activation::relu_squared: return z <= 0.0f ? 0.0f : z * z;
  }
  return z;
}

// g·activation'(z)
HOST_DEVICE float pulled_back(Activation activation, float g, float z, const Parameters& p) {
  switch (activation) {
    case Activation::none: return g;
    case Activation::relu: return z > 0.0f ? g : 0.0f;
    case Activation::piecewise_linear: return piecewise_gradient(p.pieces, p.pieces.bounds, g, z);
    case Activation::piecewise_gate:
      return g * piecewise(p.pieces, z) + piecewise_gradient(p.pieces, p.pieces.bounds, g * z, z);
    case Activation::elu: return z > 0.0f ? g : g * (p.alpha * expf(z));
    case Activation::selu: return kSeluScale * (z > 0.0f ? g : g * (kSeluAlpha * expf(z)));
    case Activation::celu: return z > 0.0f ? g : g * expf(z / p.alpha);
    case Activation::sigmoid: {
      const float s = sigmoid(z);
      return g * (s * (1.0f - s));
    }
    case Activation::tanh: {
      const float t = tanhf(z);
      return g * (1.0f - t * t);
    }
    case Activation::silu: {
      const float s = sigmoid(z);
      return g * (s * (1.0f + z * (1.0f - s)));
    }
    case Activation::gelu: return g * (normal_cdf(z) + z * (0.398942280f * expf(-0.5f * z * z)));
    case Activation::gelu_tanh: {
      const float s = sigmoid(2.0f * gelu_u(z)), slope = 1.59576912f * (1.0f + 0.134145f * z * z);
      return g * (s + z * slope * (s * (1.0f - s)));
    }
    case Activation::mish: {
      const MishFactor factor(z);
      return g * (factor.tanh + z * (factor.rest * (1.0f + factor.tanh)) * sigmoid(z));
    }
    case Activation::softplus: return g * sigmoid(z);
    case Activation::relu_squared: return z > 0.0f ? 2.0f * z * g : 0.0f;
  }
  return g;
}

// The same from y = activation(z), where that tells it: is_told_by_value.
HOST_DEVICE float pulled_back_by_value(Activation activation, float g, float y, const Parameters& p) {
  switch (activation) {
    case Activation::relu: return y > 0.0f ? g : 0.0f;
    case Activation::piecewise_linear: return piecewise_gradient(p.pieces, p.pieces.ends, g, y);
    case Activation::elu: return y > 0.0f ? g : g * (y + p.alpha);
    case Activation::selu: return y > 0.0f ? kSeluScale * g : g * (y + kSeluScale * kSeluAlpha);
    case Activation::celu: return y > 0.0f ? g : g * (y / p.alpha + 1.0f);
    case Activation::sigmoid: return g * (y * (1.0f - y));
    case Activation::tanh: return g * (1.0f - y * y);
    case Activation::softplus: return g * -expm1f(-y);
    case Activation::none:
    case Activation::piecewise_gate:
    case Activation::silu:
    case Activation::gelu:
    case Activation::gelu_tanh:
    case Activation::mish:
    case Activation::relu_squared: break;
  }
  return g;
}

}  // namespace jaxfuse::cuda
