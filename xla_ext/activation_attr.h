// The activation that a call asks for.
#pragma once

#include "activation.h"
#include "call.h"

namespace jaxfuse {

// The attribute `activation`, refused if it is no name of one.
Activation activation_attr(const Call& call);

}  // namespace jaxfuse
