// The activation that a call asks for.
#pragma once

#include <string>

#include "activation.h"
#include "call.h"

namespace jaxfuse {

// The attribute `activation`, refused if it is no name of one. `of` stands before the attributes' names where a call has several.
Activation activation_attr(const Call& call, const std::string& of = "");

// The attribute `parameters`, refused if these are not as many numbers as the activation has.
Parameters parameters_attr(const Call& call, const std::string& of = "");

// The attribute `by_value`: whether the derivative is computed from y, not from z. Refused where it is no function of y.
bool derivative_from_y_attr(const Call& call, Activation activation, const Parameters& parameters);

// The attribute `save_mask`: whether to keep a bit for each element, where it is the derivative. Refused where that is not 0 or 1,
// ties aside.
bool save_mask_attr(const Call& call, Activation activation, const Parameters& parameters);

}  // namespace jaxfuse
