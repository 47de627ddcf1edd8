// Which of the x_<isa>.cc files runs on this machine.
#pragma once

namespace jaxfuse {

enum class SimdLevel { portable, avx2, avx512 };

// The highest level that this CPU has, or a lower one named by the environment variable JAXFUSE_SIMD, which is read once.
// Throws std::invalid_argument if JAXFUSE_SIMD names no level of this CPU.
SimdLevel simd_level();

}  // namespace jaxfuse
