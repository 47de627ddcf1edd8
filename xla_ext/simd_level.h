// Which of an op's loops, each compiled for one instruction set (loops.cc.in), run on this machine.
#pragma once

#include <cstdint>

namespace jaxfuse {

// Floats in the widest vector of any level.
constexpr int64_t kWidestVector = 16;

enum class SimdLevel { portable, avx2, avx512 };

// The highest level that this CPU has, or a lower one named by the environment variable JAXFUSE_SIMD, which is read once. "avx512_amx" is
// avx512 with AMX, which it has by default.
// Throws std::runtime_error if JAXFUSE_SIMD names no level of this CPU.
SimdLevel simd_level();

// Whether the CPU has, for vectors of that level, one instruction that adds four products of bytes: AVX512-VNNI or AVX-VNNI.
bool has_vnni();

// Whether the CPU multiplies matrices of bf16 and of bytes (AMX), and the system lets this process. JAXFUSE_SIMD=avx512 leaves that out.
bool has_amx();

// Whether the CPU computes with the halves of its widest vectors one after the other: of AVX-512's, as Zen 4 does, or AVX2's, as Zen 1.
bool halves_vectors();

bool is_intel();

// An op's loops for this machine. Throws as simd_level() does.
template <class Kernels>
const Kernels& choose(const Kernels& portable, const Kernels& avx2, const Kernels& avx512) {
  switch (simd_level()) {
    case SimdLevel::avx512: return avx512;
    case SimdLevel::avx2: return avx2;
    default: return portable;
  }
}

}  // namespace jaxfuse
