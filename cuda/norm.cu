// Launches of layer and RMS norm's kernels: which instance, and how many blocks.
#include "norm.cuh"

#include <algorithm>

#include "column_sums.h"
#include "dispatch.cuh"

namespace jaxfuse::cuda::norm {
namespace {

// Threads of a team: the fewest whole warps, a power of 2, whose registers hold a row.
int team_of(const Args& args) {
  int team = 32;
  while (team < kThreads && team * 8 * kOctets < args.length) team *= 2;
  return team;
}

dim3 block_of(const Args& args) { return dim3(team_of(args), kThreads / team_of(args)); }

// f(T{}, aligned) with constants
template <class F>
void with_instance(const Args& args, F f) {
  with_element(args.element, [&](auto element) {
    args.aligned ? f(element, std::true_type{}) : f(element, std::false_type{});
  });
}

}  // namespace

void forward(const Args& args, cudaStream_t stream) {
  constexpr int64_t kBlocks = 1056;  // a few rounds of them on any GPU
  const dim3 block = block_of(args);
  const int64_t of_group = args.rows / args.groups, blocks = (of_group + block.y - 1) / block.y;
  with_instance(args, [&](auto element, auto aligned) {
    const dim3 grid(std::clamp<int64_t>(kBlocks / args.groups, 1, blocks), args.groups);
    launch("norm forward", forward_kernel<decltype(element), aligned()>, grid, block, stream, args);
  });
}

void backward(const Args& args, cudaStream_t stream) {
  with_instance(args, [&](auto element, auto aligned) {
    const dim3 grid(args.parts, args.groups);
    launch("norm backward", backward_kernel<decltype(element), aligned()>, grid, block_of(args), stream, args);
  });
  const int64_t parameters = args.groups * args.length;
  if (args.partials) finish_sums({args.partials, args.parts, parameters, parameters, args.dgamma, args.dbeta}, stream);
}

}  // namespace jaxfuse::cuda::norm
