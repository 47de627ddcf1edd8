// The activations and their derivatives on vectors.
#pragma once

#include "activation.h"
#include "simd_math.h"

namespace jaxfuse {
namespace {

namespace formulas {
using N = Floats;
#define FUNCTION inline
#include "activation_math.h"
#undef FUNCTION
#define FUNCTION [[gnu::always_inline]] inline
#include "activation_formulas.h"
#undef FUNCTION
}  // namespace formulas
using formulas::is_gate;

template <Activation activation>
Floats activated(Floats z, const Parameters& p) {
  return formulas::Formulas<activation>::value(z, p);
}

// g·activation'(z)
template <Activation activation>
Floats pulled_back(Floats g, Floats z, const Parameters& p) {
  return formulas::Formulas<activation>::pullback(g, z, p);
}

// The same from y = activation(z), for those that y determines.
template <Activation activation>
Floats pulled_back_by_value(Floats g, Floats y, const Parameters& p) {
  return formulas::Formulas<activation>::pullback_from_y(g, y, p);
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
#define JAXFUSE_ROW(name, ...) \
  case Activation::name: return f(Constant<Activation::name>{});
  switch (activation) { JAXFUSE_ACTIVATIONS(JAXFUSE_ROW) }
#undef JAXFUSE_ROW
}

}  // namespace
}  // namespace jaxfuse
