// The table of batch_norm_kernels.h for the ISA that the including file is compiled for: from run-time choices
// to the template arguments of the loops.
#pragma once

#include "batch_norm_apply_loops.h"
#include "batch_norm_stats_loops.h"

namespace jaxfuse::batch_norm {
namespace {

// f(value of the element's type, Constant<whether a mask is read>, the activation's gradient)
template <class F>
void with_types(const BackwardArgs& args, F f) {
  with_element(args.element, [&](auto t) {
    if (args.derivative == Derivative::recompute) {
      return with_gradient(args.activation, false, args.parameters, [&](auto act) { f(t, Constant<false>{}, act); });
    }
    with_bool(args.derivative == Derivative::mask, [&](auto by_mask) {
      f(t, by_mask, GradientInLine<Activation::none>{args.parameters, false});
    });
  });
}

constexpr Kernels kernels = {
    [](const StatsArgs& args, const Tile& tile, double* sum, double* m2) {
      with_element(args.element, [&](auto t) { stats<decltype(t)>(args, tile, sum, m2); });
    },
    merge,
    [](const ApplyArgs& args, const Tile& tile) {
      with_element(args.element, [&](auto t) {
        with_activation(args.activation, args.parameters, [&](auto act) {
          with_bool(args.residual, [&](auto residual) {
            with_bool(args.mask, [&](auto mask) {
              if constexpr (act.kIsGate || !mask.value) apply<decltype(t), residual.value, mask.value>(args, tile, act);
            });
          });
        });
      });
    },
    [](const BackwardArgs& args, const Tile& tile, double* sum_g, double* sum_gx) {
      with_types(args, [&](auto t, auto by_mask, auto act) {
        backward_stats<decltype(t), by_mask.value>(args, tile, act, sum_g, sum_gx);
      });
    },
    [](const BackwardArgs& args, const Tile& tile) {
      with_types(args, [&](auto t, auto by_mask, auto act) {
        with_bool(args.dresidual, [&](auto dresidual) {
          backward_apply<decltype(t), by_mask.value, dresidual.value>(args, tile, act);
        });
      });
    },
};

}  // namespace
}  // namespace jaxfuse::batch_norm
