// The activations and their derivatives on vectors, by the formulas of jax.nn. Every comparison is written so that NaN
// takes the branch that keeps it, and derivatives select where JAX's do: 0·g would be NaN for an infinite g.
#pragma once

#include "activation.h"
#include "simd_math.h"

namespace jaxfuse {
namespace {

constexpr float kSeluScale = 1.05070099f, kSeluAlpha = 1.67326324f;

inline Floats sigmoid(Floats z) { return 1.0f / (1.0f + exp(-z)); }

// gelu with tanh: z·(1 + tanh u)/2 = z·sigmoid(2u)
inline Floats gelu_u(Floats z) { return 0.797884561f * (z + 0.044715f * z * z * z); }

// tanh(softplus(z)) = n/(n + 2) with n = e^z·(e^z + 2), and 1 less that, which cancels nothing.
struct MishFactor {
  Floats tanh, rest;

  explicit MishFactor(Floats z) {
    const Floats e = exp(-absolute(z)), n = z > 0.0f ? 1.0f + 2.0f * e : e * (e + 2.0f);
    const Floats two = z > 0.0f ? 2.0f * e * e : Floats{} + 2.0f;  // both sides times e^(-2z) where that is small
    tanh = n / (n + two);
    rest = two / (n + two);
  }
};

inline Floats clamped(Floats z, Floats low, Floats high) {
  z = z <= low ? low : z;
  return z >= high ? high : z;
}

// An activation that one of these switches lacks has no value to return: -Werror=return-type, for -Wswitch does not look at
// switches over a template's argument.
template <Activation activation>
Floats activated(Floats z, float alpha) {
  switch (activation) {
    case Activation::none: return z;
    case Activation::relu:
    case Activation::maximum0: return z <= 0.0f ? Floats{} : z;
    case Activation::relu6:
    case Activation::clip6: return clamped(z, Floats{}, Floats{} + 6.0f);
    case Activation::clip: return clamped(z, Floats{}, Floats{} + alpha);
    case Activation::leaky_relu: return z < 0.0f ? alpha * z : z;
    case Activation::elu: return z < 0.0f ? alpha * expm1_of_negative(z) : z;
    case Activation::selu: return kSeluScale * (z < 0.0f ? kSeluAlpha * expm1_of_negative(z) : z);
    case Activation::celu: return z < 0.0f ? alpha * expm1_of_negative(z / alpha) : z;
    case Activation::sigmoid: return sigmoid(z);
    case Activation::tanh: return tanh(z);
    case Activation::silu: return z / (1.0f + exp(-z));
    case Activation::gelu: return z * normal_cdf(z);
    case Activation::gelu_tanh: return z / (1.0f + exp(-2.0f * gelu_u(z)));
    case Activation::mish: return z * MishFactor(z).tanh;
    case Activation::hard_swish: return z * (activated<Activation::relu6>(z + 3.0f, 0) / 6.0f);
    case Activation::hard_sigmoid: return activated<Activation::relu6>(z + 3.0f, 0) / 6.0f;
    case Activation::hard_tanh: return clamped(z, Floats{} - 1.0f, Floats{} + 1.0f);
    case Activation::softplus: {
      const Floats positive = z < 0.0f ? Floats{} : z;
      return positive + log1p_up_to_1(exp(z < 0.0f ? z : -z));
    }
    case Activation::relu_squared: {
      const Floats positive = activated<Activation::relu>(z, 0);
      return positive * positive;
    }
  }
}

// g between the bounds, half of it at a tie, as of min(max(z, 0), high).
inline Floats between(Floats g, Floats z, float high) {
  const Floats at_ties = (z == 0.0f) | (z == high) ? 0.5f * g : Floats{};
  return (z > 0.0f) & (z < high) ? g : at_ties;
}

// g·activation'(z)
template <Activation activation>
Floats pulled_back(Floats g, Floats z, float alpha) {
  switch (activation) {
    case Activation::none: return g;
    case Activation::relu: return z > 0.0f ? g : Floats{};
    case Activation::maximum0: return z > 0.0f ? g : (z == 0.0f ? 0.5f * g : Floats{});
    case Activation::relu6: return (z > 0.0f) & (z < 6.0f) ? g : Floats{};
    case Activation::clip6: return between(g, z, 6.0f);
    case Activation::clip: return between(g, z, alpha);
    case Activation::leaky_relu: return z >= 0.0f ? g : alpha * g;
    case Activation::elu: return z > 0.0f ? g : g * (alpha * exp(z));
    case Activation::selu: return kSeluScale * (z > 0.0f ? g : g * (kSeluAlpha * exp(z)));
    case Activation::celu: return z > 0.0f ? g : g * exp(z / alpha);
    case Activation::sigmoid: {
      const Floats s = sigmoid(z);
      return g * (s * (1.0f - s));
    }
    case Activation::tanh: {
      const Floats t = tanh(z);
      return g * (1.0f - t * t);
    }
    case Activation::silu: {
      const Floats s = sigmoid(z);
      return g * (s * (1.0f + z * (1.0f - s)));
    }
    case Activation::gelu: return g * (normal_cdf(z) + z * (0.398942280f * exp(-0.5f * z * z)));
    case Activation::gelu_tanh: {
      const Floats s = sigmoid(2.0f * gelu_u(z)), slope = 1.59576912f * (1.0f + 0.134145f * z * z);
      return g * (s + z * slope * (s * (1.0f - s)));
    }
    case Activation::mish: {
      const MishFactor factor(z);
      return g * (factor.tanh + z * (factor.rest * (1.0f + factor.tanh)) * sigmoid(z));
    }
    case Activation::hard_swish: {
      const Floats u = z + 3.0f, inside = (u > 0.0f) & (u < 6.0f) ? g * z / 6.0f : Floats{};
      return g * (activated<Activation::relu6>(u, 0) / 6.0f) + inside;
    }
    case Activation::hard_sigmoid: return pulled_back<Activation::relu6>(g / 6.0f, z + 3.0f, 0);
    case Activation::hard_tanh: return (z > 1.0f) | (z < -1.0f) ? Floats{} : g;
    case Activation::softplus: return g * sigmoid(z);
    case Activation::relu_squared: return z > 0.0f ? 2.0f * z * g : Floats{};
  }
}

// The same from y = activation(z), for those that y determines.
template <Activation activation>
Floats pulled_back_by_value(Floats g, Floats y, float alpha) {
  switch (activation) {
    case Activation::none: return g;
    case Activation::relu: return y > 0.0f ? g : Floats{};
    case Activation::relu6: return (y > 0.0f) & (y < 6.0f) ? g : Floats{};
    case Activation::leaky_relu: return y >= 0.0f ? g : alpha * g;
    case Activation::elu: return y > 0.0f ? g : g * (y + alpha);
    case Activation::selu: return y > 0.0f ? kSeluScale * g : g * (y + kSeluScale * kSeluAlpha);
    case Activation::celu: return y > 0.0f ? g : g * (y / alpha + 1.0f);
    case Activation::sigmoid: return g * (y * (1.0f - y));
    case Activation::tanh: return g * (1.0f - y * y);
    case Activation::hard_sigmoid: return (y > 0.0f) & (y < 1.0f) ? g / 6.0f : Floats{};
    case Activation::softplus: return g * -expm1_of_negative(-y);
  }
}

// dy·activation' at elements [at, at + lanes) of tensors of T: `told` is y if `by_value`, else z.
template <class T, Activation activation, class GradientArgs, class Lanes>
Floats gradient_vector(const GradientArgs& args, int64_t at, Lanes lanes) {
  const Floats dy = load(static_cast<const T*>(args.dy) + at, lanes);
  if constexpr (activation == Activation::none) return dy;
  const Floats told = load(static_cast<const T*>(args.told) + at, lanes);
  if constexpr (is_told_by_value(activation)) {
    if (args.by_value) return round_to<T>(pulled_back_by_value<activation>(dy, told, args.alpha));
  }
  return round_to<T>(pulled_back<activation>(dy, told, args.alpha));
}

// f(Constant<activation>)
template <class F>
void with_activation(Activation activation, F f) {
#define CASE(name) \
  case Activation::name: return f(Constant<Activation::name>{})
  switch (activation) {
    CASE(none);
    CASE(relu);
    CASE(maximum0);
    CASE(relu6);
    CASE(clip6);
    CASE(clip);
    CASE(leaky_relu);
    CASE(elu);
    CASE(selu);
    CASE(celu);
    CASE(sigmoid);
    CASE(tanh);
    CASE(silu);
    CASE(gelu);
    CASE(gelu_tanh);
    CASE(mish);
    CASE(hard_swish);
    CASE(hard_sigmoid);
    CASE(hard_tanh);
    CASE(softplus);
    CASE(relu_squared);
  }
#undef CASE
}

}  // namespace
}  // namespace jaxfuse
