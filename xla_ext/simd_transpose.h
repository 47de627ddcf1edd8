// A square of as many vectors as a vector has lanes, turned. Include only from the loops of an ISA.
#pragma once

#include "simd.h"

namespace jaxfuse {
namespace {

// Rows for columns.
inline void transpose(Floats (&v)[kLanes]) {
#if defined(__AVX512F__)
  __m512 pairs[kLanes], fours[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = _mm512_maskz_unpacklo_ps(0xffff, v[i], v[i + 1]), pairs[i + 1] = _mm512_maskz_unpackhi_ps(0xffff, v[i], v[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i += 4) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm512_maskz_shuffle_ps(0xffff, pairs[i + j], pairs[i + 2 + j], 0x44);
      fours[i + 2 * j + 1] = _mm512_maskz_shuffle_ps(0xffff, pairs[i + j], pairs[i + 2 + j], 0xee);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // of quarters 0 and 2, and of 1 and 3
    const __m512 even_low = _mm512_maskz_shuffle_f32x4(0xffff, fours[i], fours[i + 4], 0x88),
                 even_high = _mm512_maskz_shuffle_f32x4(0xffff, fours[i + 8], fours[i + 12], 0x88),
                 odd_low = _mm512_maskz_shuffle_f32x4(0xffff, fours[i], fours[i + 4], 0xdd),
                 odd_high = _mm512_maskz_shuffle_f32x4(0xffff, fours[i + 8], fours[i + 12], 0xdd);
    v[i] = _mm512_maskz_shuffle_f32x4(0xffff, even_low, even_high, 0x88);
    v[i + 4] = _mm512_maskz_shuffle_f32x4(0xffff, odd_low, odd_high, 0x88);
    v[i + 8] = _mm512_maskz_shuffle_f32x4(0xffff, even_low, even_high, 0xdd);
    v[i + 12] = _mm512_maskz_shuffle_f32x4(0xffff, odd_low, odd_high, 0xdd);
  }
#elif defined(__AVX2__)
  __m256 pairs[kLanes], fours[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(v[i], v[i + 1]), pairs[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 4) {
#pragma GCC unroll 8
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0xee);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    v[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
#else
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < i; ++j) {
      const float other = v[i][j];
      v[i][j] = v[j][i];
      v[j][i] = other;
    }
  }
#endif
}

}  // namespace
}  // namespace jaxfuse
