// Vectors of f32 for kernel files that are compiled once per ISA: `Floats`, kLanes wide, loaded from and stored to f32 or
// bf16. Arithmetic is the compiler's own on vector types (+ - * and ?: with a comparison), each operation rounded once,
// so every ISA gives the same bits; only multiply_add, and what simd_math.h makes of it, does not.
//
// Include only from x_loops.h files. All is in an anonymous namespace, and these files include no header with inline
// functions: the linker would keep one copy for all, perhaps one with instructions that this CPU lacks.
#pragma once

#include <cstdint>

#include "element.h"
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jaxfuse {
namespace {

#if defined(__AVX512F__) || defined(JAXFUSE_EMULATE_AVX512)
constexpr int kLanes = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4;  // NEON; GCC keeps vectors of two registers in memory
#else
constexpr int kLanes = 8;  // without AVX2 the compiler makes two SSE registers of it
#endif

using Floats = float __attribute__((vector_size(kLanes * 4)));
using Ints = int32_t __attribute__((vector_size(kLanes * 4)));  // also what a comparison gives: -1 is true, 0 is false
using Uints = uint32_t __attribute__((vector_size(kLanes * 4)));
using Halves = uint16_t __attribute__((vector_size(kLanes * 2)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// x in every lane. Not Floats{} + x: the compiler must add that 0, for the sake of a -0, but drops one that is subtracted.
inline Floats broadcast(float x) { return x - Floats{}; }

// a·b + c, rounded once where the ISA has an instruction for it and twice elsewhere.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// x where it is not beyond the limit; NaN stays NaN. One instruction where GCC makes a comparison and a choice of ?:.
inline Floats at_least(float limit, Floats x) {
  const Floats low = Floats{} + limit;
#if defined(__AVX512F__)
  return _mm512_maskz_max_ps(0xffff, low, x);
#elif defined(__AVX2__)
  return _mm256_max_ps(low, x);
#else
  return low > x ? low : x;
#endif
}
inline Floats at_most(float limit, Floats x) {
  const Floats high = Floats{} + limit;
#if defined(__AVX512F__)
  return _mm512_maskz_min_ps(0xffff, high, x);
#elif defined(__AVX2__)
  return _mm256_min_ps(high, x);
#else
  return high < x ? high : x;
#endif
}

// At any address.
template <class Vector, class T>
Vector load_bits(const T* p) {
  using Unaligned [[gnu::aligned(alignof(T)), gnu::may_alias]] = Vector;
  return *reinterpret_cast<const Unaligned*>(p);
}

template <class Vector, class T>
void store_bits(T* p, Vector v) {
  using Unaligned [[gnu::aligned(alignof(T)), gnu::may_alias]] = Vector;
  *reinterpret_cast<Unaligned*>(p) = v;
}

inline Floats load(const float* p) { return load_bits<Floats>(p); }

// One instruction each where GCC takes five for __builtin_convertvector; maskz, because GCC 12 warns of the others.
inline Uints widened(Halves v) {
#if defined(__AVX512F__)
  return Uints(_mm512_maskz_cvtepu16_epi32(0xffff, __m256i(v)));
#elif defined(__AVX2__)
  return Uints(_mm256_cvtepu16_epi32(__m128i(v)));
#else
  return __builtin_convertvector(v, Uints);
#endif
}
inline Halves narrowed(Uints v) {  // no element is above 0xffff
#if defined(__AVX512F__)
  return Halves(_mm512_maskz_cvtepi32_epi16(0xffff, __m512i(v)));
#elif defined(__AVX2__)
  return Halves(_mm_packus_epi32(_mm256_castsi256_si128(__m256i(v)), _mm256_extracti128_si256(__m256i(v), 1)));
#else
  return __builtin_convertvector(v, Halves);
#endif
}
inline Floats load(const bf16* p) { return Floats(widened(load_bits<Halves>(p)) << 16); }

// f16 by one instruction where there is one (F16C comes with AVX2), elsewhere bit by bit; no step of that meets a denormal,
// which may be flushed.
inline Floats from_f16(Halves v) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xffff, __m256i(v));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(__m128i(v));
#else
  const Uints bits = __builtin_convertvector(v, Uints), magnitude = bits & 0x7fff;
  const Floats small = __builtin_convertvector(Ints(magnitude), Floats) * 0x1p-24f;
  const Uints finite = (magnitude << 13) + (112u << 23), other = (magnitude << 13) | 0x7f800000;
  const Uints large = magnitude >= 0x7c00 ? other : finite;
  return Floats((magnitude < 0x400 ? Uints(small) : large) | (bits & 0x8000) << 16);
#endif
}
inline Halves to_f16(Floats v) {
#if defined(__AVX512F__)
  return Halves(_mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  return Halves(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  const Uints bits = Uints(v), magnitude = bits & 0x7fffffff;
  const Uints small = Uints(Floats(magnitude) + 0.5f) - 0x3f000000;  // the sum's last bit is f16's
  const Uints rounded = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  const Uints beyond = magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x3ff) : Uints{} + 0x7c00;
  const Uints finite = magnitude < 0x38800000 ? small : rounded;
  return __builtin_convertvector((magnitude >= 0x477ff000 ? beyond : finite) | (bits >> 16 & 0x8000), Halves);
#endif
}
inline Floats load(const f16* p) { return from_f16(load_bits<Halves>(p)); }

// The nearest value that T holds, ties to even, NaN stays NaN.
template <class T>
Floats round_to(Floats v);
template <>
inline Floats round_to<float>(Floats v) {
  return v;
}
template <>
inline Floats round_to<bf16>(Floats v) {
  const Uints bits = Uints(v);
  const Uints rounded = bits + 0x7fff + (bits >> 16 & 1);  // would carry out of a NaN's mantissa
#if defined(__AVX512F__)  // GCC makes a vector of the comparison and a mask of that again
  const __m512i quiet = _mm512_set1_epi32(0x400000);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return Floats(Uints(_mm512_mask_or_epi32(__m512i(rounded), nan, __m512i(bits), quiet)) & 0xffff0000);
#else
  return Floats((v == v ? rounded : bits | 0x400000) & 0xffff0000);
#endif
}

template <>
inline Floats round_to<f16>(Floats v) {
  return from_f16(to_f16(v));
}

// v must be what round_to<T> gives.
inline void store(float* p, Floats v) { store_bits(p, v); }
inline void store(f16* p, Floats v) { store_bits(p, to_f16(v)); }
inline void store(bf16* p, Floats v) { store_bits(p, narrowed(Uints(v) >> 16)); }

// Which lanes a load or a store touches in memory: all, or the first n < kLanes, with zeros loaded into the others.
struct Whole {};
struct First {
  int64_t n;
};

template <class T>
Floats load(const T* p, Whole) {
  return load(p);
}
#if defined(__AVX512F__)
inline __mmask16 mask_of(First lanes) { return __mmask16((1u << lanes.n) - 1); }
inline __m256i load_halves(const void* p, First lanes) { return _mm256_maskz_loadu_epi16(mask_of(lanes), p); }
inline Floats load(const float* p, First lanes) { return _mm512_maskz_loadu_ps(mask_of(lanes), p); }
inline Floats load(const f16* p, First lanes) { return from_f16(Halves(load_halves(p, lanes))); }
inline Floats load(const bf16* p, First lanes) {
  return Floats(Uints(_mm512_maskz_cvtepu16_epi32(0xffff, load_halves(p, lanes))) << 16);
}
#else
template <class T>
Floats load(const T* p, First lanes) {
  T values[kLanes] = {};
  for (int64_t i = 0; i < lanes.n; ++i) values[i] = p[i];
  return load(values);
}
#ifdef __AVX2__
inline Ints mask_of(First lanes) { return Ints{0, 1, 2, 3, 4, 5, 6, 7} < int32_t(lanes.n); }
inline Floats load(const float* p, First lanes) { return _mm256_maskload_ps(p, __m256i(mask_of(lanes))); }
#endif
#endif

template <class T>
void store(T* p, Floats v, Whole) {
  store(p, v);
}
template <class T>
void store(T* p, Floats v, First lanes) {
  T values[kLanes];
  store(values, v);
  for (int64_t i = 0; i < lanes.n; ++i) p[i] = values[i];
}
#if defined(__AVX2__) && !defined(__AVX512F__)
inline void store(float* p, Floats v, First lanes) { _mm256_maskstore_ps(p, __m256i(mask_of(lanes)), v); }
#endif

// Stores that leave the caches alone, for what will have left them before it is read; p must be a multiple of the size of
// what is stored. finish_streaming() before another thread reads it.
inline void store_streaming(float* p, Floats v, Whole) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, v);
#else
  store(p, v);
#endif
}
template <class Half>
void stream_halves(Half* p, Halves halves) {
#if defined(__AVX512F__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), __m256i(halves));
#elif defined(__AVX2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), __m128i(halves));
#else
  store_bits(p, halves);
#endif
}
inline void store_streaming(bf16* p, Floats v, Whole) { stream_halves(p, narrowed(Uints(v) >> 16)); }
inline void store_streaming(f16* p, Floats v, Whole) { stream_halves(p, to_f16(v)); }
template <class T>
void store_streaming(T* p, Floats v, First lanes) {
  store(p, v, lanes);
}

inline void finish_streaming() {
#ifdef __AVX2__
  _mm_sfence();
#endif
}

// The lanes that are touched, zero in the others.
inline Floats only(Floats v, Whole) { return v; }
inline Floats only(Floats v, First lanes) {
  for (int64_t i = lanes.n; i < kLanes; ++i) v[i] = 0;
  return v;
}

// By halves: four additions one after the other in place of sixteen.
inline float total(Floats v) {
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, v, 0), _mm512_maskz_extractf32x8_ps(0xff, v, 1));
#elif defined(__AVX2__)
  const __m256 eight = v;
