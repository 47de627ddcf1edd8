#include "activation_attr.h"

#include <algorithm>
#include <cmath>
#include <string_view>

namespace jaxfuse {
namespace {

struct Row {
  std::string_view name;
  size_t numbers;
};

constexpr Row kTable[] = {
#define JAXFUSE_ROW(name, numbers, ...) {#name, numbers},
    JAXFUSE_ACTIVATIONS(JAXFUSE_ROW)
#undef JAXFUSE_ROW
};

// For whoever loads this: each name, how many numbers it takes and what its derivative is computed from.
const bool described = facts().emplace("activations", [] {
  std::string rows;
#define JAXFUSE_ROW(name, numbers, derivative_from, ...) rows += #name " " #numbers " " #derivative_from ", ";
  JAXFUSE_ACTIVATIONS(JAXFUSE_ROW)
#undef JAXFUSE_ROW
  return rows;
}()).second;

// The value at a bound, beyond which `outer` is the piece.
float end(const Piecewise& f, int bound, int outer) {
  if (std::isfinite(f.bounds[bound]) && f.slopes[outer] == 0) return f.offsets[outer];
  return f.slopes[1] * (f.bounds[bound] - f.center) + f.offsets[1];
}

float slope_at(const Piecewise& f, const float (&bounds)[2], float x) {
  if (x < bounds[0]) return f.slopes[0];
  if (x > bounds[1]) return f.slopes[2];
  return x == bounds[0] ? f.at_bounds[0] : x == bounds[1] ? f.at_bounds[1] : f.slopes[1];
}

bool has_derivative_from_y(const Piecewise& f) {
  const auto [lower, middle, upper] = f.slopes;
  const bool rises = lower >= 0 && middle > 0 && upper >= 0;
  const bool ties = (lower > 0 || f.at_bounds[0] == lower) && (upper > 0 || f.at_bounds[1] == upper);
  return rises && ties && (std::isnan(f.at_nan) || slope_at(f, f.ends, f.at_nan) == f.slope_at_nan);
}

bool clips(const Piecewise& f) {
  const auto [lower, middle, upper] = f.slopes;
  const bool middle_is_z = f.center == 0 && middle == 1 && f.offsets[1] == 0 && std::signbit(f.offsets[1]) && std::isnan(f.at_nan);
  return middle_is_z && lower == 0 && upper == 0 && f.inward[0] == 0 && f.inward[1] == 0;
}

bool is_derivative_a_bit(const Piecewise& f) {
  return std::all_of(f.slopes, f.slopes + 3, [](float slope) { return slope == 0 || slope == 1; });
}

}  // namespace

Activation activation_attr(const Call& call, const std::string& of) {
  const auto name = call.attr<std::string_view>((of + "activation").c_str());
  std::string known;
  for (const Row& row : kTable) {
    if (row.name == name) return Activation(&row - kTable);
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  call.refuse("attribute ", of, "activation is \"", name, "\", expected one of ", known);
}

Parameters parameters_attr(const Call& call, const std::string& of) {
  const Row& row = kTable[int(activation_attr(call, of))];
  const auto numbers = call.attr<ffi::Span<const float>>((of + "parameters").c_str());
  if (numbers.size() != row.numbers) {
    call.refuse("attribute ", of, "parameters has ", numbers.size(), " numbers, expected ", row.numbers, " for activation ", row.name);
  }
  const float* p = numbers.begin();
  if (row.numbers == 0) return {};
  if (row.numbers == 1) return {p[0], {}};
  Piecewise f{p[0], {p[1], p[2]}, {p[3], p[4], p[5]}, {p[6], p[7], p[8]}, {p[9], p[10]}, {p[11], p[12]}, p[13], p[14], {}, false};
  f.ends[0] = end(f, 0, 0), f.ends[1] = end(f, 1, 2), f.clips = clips(f);
  return {0, f};
}

bool derivative_from_y_attr(const Call& call, Activation activation, const Parameters& parameters) {
  const bool by_value = call.attr<bool>("by_value"), piecewise = activation == Activation::piecewise_linear;
  if (by_value && !(has_derivative_from_y(activation) && (!piecewise || has_derivative_from_y(parameters.pieces)))) {
    call.refuse("attribute by_value is true but the derivative of activation ", call.attr<std::string_view>("activation"),
                " is not a function of its value");
  }
  return by_value;
}

bool save_mask_attr(const Call& call, Activation activation, const Parameters& parameters) {
  const bool save_mask = call.attr<bool>("save_mask"), piecewise = activation == Activation::piecewise_linear;
  if (save_mask && !(activation == Activation::relu || (piecewise && is_derivative_a_bit(parameters.pieces)))) {
    call.refuse("attribute save_mask is true but the derivative of activation ", call.attr<std::string_view>("activation"),
                " is no mask");
  }
  return save_mask;
}

}  // namespace jaxfuse
