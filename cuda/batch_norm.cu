// Launches of batch norm's kernels: which instance, and how many blocks.
#include "batch_norm.cuh"

#include <algorithm>

#include "column_sums.h"
#include "dispatch.cuh"

namespace jaxfuse::cuda::batch_norm {
namespace {

constexpr int kApplyAcross = 32;
constexpr int64_t kApplyBlocks = 2048;  // some rounds of them, each of which loads its coefficients once

ColumnSums parts_of(const Args& args) { return {args.partials, args.parts, args.channels, args.channels, args.first, args.second}; }

dim3 apply_grid(const Args& args, const Blocks& shape, int unroll) {
  const int64_t chunk = int64_t(shape.block.y) * unroll;
  const int64_t chunks = (args.rows + chunk - 1) / chunk;
  return dim3(shape.tiles, std::clamp<int64_t>(kApplyBlocks / shape.tiles, 1, chunks));
}

Source source_of(const Args& args) {
  if (args.derivative == Derivative::none) return Source::none;
  if (args.derivative == Derivative::mask) return Source::mask;
  return args.activation == Activation::relu && !args.residual ? Source::relu : Source::any;
}

// f(T{}, aligned, source) with constants
template <class F>
void with_instance(const Args& args, F f) {
  with_element(args.element, [&](auto element) {
    if (!args.aligned) return f(element, std::false_type{}, std::integral_constant<Source, Source::any>{});
    switch (source_of(args)) {
      case Source::none: return f(element, std::true_type{}, std::integral_constant<Source, Source::none>{});
      case Source::mask: return f(element, std::true_type{}, std::integral_constant<Source, Source::mask>{});
      case Source::relu: return f(element, std::true_type{}, std::integral_constant<Source, Source::relu>{});
      case Source::any: return f(element, std::true_type{}, std::integral_constant<Source, Source::any>{});
    }
  });
}

// Coefficients that are read without a need for them.
Args readable(Args args) {
  if (!args.center) args.center = args.scale = args.offset = args.mean;
  return args;
}

}  // namespace

void stats(const Args& args, cudaStream_t stream) {
  const Blocks shape(args.channels, kSumsAcross);
  const dim3 grid(shape.tiles, args.parts);
  with_element(args.element, [&](auto element) {
    using T = decltype(element);
    launch("stats", args.aligned ? stats_kernel<T, true> : stats_kernel<T, false>, grid, shape.block, stream, args);
    const int rows = args.aligned ? kStatsRows<T, true> : kStatsRows<T, false>;
    finish_moments(parts_of(args), Deal{args.rows, args.parts, int32_t(shape.block.y) * rows}, stream);
  });
}

void apply(const Args& args, cudaStream_t stream) {
  const Blocks shape(args.channels, kApplyAcross);
  const bool simple = args.aligned && (args.activation == Activation::none || args.activation == Activation::relu);
  with_element(args.element, [&](auto element) {
    using T = decltype(element);
    const dim3 grid = apply_grid(args, shape, simple ? kRows<T> : 1);
    const auto kernel = simple ? (args.residual ? apply_kernel<T, true, false, true> : apply_kernel<T, true, false, false>)
                               : (args.aligned ? apply_kernel<T, true, true, true> : apply_kernel<T, false, true, true>);
    launch("apply", kernel, grid, shape.block, stream, args);
  });
}

void backward_stats(const Args& given, cudaStream_t stream) {
  const Args args = readable(given);
  const Blocks shape(args.channels, kSumsAcross);
  with_instance(args, [&](auto element, auto aligned, auto source) {
    using T = decltype(element);
    launch("backward_stats", backward_stats_kernel<T, aligned(), source()>, dim3(shape.tiles, args.parts), shape.block, stream, args);
    finish_sums(parts_of(args), stream);
  });
}

void backward_apply(const Args& given, cudaStream_t stream) {
  const Args args = readable(given);
  const Blocks shape(args.channels, kApplyAcross);
  with_instance(args, [&](auto element, auto aligned, auto source) {
    using T = decltype(element);
    constexpr int unroll = Gradient<T, aligned(), source()>::kUnroll;
    launch("backward_apply", backward_apply_kernel<T, aligned(), source()>, apply_grid(args, shape, unroll), shape.block, stream, args);
  });
}

}  // namespace jaxfuse::cuda::batch_norm
