// An activation that keeps sums within limits, as relu does.
#pragma once

#include <optional>

#include "conv_depthwise_problem.h"

namespace jaxfuse::conv {

struct Limits {
  float low, high;
};

// Or none, if it does anything else.
inline std::optional<Limits> limits_of(Activation activation, const Parameters& parameters) {
  const std::optional<depthwise::Clip> clip = depthwise::clip_of(activation, parameters);
  if (!clip || clip->bounds[0] != clip->ends[0] || clip->bounds[1] != clip->ends[1]) return std::nullopt;
  return Limits{clip->bounds[0], clip->bounds[1]};
}

}  // namespace jaxfuse::conv
