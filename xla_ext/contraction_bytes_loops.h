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

// sum + Σ of the four products of u8 and s8 in each lane: the same numbers by every instruction set. Two products are 255·128 = 32640 at
// most where b is narrow (contraction_kernels.h), which s16 holds. Else they may be 2·255·127 = 64770, so even and odd bytes are widened
// to s16.
template <bool narrow>
Ints dot4(Ints sum, Uints a, Uints b) {
#if defined(__AVX512VNNI__)
  return Ints(_mm512_dpbusd_epi32(__m512i(sum), __m512i(a), __m512i(b)));
#elif defined(__AVXVNNI__)
  return Ints(_mm256_dpbusd_avx_epi32(__m256i(sum), __m256i(a), __m256i(b)));
#elif defined(__AVX2__)
  if constexpr (narrow) return sum + add_pairs(add_pairs_saturating(a, b), Shorts{} + int16_t(1));
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
template <bool narrow>
struct OfBytes {
  static constexpr int64_t kElements = 4, kTogether = narrow && kSaturates ? 2 : 1;
  static constexpr bool kIsExact = true, kIsOneInstruction = false;

  static Floats load_step(const char* at) {
    uint32_t bits;
    __builtin_memcpy(&bits, at, sizeof bits);
    return Floats(Uints{} + bits);
  }
  // What lies behind a row meets zeros.
  static Floats load_last(const char* at) { return load_step(at); }
  static Floats multiply_add(Floats a, Floats b, Floats sum) { return Floats(dot4<narrow>(Ints(sum), Uints(a), Uints(b))); }
#if defined(__AVX2__)
  // Of two steps: four products in s16.
  static Floats multiply_add(Floats a, Floats b, Floats c, Floats d, Floats sum) {
    const Shorts four = add_pairs_saturating(Uints(a), Uints(b)) + add_pairs_saturating(Uints(c), Uints(d));
    return Floats(Ints(sum) + add_pairs(four, Shorts{} + int16_t(1)));
  }
#endif
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

#if defined(__AVX2__) && !defined(__AVX512F__)
// The same of four vectors at once: instructions that narrow integers keep them within 0 to 255.
template <class T>
int64_t quantise_fours(const T* x, int64_t count, float inverse, int32_t zero, uint8_t* to) {
  const float high = float(255 - zero);
  const __m256i zeros = _mm256_set1_epi16(int16_t(zero)), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const auto integers = [&](int64_t i) {
    const Floats v = load(x + i) * inverse;
    return _mm256_cvtps_epi32(__m256(at_most(high, v == v ? v : Floats{})));
  };
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    const __m256i low = _mm256_adds_epi16(_mm256_packs_epi32(integers(i), integers(i + kLanes)), zeros);
    const __m256i behind = _mm256_adds_epi16(_mm256_packs_epi32(integers(i + 2 * kLanes), integers(i + 3 * kLanes)), zeros);
    store_bits(to + i, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, behind), order));
  }
  return i;
}
#endif

// x/step + zero, to the nearest of 0 to 255, ties to even; a NaN counts as 0. In f32 a number below 2²² and 1.5·2²³ add up to that
// integer in the last bits.
template <class T>
void quantise(const void* x, int64_t count, float step, int32_t zero, uint8_t* to) {
  const float inverse = 1 / step, low = -float(zero), high = float(255 - zero), integers = 0x1.8p23f;
  int64_t begin = 0;
#if defined(__AVX2__) && !defined(__AVX512F__)
  begin = quantise_fours(static_cast<const T*>(x), count, inverse, zero, to);
#endif
  for_vectors(begin, count, [&](int64_t i, auto lanes) {
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
