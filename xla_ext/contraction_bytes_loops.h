// Bytes for contraction_loops.h: products of u8 (of x) and s8 (of a filter), four to a step, whose sums are exact in s32; what makes
// bytes of x, and floats of the sums.
#pragma once

#include "contraction_kernels.h"
#include "simd.h"

namespace jaxfuse::contraction {
namespace {

using Shorts = int16_t __attribute__((vector_size(kLanes * 4)));
using Ushorts = uint16_t __attribute__((vector_size(kLanes * 4)));

// Σ of the products of neighbouring s16, in s32; and of u8 and s8, in s16, the nearest that it holds.
#if defined(__AVX512F__)
inline Ints add_pairs(Shorts a, Shorts b) { return Ints(_mm512_madd_epi16(__m512i(a), __m512i(b))); }
inline Shorts add_pairs_saturating(Uints a, Uints b) { return Shorts(_mm512_maddubs_epi16(__m512i(a), __m512i(b))); }
#elif defined(__AVX2__)
inline Ints add_pairs(Shorts a, Shorts b) { return Ints(_mm256_madd_epi16(__m256i(a), __m256i(b))); }
inline Shorts add_pairs_saturating(Uints a, Uints b) { return Shorts(_mm256_maddubs_epi16(__m256i(a), __m256i(b))); }
#endif

// sum + Σ of the four products of u8 and s8 in each lane: the same numbers by every instruction set. `small`: no byte of b is beyond
// ±64. Then two products are 2·255·64 = 32640 at most, which s16 holds. Two of others may be 2·255·127 = 64770, so even and odd bytes
// are widened to s16.
template <bool small>
Ints dot4(Ints sum, Uints a, Uints b) {
#if defined(__AVX512VNNI__)
  return Ints(_mm512_dpbusd_epi32(__m512i(sum), __m512i(a), __m512i(b)));
#elif defined(__AVXVNNI__)
  return Ints(_mm256_dpbusd_avx_epi32(__m256i(sum), __m256i(a), __m256i(b)));
#elif defined(__AVX2__)
  if constexpr (small) return sum + add_pairs(add_pairs_saturating(a, b), Shorts{} + int16_t(1));
  const Shorts even = Shorts(Ushorts(b) << 8) >> 8, odd = Shorts(b) >> 8;
  return sum + add_pairs(Shorts(a & 0x00ff00ff), even) + add_pairs(Shorts(Ushorts(a) >> 8), odd);
#else
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) sum += Ints(a >> (8 * i) & 0xff) * (Ints(b << (24 - 8 * i)) >> 24);
  return sum;
#endif
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)
constexpr bool kSaturates = false;
#else
constexpr bool kSaturates = true;
#endif

// A step of four bytes, in the lanes of a vector of floats.
template <bool small>
struct OfBytes {
  static constexpr int64_t kElements = 4;
  static constexpr bool kIsExact = true;

  static Floats load_step(const char* at) {
    uint32_t bits;
    __builtin_memcpy(&bits, at, sizeof bits);
    return Floats(Uints{} + bits);
  }
  // What lies behind a row meets zeros.
  static Floats load_last(const char* at) { return load_step(at); }
  static Floats multiply_add(Floats a, Floats b, Floats sum) { return Floats(dot4<small>(Ints(sum), Uints(a), Uints(b))); }
  static Floats add(Floats a, Floats b) { return Floats(Ints(a) + Ints(b)); }
};

// ---- bytes of numbers, and numbers of sums

// All of v are 0 to 255. GCC makes a loop over the lanes of __builtin_convertvector.
inline void store_bytes(uint8_t* to, Ints v, Whole) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(0xffff, __m512i(v)));
#elif defined(__AVX2__)
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(__m256i(v)), _mm256_extracti128_si256(__m256i(v), 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
#else
  using Bytes = uint8_t __attribute__((vector_size(kLanes)));
  store_bits(to, __builtin_convertvector(v, Bytes));
#endif
}
inline void store_bytes(uint8_t* to, Ints v, First lanes) {
  for (int64_t i = 0; i < lanes.n; ++i) to[i] = uint8_t(v[i]);
}

// x/step + zero, to the nearest of 0 to 255, ties to even; a NaN counts as 0. In f32 a number below 2²² and 1.5·2²³ add up to that
// integer in the last bits.
template <class T>
void quantise(const void* x, int64_t count, float step, int32_t zero, uint8_t* to) {
  const float inverse = 1 / step, low = -float(zero), high = float(255 - zero), integers = 0x1.8p23f;
  for_vectors(0, count, [&](int64_t i, auto lanes) {
    const Floats v = load(static_cast<const T*>(x) + i, lanes) * inverse;
    const Floats within = at_most(high, at_least(low, v == v ? v : Floats{}));
    store_bytes(to + i, Ints(within + integers) - Ints(Floats{} + integers) + zero, lanes);
  });
}

// Rows of sums of s32, and an offset for each column, as f32 in their place.
inline void to_floats(float* sums, int64_t rows, int64_t stride, int64_t columns, const int32_t* offsets) {
  for_vectors(0, columns, [&](int64_t c, auto lanes) {
    const Ints offset = Ints(load(reinterpret_cast<const float*>(offsets) + c, lanes));
    for (int64_t row = 0; row < rows; ++row) {
      float* const at = sums + row * stride + c;
      store(at, __builtin_convertvector(Ints(load(at, lanes)) + offset, Floats), lanes);
    }
  });
}

}  // namespace
}  // namespace jaxfuse::contraction
