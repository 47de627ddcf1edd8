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

// ---- many numbers at once, in the L1 cache
//
// One function for each activation: written into every loop that ends in one, the formulas were half of these loops' code.

using Activate = void (*)(float* z, int64_t n, const Parameters&);                  // z becomes activation(z)
using PullBack = void (*)(float* z, const float* g, int64_t n, const Parameters&);  // z, or y, becomes g·activation'

// z becomes f(z, g) by vectors. The last one, if it is not whole, goes through memory of our own: so the formula is compiled once.
template <class F>
void replace(float* z, const float* g, int64_t n, F f) {
  float last_z[kLanes], last_g[kLanes];
  const int64_t whole = n / kLanes * kLanes;
  const First rest{n - whole};
  if (rest.n) store(last_z, load(z + whole, rest)), store(last_g, load(g + whole, rest));
  float* at = whole ? z : last_z;
  const float* with = whole ? g : last_g;
  for (int64_t count = whole ? whole : rest.n;; count = rest.n, at = last_z, with = last_g) {
    for (int64_t i = 0; i < count; i += kLanes) store(at + i, f(load(at + i), load(with + i)));
    if (at == last_z || !rest.n) break;
  }
  if (rest.n) store(z + whole, load(last_z), rest);
}

template <Activation activation>
void activate(float* z, int64_t n, const Parameters& given) {
  const Parameters p = given;  // of our own: no store changes it
  replace(z, z, n, [&](Floats v, Floats) { return activated<activation>(v, p); });
}

template <Activation activation>
void pull_back(float* z, const float* g, int64_t n, const Parameters& given) {
  const Parameters p = given;
  replace(z, g, n, [&](Floats v, Floats g) { return pulled_back<activation>(g, v, p); });
}

template <Activation activation>
void pull_back_from_y(float* y, const float* g, int64_t n, const Parameters& given) {
  const Parameters p = given;
  if constexpr (has_derivative_from_y(activation)) {  // others are refused where the attribute is read, in activation_attr.cc
    replace(y, g, n, [&](Floats v, Floats g) { return pulled_back_from_y<activation>(g, v, p); });
  }
}

#define JAXFUSE_ROW(name, ...) activate<Activation::name>,
constexpr Activate kActivate[] = {JAXFUSE_ACTIVATIONS(JAXFUSE_ROW)};
#undef JAXFUSE_ROW
#define JAXFUSE_ROW(name, ...) pull_back<Activation::name>,
constexpr PullBack kPullBack[] = {JAXFUSE_ACTIVATIONS(JAXFUSE_ROW)};
#undef JAXFUSE_ROW
#define JAXFUSE_ROW(name, ...) pull_back_from_y<Activation::name>,
constexpr PullBack kPullBackFromY[] = {JAXFUSE_ACTIVATIONS(JAXFUSE_ROW)};
#undef JAXFUSE_ROW

inline Activate activate_by(Activation activation) { return kActivate[int(activation)]; }
inline PullBack pull_back_by(Activation activation, bool from_y = false) { return (from_y ? kPullBackFromY : kPullBack)[int(activation)]; }

// ---- a few vectors at a time, for loops that do more than that
//
// put(i, y) for the vectors z(i), i < n; of a gradient put(i, g(i)·activation'), from z(i) or, of from_y, from y. kMost: how many of
// neighbouring vectors are best taken together.

template <Activation activation>
struct InLine {
  static constexpr int64_t kMost = 1;
  static constexpr bool kIsGate = is_gate(activation);
  const Parameters p;

  Ints passes(Floats z) const { return pulled_back<activation>(Floats{} + 1.0f, z, p) == 1.0f; }  // where the derivative is 1

  template <class Z, class Put>
  void operator()(int64_t n, Z z, Put put) const {
    for (int64_t i = 0; i < n; ++i) put(i, activated<activation>(z(i), p));
  }
};

struct Called {
  static constexpr int64_t kMost = 8;
  static constexpr bool kIsGate = false;
  const Activate activate;
  const Parameters& p;

  template <class Z, class Put>
  void operator()(int64_t n, Z z, Put put) const {
    alignas(64) float values[kMost * kLanes];
    for (int64_t i = 0; i < n; ++i) store(values + i * kLanes, z(i));
    activate(values, n * kLanes, p);
    for (int64_t i = 0; i < n; ++i) put(i, load(values + i * kLanes));
  }
};

template <Activation activation>
struct GradientInLine {
  static constexpr int64_t kMost = 1;
  static constexpr bool kIsGate = is_gate(activation), kIsIdentity = activation == Activation::none;
  const Parameters p;
  const bool from_y;

  template <class G, class Z, class Put>
  void operator()(int64_t n, G g, Z z, Put put) const {
    for (int64_t i = 0; i < n; ++i) {
      if constexpr (kIsIdentity) {
        put(i, g(i));
      } else {
        put(i, from_y ? pulled_back_from_y<activation>(g(i), z(i), p) : pulled_back<activation>(g(i), z(i), p));
      }
    }
  }
};

struct GradientCalled {
  static constexpr int64_t kMost = 8;
  static constexpr bool kIsGate = false, kIsIdentity = false;
  const PullBack pull_back;
  const Parameters& p;

  template <class G, class Z, class Put>
  void operator()(int64_t n, G g, Z z, Put put) const {
    alignas(64) float values[kMost * kLanes], given[kMost * kLanes];
    for (int64_t i = 0; i < n; ++i) store(given + i * kLanes, g(i)), store(values + i * kLanes, z(i));
    pull_back(values, given, n * kLanes, p);
    for (int64_t i = 0; i < n; ++i) put(i, load(values + i * kLanes));
  }
};

// in_line(Constant<activation>) for one that takes an instruction or two, called() for any other.
template <class InLineF, class CalledF>
void in_line_or_called(Activation activation, InLineF in_line, CalledF called) {
  if (activation == Activation::none) return in_line(Constant<Activation::none>{});
  if (activation == Activation::relu) return in_line(Constant<Activation::relu>{});
  if (activation == Activation::piecewise_linear) return in_line(Constant<Activation::piecewise_linear>{});
  called();
}

// f(one of these)
template <class F>
void with_activation(Activation activation, const Parameters& p, F f) {
  in_line_or_called(activation, [&](auto which) { f(InLine<which.value>{p}); }, [&] { f(Called{activate_by(activation), p}); });
}
template <class F>
void with_gradient(Activation activation, bool from_y, const Parameters& p, F f) {
  in_line_or_called(
      activation, [&](auto which) { f(GradientInLine<which.value>{p, from_y}); },
      [&] { f(GradientCalled{pull_back_by(activation, from_y), p}); });
}

// f(index, n, lanes) for [begin, end) in n vectors at a time, n <= most.
template <int64_t most, class F>
void for_groups(int64_t begin, int64_t end, F f) {
  if constexpr (most == 1) return for_vectors(begin, end, [&](int64_t i, auto lanes) { f(i, int64_t{1}, lanes); });
  int64_t i = begin;
  for (int64_t whole = (end - begin) / kLanes; whole > 0;) {
    const int64_t n = whole < most ? whole : most;
    f(i, n, Whole{});
    whole -= n, i += n * kLanes;
  }
  if (i < end) f(i, int64_t{1}, First{end - i});
}

}  // namespace
}  // namespace jaxfuse
