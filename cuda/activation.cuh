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

HOST_DEVICE float clamped(float z, float low, float high) {
  z = z <= low ? low : z;
  return z >= high ? high : z;
}

// Whether the derivative is 1 or 0 (or half at a tie), told by z as well once it is rounded to x's dtype: so a mask, y and
// what is recomputed agree.
HOST_DEVICE bool is_gate(Activation activation) {
  return activation == Activation::relu || activation == Activation::maximum0 || activation == Activation::relu6 ||
         activation == Activation::clip6;
}

HOST_DEVICE float activated(Activation activation, float z, float alpha) {
  switch (activation) {
    case Activation::none: return z;
    case Activation::relu:
    case Activation::maximum0: return z <= 0.0f ? 0.0f : z;
    case Activation::relu6:
    case Activation::clip6: return clamped(z, 0.0f, 6.0f);
    case Activation::clip: return clamped(z, 0.0f, alpha);
    case Activation::leaky_relu: return z < 0.0f ? alpha * z : z;
    case Activation::elu: return z < 0.0f ? alpha * expm1f(z) : z;
    case Activation::selu: return kSeluScale * (z < 0.0f ? kSeluAlpha * expm1f(z) : z);
    case Activation::celu: return z < 0.0f ? alpha * expm1f(z / alpha) : z;
    case Activation::sigmoid: return sigmoid(z);
    case Activation::tanh: return tanhf(z);
    case Activation::silu: return z / (1.0f + expf(-z));
    case Activation::gelu: return z * normal_cdf(z);
    case Activation::gelu_tanh: return z / (1.0f + expf(-2.0f * gelu_u(z)));
    case Activation::mish: return z * MishFactor(z).tanh;
    case Activation::hard_swish: return z * (clamped(z + 3.0f, 0.0f, 6.0f) / 6.0f);
    case Activation::hard_sigmoid: return clamped(z + 3.0f, 0.0f, 6.0f) / 6.0f;
    case Activation::hard_tanh: return clamped(z, -1.0f, 1.0f);
    case Activation::softplus: return (z < 0.0f ? 0.0f : z) + log1pf(expf(z < 0.0f ? z : -z));
    case Activation::relu_squared: return z <= 0.0f ? 0.0f : z * z;
  }
  return z;
}

// g between the bounds, half of it at a tie, as of min(max(z, 0), high).
HOST_DEVICE float between(float g, float z, float high) {
  return z > 0.0f && z < high ? g : z == 0.0f || z == high ? 0.5f * g : 0.0f;
}

// g·activation'(z)
HOST_DEVICE float pulled_back(Activation activation, float g, float z, float alpha) {
  switch (activation) {
    case Activation::none: return g;
    case Activation::relu: return z > 0.0f ? g : 0.0f;
    case Activation::maximum0: return z > 0.0f ? g : z == 0.0f ? 0.5f * g : 0.0f;
    case Activation::relu6: return z > 0.0f && z < 6.0f ? g : 0.0f;
    case Activation::clip6: return between(g, z, 6.0f);
    case Activation::clip: return between(g, z, alpha);
    case Activation::leaky_relu: return z >= 0.0f ? g : alpha * g;
    case Activation::elu: return z > 0.0f ? g : g * (alpha * expf(z));
    case Activation::selu: return kSeluScale * (z > 0.0f ? g : g * (kSeluAlpha * expf(z)));
    case Activation::celu: return z > 0.0f ? g : g * expf(z / alpha);
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
    case Activation::hard_swish: {
      const float u = z + 3.0f;
      return g * (clamped(u, 0.0f, 6.0f) / 6.0f) + (u > 0.0f && u < 6.0f ? g * z / 6.0f : 0.0f);
    }
    case Activation::hard_sigmoid: {
      const float u = z + 3.0f;
      return u > 0.0f && u < 6.0f ? g / 6.0f : 0.0f;
    }
    case Activation::hard_tanh: return z > 1.0f || z < -1.0f ? 0.0f : g;
    case Activation::softplus: return g * sigmoid(z);
    case Activation::relu_squared: return z > 0.0f ? 2.0f * z * g : 0.0f;
  }
  return g;
}

// The same from y = activation(z), where that tells it: is_told_by_value.
HOST_DEVICE float pulled_back_by_value(Activation activation, float g, float y, float alpha) {
  switch (activation) {
    case Activation::relu: return y > 0.0f ? g : 0.0f;
    case Activation::relu6: return y > 0.0f && y < 6.0f ? g : 0.0f;
    case Activation::leaky_relu: return y >= 0.0f ? g : alpha * g;
    case Activation::elu: return y > 0.0f ? g : g * (y + alpha);
    case Activation::selu: return y > 0.0f ? kSeluScale * g : g * (y + kSeluScale * kSeluAlpha);
    case Activation::celu: return y > 0.0f ? g : g * (y / alpha + 1.0f);
    case Activation::sigmoid: return g * (y * (1.0f - y));
    case Activation::tanh: return g * (1.0f - y * y);
    case Activation::hard_sigmoid: return y > 0.0f && y < 1.0f ? g / 6.0f : 0.0f;
    case Activation::softplus: return g * -expm1f(-y);
    case Activation::none:
    case Activation::maximum0:
    case Activation::clip6:
    case Activation::clip:
    case Activation::silu:
    case Activation::gelu:
    case Activation::gelu_tanh:
    case Activation::mish:
    case Activation::hard_swish:
    case Activation::hard_tanh:
    case Activation::relu_squared: break;
  }
  return g;
}

}  // namespace jaxfuse::cuda
