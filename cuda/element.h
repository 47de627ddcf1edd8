// The dtypes of full-size tensors.
#pragma once

namespace jaxfuse::cuda {

enum class Element { f32, bf16, f16 };

}  // namespace jaxfuse::cuda
