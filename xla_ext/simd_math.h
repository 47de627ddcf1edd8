// exp and its relatives on vectors, within a few units in the last place. NaN stays NaN, Inf and underflow come out as
// the functions' own limits. The polynomials are minimax fits made for this file: a is the coefficient of x⁰.
#pragma once

#include "simd.h"

namespace jaxfuse {
namespace {

template <int n>
Floats polynomial(const float (&a)[n], Floats x) {
  Floats sum = Floats{} + a[n - 1];
#pragma GCC unroll 16
  for (int i = n - 2; i >= 0; --i) sum = multiply_add(sum, x, Floats{} + a[i]);
  return sum;
}

inline Floats absolute(Floats x) { return Floats(Ints(x) & 0x7fffffff); }
inline Floats power_of_2(Ints n) { return Floats((n + 127) << 23); }

// e^x = 2^n·(1 + m), |m| < 0.42. The low bits of `shifted` are n.
struct ReducedExp {
  Floats shifted, m;

  explicit ReducedExp(Floats x) {
    constexpr float kRounder = 12582912.0f;  // 1.5·2²³: what is added to it is rounded to an integer, the low bits
    shifted = multiply_add(x, Floats{} + 1.44269504f, Floats{} + kRounder);
    const Floats n = shifted - kRounder;
    // ln 2 in two parts: n times the first is exact
    const Floats r = multiply_add(n, Floats{} - 1.42860677e-6f, multiply_add(n, Floats{} - 0.693145752f, x));
    constexpr float a[] = {0.500000006f, 0.166665425f, 0.0416662806f, 0.00836664395f, 0.00139465545f};
    m = multiply_add(r * r, polynomial(a, r), r);  // e^r - 1
  }
};

// The power comes as two factors, for it may leave the range of f32 where e^x does not.
struct SplitExp {
  Floats low, high, m;

  explicit SplitExp(Floats x) {
    const ReducedExp e(at_most(90.0f, at_least(-106.0f, x)));
    m = e.m;
    const Ints exponent = Ints(e.shifted) - 0x4b400000;
    const Ints half = exponent >> 1;
    low = power_of_2(half);
    high = power_of_2(exponent - half);
  }
};

inline Floats exp(Floats x) {
  const SplitExp e(x);
  return (1.0f + e.m) * e.low * e.high;
}

// e^x - 1 for x <= 0, where no power of 2 is out of range.
inline Floats expm1_of_negative(Floats x) {
  const SplitExp e(x);
  const Floats scale = e.low * e.high;
  return scale * e.m + (scale - 1.0f);
}

// 1/(1 + e^-x). Within these limits the power is one factor; beyond them the quotient is 1, or a denormal, which is flushed.
inline Floats sigmoid(Floats x) {
  const ReducedExp e(at_most(88.0f, at_least(-87.0f, -x)));
  const Floats power = Floats((Ints(e.shifted) << 23) + 0x3f800000);
  return 1.0f / (1.0f + multiply_add(power, e.m, power));
}

inline Floats tanh(Floats x) {
  const Floats e = expm1_of_negative(-2.0f * absolute(x));
  const Ints magnitude = Ints(absolute(e / (e + 2.0f)));
  return Floats(magnitude | (Ints(x) & INT32_MIN));  // x's sign, for a zero too
}

// log(1 + x) for x in [0, 1]: above √2 - 1, log 2 + log(1 + (x - 1)/2).
inline Floats log1p_up_to_1(Floats x) {
  constexpr float a[] = {0.333333170f,  -0.250008120f, 0.200022970f,  -0.166245020f,
                         0.141809080f, -0.131290110f, 0.128838220f, -0.0786162300f};
  const Ints high = x > 0.414213562f;
  const Floats v = high ? 0.5f * (x - 1.0f) : x;
  const Floats log = v - v * v * (0.5f - v * polynomial(a, v));
  return high ? log + 0.693147181f : log;
}

// The normal distribution function. For x <= 0 it is e^(-x²/2)·t·P(t), t = 1/(1 + 0.3·|x|).
inline Floats normal_cdf(Floats x) {
  constexpr float a[] = {0.119686690f,   0.119571809f,  0.110235468f,   0.0783894445f, 0.0961574376f,
                         -0.0794246354f, 0.191785926f,  -0.228214651f, 0.112436062f,  -0.0206235520f};
  const Floats t = 1.0f / (1.0f + 0.3f * absolute(x));
  const Floats below = exp(-0.5f * x * x) * t * polynomial(a, t);
  return x > 0.0f ? 1.0f - below : below;
}

}  // namespace
}  // namespace jaxfuse
