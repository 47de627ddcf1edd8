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
Floats pulled_back_from_y(Floats g, Floats y, const Parameters& p) {
  return formulas::Formulas<activation>::pullback_from_y(g, y, p);
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
