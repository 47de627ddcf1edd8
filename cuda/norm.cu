// Launches of layer and RMS norm's kernels: which instance, and how many blocks.
#include "norm.cuh"

#include <algorithm>

#include "column_sums.h"
#include "dispatch.cuh"

namespace jaxfuse::cuda::norm {
namespace {

// A team is the fewest whole warps whose registers hold a row; a block has `threads`, or one team if that is more.
dim3 block_of(const Args& args, int octets, int threads) {
  const int64_t each = 32 * 8 * octets;
  const int team = 32 * int((args.length + each - 1) / each);
  return dim3(team, std::max(1, threads / team));
}

// f(T{}, aligned, octets) with constants: a warp holds a row of 256 elements with an octet on each thread.
template <class Direction, class F>
void with_instance(const Args& args, F f) {
  with_element(args.element, [&](auto element) {
    const auto of_octets = [&](auto octets) { args.aligned ? f(element, std::true_type{}, octets) : f(element, std::false_type{}, octets); };
    args.length <= 32 * 8 ? of_octets(std::integral_constant<int, 1>{}) : of_octets(std::integral_constant<int, Direction::kOctets>{});
  });
}

}  // namespace

void forward(const Args& args, cudaStream_t stream) {
  with_instance<Forward>(args, [&](auto element, auto aligned, auto octets) {
    const dim3 block = block_of(args, octets, Forward::kThreads / 2);
    const dim3 grid((args.rows + block.y - 1) / block.y, args.groups);
    launch("norm forward", forward_kernel<decltype(element), aligned(), octets()>, grid, block, stream, args);
  });
}

void backward(const Args& args, cudaStream_t stream) {
  with_instance<Backward>(args, [&](auto element, auto aligned, auto octets) {
    const dim3 block = block_of(args, octets, Backward::kThreads / 2), grid(args.parts, args.groups);
    launch("norm backward", backward_kernel<decltype(element), aligned(), octets()>, grid, block, stream, args);
  });
  const int64_t parameters = args.groups * args.length;
  if (args.partials) finish_sums({args.partials, args.parts, parameters, parameters, args.dgamma, args.dbeta}, stream);
}

}  // namespace jaxfuse::cuda::norm
