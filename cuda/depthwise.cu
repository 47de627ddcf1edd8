// Launches of depthwise convolution's kernels: which instance, and how many blocks.
#include "depthwise.cuh"

#include <algorithm>

#include "column_sums.h"
#include "dispatch.cuh"

namespace jaxfuse::cuda::depthwise {
namespace {

void convolve(const char* name, const Args& args, cudaStream_t stream) {
  constexpr int64_t kBlocks = 1056;  // eight for each multiprocessor of an H100
  const Blocks blocks(args.channels, kSumsAcross);
  const int64_t strips = args.images * args.height.out * ((args.width.out + kPixels - 1) / kPixels);
  const int64_t rounds = (strips + blocks.block.y - 1) / blocks.block.y;
  const dim3 grid(blocks.tiles, std::clamp<int64_t>(kBlocks / blocks.tiles, 1, rounds));
  with_element(args.element, [&](auto element) {
    using T = decltype(element);
    launch(name, args.aligned ? convolve_kernel<T, true> : convolve_kernel<T, false>, grid, blocks.block, stream, args);
  });
}

}  // namespace

void forward(const Args& args, cudaStream_t stream) { convolve("depthwise forward", args, stream); }

void backward(const Args& args, cudaStream_t stream) {
  const Blocks blocks(args.channels, kSumsAcross, kFilterThreads);
  const int64_t taps = args.height.window * args.width.window;
  const dim3 grid(blocks.tiles, args.parts, (taps + kTaps - 1) / kTaps);
  with_element(args.element, [&](auto element) {
    using T = decltype(element);
    const auto kernel = args.aligned ? filter_gradient_kernel<T, true> : filter_gradient_kernel<T, false>;
    launch("depthwise filter gradient", kernel, grid, blocks.block, stream, args);
  });
  finish_sums({args.partials, args.parts, taps * args.channels, args.channels, args.dw, args.db}, stream);
  Args of_x{};  // the same windows, read the other way
  of_x.element = args.element, of_x.images = args.images, of_x.channels = args.channels, of_x.aligned = args.aligned;
  of_x.height = args.height.transposed(), of_x.width = args.width.transposed();
  of_x.x = args.saved_activation ? args.dz : args.dy, of_x.w = args.w, of_x.y = args.dx;
  convolve("depthwise input gradient", of_x, stream);
}

}  // namespace jaxfuse::cuda::depthwise
