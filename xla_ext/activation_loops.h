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

// One piece of a piecewise linear function, continued to all z.
inline Floats line(const Piecewise& f, int piece, Floats z) {
  if (f.slopes[piece] == 0.0f) return broadcast(f.offsets[piece]);
  return f.slopes[piece] * (z - f.center) + f.offsets[piece];
}

inline Floats piecewise(const Piecewise& f, Floats z) {
  const Ints below = f.inward[0] ? z < f.bounds[0] : z <= f.bounds[0], above = f.inward[1] ? z > f.bounds[1] : z >= f.bounds[1];
  Floats y = line(f, 1, z);
  y = below ? line(f, 0, z) : y;
  y = above ? line(f, 2, z) : y;
  return z == z ? y : broadcast(f.at_nan);
}

// g times the derivative at x; `bounds` are those of x, or, where x is the value, its ends.
inline Floats piecewise_gradient(const Piecewise& f, const float (&bounds)[2], Floats g, Floats x) {
  Floats slope = x < bounds[0] ? broadcast(f.slopes[0]) : broadcast(f.slopes[1]);
  slope = x > bounds[1] ? broadcast(f.slopes[2]) : slope;
  slope = x == bounds[0] ? broadcast(f.at_bounds[0]) : slope;
  slope = x == bounds[1] ? broadcast(f.at_bounds[1]) : slope;
  slope = x == x ? slope : broadcast(f.slope_at_nan);
  return slope == 0.0f ? Floats{} : g * slope;
}

template <Activation activation>
Floats activated(Floats z, const Parameters& p) {
  switch (activation) {
    case Activation::none: return z;
    case Activation::relu: return z <= 0.0f ? Floats{} : z;
    case Activation::piecewise_linear: return piecewise(p.pieces, z);
    case Activation::piecewise_gate: return z * piecewise(p.pieces, z);
    case Activation::elu: return z < 0.0f ? p.alpha * expm1_of_negative(z) : z;
    case Activation::selu: return kSeluScale * (z < 0.0f ? kSeluAlpha * expm1_of_negative(z) : z);
    case Activation::celu: return z < 0.0f ? p.alpha * expm1_of_negative(z / p.alpha) : z;
    case Activation::sigmoid: return sigmoid(z);
    case Activation::tanh: return tanh(z);
    case Activation::silu: return z / (1.0f + exp(-z));
    case Activation::gelu: return z * normal_cdf(z);
    case Activation::gelu_tanh: return z / (1.0f + exp(-2.0f * gelu_u(z)));
    case Activation::mish: return z * MishFactor(z).tanh;
    case Activation::softplus: {
      const Floats positive = z < 0.0f ? Floats{} : z;
      return positive + log1p_up_to_1(exp(z < 0.0f ? z : -z));
    }
    case Activation::relu_squared: {
      const Floats positive = z <= 0.0f ? Floats{} : z;
      return positive * positive;
    }
  }
}

// g·activation'(z)
template <Activation activation>
Floats pulled_back(Floats g, Floats z, const Parameters& p) {
  switch (activation) {
    case Activation::none: return g;
    case Activation::relu: return z > 0.0f ? g : Floats{};
    case Activation::piecewise_linear: return piecewise_gradient(p.pieces, p.pieces.bounds, g, z);
    case Activation::piecewise_gate:
      return g * piecewise(p.pieces, z) + piecewise_gradient(p.pieces, p.pieces.bounds, g * z, z);
    case Activation::elu: return z > 0.0f ? g : g * (p.alpha * exp(z));
    case Activation::selu: return kSeluScale * (z > 0.0f ? g : g * (kSeluAlpha * exp(z)));
    case Activation::celu: return z > 0.0f ? g : g * exp(z / p.alpha);
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
    case Activation::softplus: return g * sigmoid(z);
    case Activation::relu_squared: return z > 0.0f ? 2.0f * z * g : Floats{};
  }
}

// The same from y = activation(z), for those that y determines.
template <Activation activation>
Floats pulled_back_by_value(Floats g, Floats y, const Parameters& p) {
  switch (activation) {
    case Activation::none: return g;
    case Activation::relu: return y > 0.0f ? g : Floats{};
    case Activation::piecewise_linear: return piecewise_gradient(p.pieces, p.pieces.ends, g, y);
    case Activation::elu: return y > 0.0f ? g : g * (y + p.alpha);
    case Activation::selu: return y > 0.0f ? kSeluScale * g : g * (y + kSeluScale * kSeluAlpha);
    case Activation::celu: return y > 0.0f ? g : g * (y / p.alpha + 1.0f);
    case Activation::sigmoid: return g * (y * (1.0f - y));
    case Activation::tanh: return g * (1.0f - y * y);
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
    if (args.by_value) return round_to<T>(pulled_back_by_value<activation>(dy, told, args.parameters));
  }
  return round_to<T>(pulled_back<activation>(dy, told, args.parameters));
}

// f(Constant<activation>)
template <class F>
void with_activation(Activation activation, F f) {
#define JAXFUSE_ROW(name, numbers, told_by) \
  case Activation::name: return f(Constant<Activation::name>{});
  switch (activation) { JAXFUSE_ACTIVATIONS(JAXFUSE_ROW) }
#undef JAXFUSE_ROW
}

}  // namespace
}  // namespace jaxfuse
