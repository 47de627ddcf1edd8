// The table of batch_norm_kernels.h for the ISA that the including file is compiled for: from run-time choices
// to the template arguments of the loops.
#pragma once

#include "batch_norm_apply_loops.h"
#include "batch_norm_stats_loops.h"

namespace jaxfuse::batch_norm {
namespace {

template <class F>
void with_gradient(const BackwardArgs& args, F f) {
  using None = Constant<Activation::none>;
  switch (args.derivative) {
    case Derivative::none: return f(Constant<Derivative::none>{}, None{});
    case Derivative::mask: return f(Constant<Derivative::mask>{}, None{});
    case Derivative::recompute:
      return with_activation(args.activation, [&](auto act) { f(Constant<Derivative::recompute>{}, act); });
  }
}

constexpr Kernels kernels = {
    [](const StatsArgs& args, const Tile& tile, double* sum, double* m2) {
      with_element(args.element, [&](auto t) { stats<decltype(t)>(args, tile, sum, m2); });
    },
    merge,
    [](const ApplyArgs& args, const Tile& tile) {
      with_element(args.element, [&](auto t) {
        with_activation(args.activation, [&](auto act) {
          with_bool(args.residual, [&](auto residual) {
            with_bool(args.mask, [&](auto mask) {
              if constexpr (is_gate(act.value) || !mask.value) {
                apply<decltype(t), act.value, residual.value, mask.value>(args, tile);
              }
            });
          });
        });
      });
    },
    [](const BackwardArgs& args, const Tile& tile, double* sum_g, double* sum_gx) {
      with_element(args.element, [&](auto t) {
        with_gradient(args, [&](auto derivative, auto act) {
          backward_stats<decltype(t), derivative.value, act.value>(args, tile, sum_g, sum_gx);
        });
      });
    },
    [](const BackwardArgs& args, const Tile& tile) {
      with_element(args.element, [&](auto t) {
        with_gradient(args, [&](auto derivative, auto act) {
          with_bool(args.dresidual, [&](auto dresidual) {
            backward_apply<decltype(t), derivative.value, act.value, dresidual.value>(args, tile);
          });
        });
      });
    },
};

}  // namespace
}  // namespace jaxfuse::batch_norm
