// The floating-point types that kernels, on the CPU and on CUDA, read and write; they compute in f32.
#pragma once

namespace jaxfuse {

enum class Element { f32, bf16, f16 };

}  // namespace jaxfuse
