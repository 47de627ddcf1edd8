// bfloat16 and float16 as bits, rounded to nearest even, and octets: eight neighbouring elements as floats, in one or two
// 16-byte accesses where the memory is aligned.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "device.cuh"

namespace jaxfuse::cuda {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

HOST_DEVICE float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

HOST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

HOST_DEVICE float to_float(float v) { return v; }
HOST_DEVICE float to_float(bf16 v) { return float_of_bits(uint32_t(v.bits) << 16); }
HOST_DEVICE float to_float(f16 v) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(v.bits));
  return value;
#else
  const uint32_t sign = uint32_t(v.bits & 0x8000) << 16, rest = v.bits & 0x7fff;
  if (rest >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  const float magnitude = rest < 0x400 ? float(rest) * 0x1p-24f : float_of_bits((rest << 13) + (112u << 23));
  return sign ? -magnitude : magnitude;
#endif
}

template <class T>
HOST_DEVICE T from_float(float v);

template <>
HOST_DEVICE float from_float<float>(float v) {
  return v;
}

template <>
HOST_DEVICE bf16 from_float<bf16>(float v) {
#ifdef __CUDA_ARCH__
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return {bits};
#else
  const uint32_t bits = bits_of(v);
  if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fff};  // NaN, as the device writes it
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
#endif
}

template <>
HOST_DEVICE f16 from_float<f16>(float v) {
#ifdef __CUDA_ARCH__
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return {bits};
#else
  const uint32_t bits = bits_of(v), magnitude = bits & 0x7fffffff;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return {0x7fff};
  if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // rounds to 65536 or more
  if (magnitude < 0x38800000) {                                    // below 2⁻¹⁴: in steps of 2⁻²⁴
    return {uint16_t(sign | uint16_t(rintf(float_of_bits(magnitude) * 0x1p24f)))};
  }
  return {uint16_t(sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13)};
#endif
}

template <class T>
HOST_DEVICE float rounded(float v) {
  return to_float(from_float<T>(v));
}

// Two neighbours as they lie in memory, the first in the lower half.
template <class T>
HOST_DEVICE uint32_t pair(T first, T second) {
  return uint32_t(first.bits) | uint32_t(second.bits) << 16;
}

template <class T>
HOST_DEVICE uint32_t pair_of_floats(float first, float second) {
#ifdef __CUDA_ARCH__
  uint32_t word;
  if constexpr (std::is_same_v<T, bf16>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
#else
  return pair(from_float<T>(first), from_float<T>(second));
#endif
}

// Eight elements as they lie in memory. Words, for the compiler keeps each 16-bit number in a register of its own.
template <class T>
struct alignas(16) Octet {
  static constexpr int kWords = 8 * sizeof(T) / 4;
  uint32_t word[kWords];

  HOST_DEVICE float at(int i) const {
    const uint32_t bits = word[i * kWords / 8];
    if constexpr (std::is_same_v<T, float>) return float_of_bits(bits);
    else if constexpr (std::is_same_v<T, bf16>) return float_of_bits(i % 2 ? bits & 0xffff0000u : bits << 16);
    else return to_float(f16{uint16_t(i % 2 ? bits >> 16 : bits)});
  }

  HOST_DEVICE static Octet of(const float (&v)[8]) {
    Octet octet;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (std::is_same_v<T, float>) octet.word[i] = bits_of(v[i]);
      else octet.word[i] = pair_of_floats<T>(v[2 * i], v[2 * i + 1]);
    }
    return octet;
  }
};

// The first `count` elements from p on, then zeros; with `aligned` all eight, by 16-byte accesses. `once`: nobody reads them again, so
// they take no place in the first-level cache.
template <bool aligned, bool once = false, class T>
__device__ __forceinline__ Octet<T> load(const T* p, int count) {
  Octet<T> octet;
  if constexpr (aligned) {
    Words* words = reinterpret_cast<Words*>(octet.word);
    for (int i = 0; i < int(sizeof octet / sizeof(Words)); ++i) {
      words[i] = once ? load_once(reinterpret_cast<const Words*>(p) + i) : reinterpret_cast<const Words*>(p)[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < octet.kWords; ++i) {
      if constexpr (std::is_same_v<T, float>) octet.word[i] = i < count ? bits_of(p[i]) : 0;
      else octet.word[i] = pair(2 * i < count ? p[2 * i] : T{}, 2 * i + 1 < count ? p[2 * i + 1] : T{});
    }
  }
  return octet;
}

// `whole`: by store_whole, which batch norm's loops would lose 4 % by.
template <bool aligned, bool whole = false, class T>
__device__ __forceinline__ void store(T* p, const float (&v)[8], int count) {
  if constexpr (aligned) {
    const Octet<T> octet = Octet<T>::of(v);
    const Words* words = reinterpret_cast<const Words*>(octet.word);
    for (int i = 0; i < int(sizeof octet / sizeof(Words)); ++i) {
      Words* to = reinterpret_cast<Words*>(p) + i;
      if constexpr (whole) store_whole(to, words[i]);
      else *to = words[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) p[i] = from_float<T>(v[i]);
    }
  }
}

// Eight per-channel numbers; 0 where there is no channel.
template <bool aligned>
__device__ __forceinline__ void load_floats(float (&v)[8], const float* p, int count) {
  const Octet<float> octet = load<aligned>(p, count);
  for (int i = 0; i < 8; ++i) v[i] = octet.at(i);
}

}  // namespace jaxfuse::cuda
