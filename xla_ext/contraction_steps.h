// Steps as the panels have them: a number of f32, or the bits of a pair of bf16, of which the first is the lower half. Include only from
// the loops of an ISA.
#pragma once

#include "simd.h"

namespace jaxfuse::contraction {
namespace {

struct OfFloats {
  static constexpr int64_t kElements = 1, kTogether = 1;
  static constexpr bool kIsExact = false;  // exact sums are s32
  static constexpr bool kIsOneInstruction = true;

  static Floats join(Floats value, Floats) { return value; }
  static Floats load_step(const char* at) { return broadcast(*reinterpret_cast<const float*>(at)); }
  static Floats load_last(const char* at) { return load_step(at); }
  static Floats multiply_add(Floats a, Floats b, Floats sum) { return jaxfuse::multiply_add(a, b, sum); }
  static Floats add(Floats a, Floats b) { return a + b; }
};

struct OfPairs {
  static constexpr int64_t kElements = 2, kTogether = 1;
  static constexpr bool kIsExact = false;
#ifdef __AVX512BF16__
  static constexpr bool kIsOneInstruction = true;
#else
  static constexpr bool kIsOneInstruction = false;
#endif

  static Floats join(Floats even, Floats odd) {
#ifdef __AVX512BF16__
    const Halves order[] = {{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}};
    return Floats(_mm512_permutexvar_epi16(load_bits<__m512i>(order), __m512i(_mm512_cvtne2ps_pbh(odd, even))));
#else
    return Floats((Uints(round_to<bf16>(even)) >> 16) | Uints(round_to<bf16>(odd)));
#endif
  }

  static Floats load_step(const char* at) {
    uint32_t bits;
    __builtin_memcpy(&bits, at, sizeof bits);
    return Floats(Uints{} + bits);
  }
  static Floats load_last(const char* at) {
    uint16_t bits;
    __builtin_memcpy(&bits, at, sizeof bits);
    return Floats(Uints{} + bits);
  }

  static Floats multiply_add(Floats a, Floats b, Floats sum) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, __m512bh(a), __m512bh(b));
#else
    const Floats even = jaxfuse::multiply_add(Floats(Uints(a) << 16), Floats(Uints(b) << 16), sum);
    return jaxfuse::multiply_add(Floats(Uints(a) & 0xffff0000), Floats(Uints(b) & 0xffff0000), even);
#endif
  }
  static Floats add(Floats a, Floats b) { return a + b; }
};

// total[i][j] += a(i)·b(j). What there is less of waits in registers for the other.
template <class Step, int64_t rows, int64_t vectors, class A, class B>
[[gnu::always_inline]] inline void multiply_step(Floats (&total)[rows][vectors], A a, B b) {
  if constexpr (rows < vectors) {
    Floats factors[rows];
#pragma GCC unroll 16
    for (int64_t i = 0; i < rows; ++i) factors[i] = a(i);
#pragma GCC unroll 4
    for (int64_t j = 0; j < vectors; ++j) {
      const Floats columns = b(j);
#pragma GCC unroll 16
      for (int64_t i = 0; i < rows; ++i) total[i][j] = Step::multiply_add(factors[i], columns, total[i][j]);
    }
  } else {
    Floats columns[vectors];
#pragma GCC unroll 4
    for (int64_t j = 0; j < vectors; ++j) columns[j] = b(j);
#pragma GCC unroll 16
    for (int64_t i = 0; i < rows; ++i) {
      const Floats factor = a(i);
#pragma GCC unroll 4
      for (int64_t j = 0; j < vectors; ++j) total[i][j] = Step::multiply_add(factor, columns[j], total[i][j]);
    }
  }
}

// The same of two steps, whose products a processor adds before they are as wide as a sum: of step s factors a(s, i) and columns b(s, j).
template <class Step, int64_t rows, int64_t vectors, class A, class B>
[[gnu::always_inline]] inline void multiply_two(Floats (&total)[rows][vectors], A a, B b) {
  Floats columns[2][vectors];
#pragma GCC unroll 4
  for (int64_t j = 0; j < vectors; ++j) columns[0][j] = b(0, j), columns[1][j] = b(1, j);
#pragma GCC unroll 16
  for (int64_t i = 0; i < rows; ++i) {
    const Floats first = a(0, i), second = a(1, i);
#pragma GCC unroll 4
    for (int64_t j = 0; j < vectors; ++j) total[i][j] = Step::multiply_add(first, columns[0][j], second, columns[1][j], total[i][j]);
  }
}

// f(s), or for two steps at once f_two(s), for s from `begin` to `end`: where they are `count`, as they mostly are, with few instructions
// beside those of f. A processor that computes for another program at the same time decodes half as many, and with AVX2 that is hardly
// more than f has.
template <class Step, int64_t count, class F, class Two>
[[gnu::always_inline]] inline void for_steps(int64_t begin, int64_t end, F f, Two f_two) {
  int64_t s = begin;
  if (count > 1 && kLanes == 8 && end - begin == count) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < count; i += Step::kTogether) Step::kTogether == 2 ? f_two(begin + i) : f(begin + i);
    return;
  }
  if constexpr (Step::kTogether == 2) {
    for (; s + 1 < end; s += 2) f_two(s);
  }
  for (; s < end; ++s) f(s);
}

}  // namespace
}  // namespace jaxfuse::contraction
