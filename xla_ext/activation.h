// The activations that kernels know.
#pragma once

#include "activation_rows.h"  // made of the table in jaxfuse/ops/activations.py

namespace jaxfuse {

#define JAXFUSE_ROW(name, ...) name,
enum class Activation { JAXFUSE_ACTIVATIONS(JAXFUSE_ROW) };
#undef JAXFUSE_ROW

// Whether the derivative can be a function of y; of a piecewise linear one its parameters say whether it is.
constexpr bool has_derivative_from_y(Activation activation) {
  enum class From { y, z };
  constexpr From table[] = {
#define JAXFUSE_ROW(name, count, derivative_from, ...) From::derivative_from,
      JAXFUSE_ACTIVATIONS(JAXFUSE_ROW)
#undef JAXFUSE_ROW
  };
  return table[int(activation)] == From::y;
}

// slope·(z - center) + offset, a slope and an offset each below the first bound, between the bounds, above the second; a slope of
// 0 gives the offset, of an infinite z too. piecewise_gate is z times that.
struct Piecewise {
  float center, bounds[2], slopes[3], offsets[3];
  float at_bounds[2];       // the derivative there
  float inward[2];          // whether the value there is the middle piece's: it decides on the sign of a zero
  float at_nan, slope_at_nan;
  float ends[2];  // the values at the bounds
  bool clips;     // between the bounds the value is z itself, with its sign and if it is a NaN, and beyond them and there constant
};

// Of one activation: alpha of elu and celu, or what is piecewise linear.
struct Parameters {
  float alpha;
  Piecewise pieces;
};

}  // namespace jaxfuse
