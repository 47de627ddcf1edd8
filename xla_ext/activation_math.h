// What the formulas of activations are made of, for a number N: Floats or float. Included, as the formulas themselves, in a
// namespace that has N, FUNCTION (what stands before a function) and N's own exp, sigmoid, expm1_of_negative, log1p_up_to_1, tanh,
// normal_cdf, absolute and broadcast. Not for templates: those would be shared between instruction sets.

constexpr float kSeluScale = 1.05070099f, kSeluAlpha = 1.67326324f;

FUNCTION N gelu_u(N z) { return 0.797884561f * (z + 0.044715f * z * z * z); }

// tanh(softplus(z)) = n/(n + 2) with n = e^z·(e^z + 2), and 1 less that, which cancels nothing.
struct MishFactor {
  N tanh, rest;

  FUNCTION explicit MishFactor(N z) {
    const N e = exp(-absolute(z)), n = z > 0.0f ? 1.0f + 2.0f * e : e * (e + 2.0f);
    const N two = z > 0.0f ? 2.0f * e * e : N{} + 2.0f;  // both sides times e^(-2z) where that is small
    tanh = n / (n + two);
    rest = two / (n + two);
  }
};

// One piece of a piecewise linear function, continued to all z.
FUNCTION N line(const Piecewise& f, int piece, N z) {
  if (f.slopes[piece] == 0.0f) return broadcast(f.offsets[piece]);
  return f.slopes[piece] * (z - f.center) + f.offsets[piece];
}

FUNCTION N piecewise(const Piecewise& f, N z) {
#ifndef __CUDACC__  // there its registers cost more than it saves
  if (f.clips) {  // as relu6, in half of the time that the rest takes
    const N y = z <= f.bounds[0] ? broadcast(f.offsets[0]) : z;
    return z >= f.bounds[1] ? broadcast(f.offsets[2]) : y;
  }
#endif
  const auto below = f.inward[0] ? z < f.bounds[0] : z <= f.bounds[0], above = f.inward[1] ? z > f.bounds[1] : z >= f.bounds[1];
  N y = line(f, 1, z);
  y = below ? line(f, 0, z) : y;
  y = above ? line(f, 2, z) : y;
  return z == z ? y : broadcast(f.at_nan);
}

// The derivative at x; `bounds` are those of x, or, where x is the value, its ends.
FUNCTION N slope_at(const Piecewise& f, const float (&bounds)[2], N x) {
  N slope = x < bounds[0] ? broadcast(f.slopes[0]) : broadcast(f.slopes[1]);
  slope = x > bounds[1] ? broadcast(f.slopes[2]) : slope;
  slope = x == bounds[0] ? broadcast(f.at_bounds[0]) : slope;
  slope = x == bounds[1] ? broadcast(f.at_bounds[1]) : slope;
  return x == x ? slope : broadcast(f.slope_at_nan);
}

FUNCTION N piecewise_gradient(const Piecewise& f, const float (&bounds)[2], N g, N x) {
  const N slope = slope_at(f, bounds, x);
  return slope == 0.0f ? N{} : g * slope;
}

// Whether the derivative jumps, perhaps from 0 to 1: it is computed from z as rounded to x's dtype, so that a mask, y and what is
// recomputed agree.
FUNCTION constexpr bool is_gate(Activation activation) {
  return activation == Activation::relu || activation == Activation::piecewise_linear;
}
