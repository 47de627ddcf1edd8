#include "activation_attr.h"

#include <string_view>

namespace jaxfuse {

Activation activation_attr(const Call& call) {
  // It lives until the process ends: XLA's threads may still run handlers while static objects are destroyed.
  static const auto& table = *new const std::map<std::string_view, Activation>{
      {"none", Activation::none},
      {"relu", Activation::relu},
      {"maximum0", Activation::maximum0},
      {"relu6", Activation::relu6},
      {"clip6", Activation::clip6},
      {"clip", Activation::clip},
      {"leaky_relu", Activation::leaky_relu},
      {"elu", Activation::elu},
      {"selu", Activation::selu},
      {"celu", Activation::celu},
      {"sigmoid", Activation::sigmoid},
      {"tanh", Activation::tanh},
      {"silu", Activation::silu},
      {"gelu", Activation::gelu},
      {"gelu_tanh", Activation::gelu_tanh},
      {"mish", Activation::mish},
      {"hard_swish", Activation::hard_swish},
      {"hard_sigmoid", Activation::hard_sigmoid},
      {"hard_tanh", Activation::hard_tanh},
      {"softplus", Activation::softplus},
      {"relu_squared", Activation::relu_squared},
  };
  const auto name = call.attr<std::string_view>("activation");
  auto found = table.find(name);
  if (found != table.end()) return found->second;
  std::string known;
  for (const auto& [each, activation] : table) known += (known.empty() ? "" : ", ") + std::string(each);
  call.refuse("attribute activation is \"", name, "\", expected one of ", known);
}

bool by_value_attr(const Call& call, Activation activation) {
  const bool by_value = call.attr<bool>("by_value");
  if (by_value && !is_told_by_value(activation)) {
    call.refuse("attribute by_value is true but the derivative of activation ", call.attr<std::string_view>("activation"),
                " is not a function of its value");
  }
  return by_value;
}

}  // namespace jaxfuse