#endif
#ifdef __AVX2__
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float sums[kLanes];
  store_bits(sums, v);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
#endif
}

// f(index, lanes) for [begin, end) in vectors.
template <class F>
void for_vectors(int64_t begin, int64_t end, F f) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) f(i, Whole{});
  if (i < end) f(i, First{end - i});
}

// A condition as bits: bit i is lane i.
inline unsigned to_bits(Ints condition) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask(__m512i(condition));
#elif defined(__AVX2__)
  return _mm256_movemask_ps(__m256(condition));
#else
  unsigned bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= unsigned(condition[i] & 1) << i;
  return bits;
#endif
}

inline Ints from_bits(unsigned bits) {
  Ints lane_bit;
  for (int i = 0; i < kLanes; ++i) lane_bit[i] = 1 << i;
  return ((Ints{} + int32_t(bits)) & lane_bit) != 0;
}

// One bit per lane in memory, in whole bytes.
inline unsigned load_lane_bits(const uint8_t* p, First lanes) { return lanes.n > 8 ? p[0] | p[1] << 8 : p[0]; }
inline unsigned load_lane_bits(const uint8_t* p, Whole) { return load_lane_bits(p, First{kLanes}); }

inline void store_lane_bits(uint8_t* p, unsigned bits, First lanes) {
  p[0] = uint8_t(bits);
  if (lanes.n > 8) p[1] = uint8_t(bits >> 8);
}
inline void store_lane_bits(uint8_t* p, unsigned bits, Whole) { store_lane_bits(p, bits, First{kLanes}); }

// ---- from run-time choices to template arguments

template <auto v>
struct Constant {
  static constexpr auto value = v;
};

template <class F>
void with_dtype(bool is_bf16, F f) {
  is_bf16 ? f(bf16{}) : f(float{});
}

template <class F>
void with_element(Element element, F f) {
  switch (element) {
    case Element::f32: return f(float{});
    case Element::bf16: return f(bf16{});
    case Element::f16: return f(f16{});
  }
}

template <class F>
void with_bool(bool condition, F f) {
  condition ? f(Constant<true>{}) : f(Constant<false>{});
}

}  // namespace
}  // namespace jaxfuse
