// A call that is described and not made: of operands and results without memory.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "call.h"

namespace jaxfuse {

using Type = std::pair<std::string, std::vector<int64_t>>;  // a dtype's name, and a shape

// The names of the libraries whose code would compute it, by the handler's own code. Attributes are bool, str, and numpy
// numbers and arrays, as `jax.ffi.ffi_call` has them. Throws std::invalid_argument for what the handler would refuse.
std::vector<std::string> libraries(const std::string& target, const std::vector<Type>& operands, const std::vector<Type>& results,
                                   const pybind11::dict& attributes);

}  // namespace jaxfuse
