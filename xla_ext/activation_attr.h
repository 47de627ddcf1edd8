// The activation that a call asks for.
#pragma once

#include "activation.h"
#include "call.h"

namespace jaxfuse {

// The attribute `activation`, refused if it is no name of one.
Activation activation_attr(const Call& call);

// The attribute `by_value`: whether the derivative is told by y, not by z. Refused where y does not tell it.
bool by_value_attr(const Call& call, Activation activation);

}  // namespace jaxfuse
