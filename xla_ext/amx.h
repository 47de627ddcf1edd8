// AMX's registers: each has 16 lines of 64 bytes. `sums` += a·b for 16 rows of a and 16 columns of b, whose line s has step s of each
// column: a pair of bf16, or four bytes, u8 of a and s8 of b. Include only from loops that are compiled for AMX, or emulate it.
#pragma once

#include <cstdint>

#ifdef JAXFUSE_EMULATE_AVX512
#include <cstring>
#endif

namespace jaxfuse::amx {

constexpr int64_t kLines = 16, kLineBytes = 64, kBytes = kLines * kLineBytes;

namespace {

#ifdef JAXFUSE_EMULATE_AVX512

struct Register {
  char lines[kLines][kLineBytes];
};
thread_local Register registers[8];

inline void begin() {}
inline void end() {}

template <int n>
void zero() {
  registers[n] = {};
}
template <int n>
void load(const void* at, int64_t stride) {
  for (int64_t i = 0; i < kLines; ++i) std::memcpy(registers[n].lines[i], static_cast<const char*>(at) + i * stride, kLineBytes);
}
template <int n>
void store(void* at, int64_t stride) {
  for (int64_t i = 0; i < kLines; ++i) std::memcpy(static_cast<char*>(at) + i * stride, registers[n].lines[i], kLineBytes);
}

// Σ of the products of a step's elements, which are `T` of a and `U` of b.
template <class Sum, class T, class U, class Widen, int sums, int a, int b>
void multiply(Widen widen) {
  constexpr int64_t kElements = 4 / sizeof(T);
  for (int64_t i = 0; i < kLines; ++i) {
    for (int64_t n = 0; n < kLines; ++n) {
      Sum sum;
      std::memcpy(&sum, registers[sums].lines[i] + 4 * n, sizeof sum);
      for (int64_t e = 0; e < kLines * kElements; ++e) {
        T left;
        U right;
        std::memcpy(&left, registers[a].lines[i] + e * sizeof(T), sizeof left);
        std::memcpy(&right, registers[b].lines[e / kElements] + 4 * n + e % kElements * sizeof(U), sizeof right);
        sum += widen(left) * widen(right);
      }
      std::memcpy(registers[sums].lines[i] + 4 * n, &sum, sizeof sum);
    }
  }
}
template <int sums, int a, int b>
void multiply_pairs() {
  const auto widen = [](uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  };
  multiply<float, uint16_t, uint16_t, decltype(widen), sums, a, b>(widen);
}
template <int sums, int a, int b>
void multiply_bytes() {
  const auto widen = [](int value) { return value; };
  multiply<int32_t, uint8_t, int8_t, decltype(widen), sums, a, b>(widen);
}

#else

// What `ldtilecfg` reads.
struct Configuration {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The thread uses the registers from here on, and no more: while it does, the system saves 8 KB with each change of threads. Written as
// assembly: GCC's functions want numbers of registers that the preprocessor knows, and GCC 12 drops what was stored to a configuration.
inline void begin() {
  const Configuration configuration;
  asm volatile("ldtilecfg %0" : : "m"(configuration));
}
inline void end() { asm volatile("tilerelease"); }

template <int n>
void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(n));
}
template <int n>
void load(const void* at, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(at), "r"(stride), "i"(n) : "memory");
}
template <int n>
void store(void* at, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(at), "r"(stride), "i"(n) : "memory");
}
template <int sums, int a, int b>
void multiply_pairs() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(a), "i"(b));
}
template <int sums, int a, int b>
void multiply_bytes() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(a), "i"(b));
}

#endif

}  // namespace
}  // namespace jaxfuse::amx
