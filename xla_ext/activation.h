// The activations that kernels know, by the names of jaxfuse/ops/activations.py.
#pragma once

namespace jaxfuse {

// A switch over them names every one and has no default: -Werror=switch then finds what a new activation still lacks.
// maximum0 and clip6 have the values of relu and relu6; at a tie (0; 0 and 6) their derivative is 0.5, there 0.
enum class Activation {
  none, relu, maximum0, relu6, clip6, clip, leaky_relu, elu, selu, celu, sigmoid, tanh, silu, gelu, gelu_tanh, mish,
  hard_swish, hard_sigmoid, hard_tanh, softplus, relu_squared
};

// Whether the derivative is 0 or 1 (ties aside), so that a mask of bits can be kept for it.
inline bool is_told_by_a_bit(Activation activation) {
  return activation == Activation::relu || activation == Activation::maximum0 || activation == Activation::relu6 ||
         activation == Activation::clip6;
}

// Whether the derivative is a function of the value.
constexpr bool is_told_by_value(Activation activation) {
  switch (activation) {
    case Activation::none:
    case Activation::relu:
    case Activation::relu6:
    case Activation::leaky_relu:
    case Activation::elu:
    case Activation::selu:
    case Activation::celu:
    case Activation::sigmoid:
    case Activation::tanh:
    case Activation::hard_sigmoid:
    case Activation::softplus: return true;
    case Activation::maximum0:
    case Activation::clip6:
    case Activation::clip:
    case Activation::silu:
    case Activation::gelu:
    case Activation::gelu_tanh:
    case Activation::mish:
    case Activation::hard_swish:
    case Activation::hard_tanh:
    case Activation::relu_squared: break;
  }
  return false;
}

}  // namespace jaxfuse
