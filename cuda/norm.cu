// Launches of layer and RMS norm's kernels: which instance, and how many blocks.
#include "norm.cuh"

#include <algorithm>

#include "column_sums.h"
#include "dispatch.cuh"

namespace jaxfuse::cuda::norm {
namespace {

constexpr int64_t kMultiprocessors = 132, kResident = 1024;  // of an H100; threads that one runs at a time

// A block of `threads`, or of one team if that is more. A team is the fewest whole warps whose registers hold a row.
dim3 block_of(const Args& args, int octets, int threads) {
  const int64_t each = 32 * 8 * octets;
  const int team = 32 * int((args.length + each - 1) / each);
  return dim3(team, std::max(1, threads / team));
}

// f(T{}, aligned, octets) with constants
template <class F>
void with_instance(const Args& args, F f) {
  with_element(args.element, [&](auto element) {
    const auto of_octets = [&](auto octets) { args.aligned ? f(element, std::true_type{}, octets) : f(element, std::false_type{}, octets); };
    args.length <= kThreads * 8 ? of_octets(std::integral_constant<int, 1>{}) : of_octets(std::integral_constant<int, kMostOctets>{});
  });
}

}  // namespace

void forward(const Args& args, cudaStream_t stream) {
  with_instance(args, [&](auto element, auto aligned, auto octets) {
    const dim3 block = block_of(args, octets, 128);
    const int64_t of_group = args.rows / args.groups, blocks = (of_group + block.y - 1) / block.y;
    const int64_t resident = kMultiprocessors * kResident / (block.x * block.y);
    const dim3 grid(std::clamp<int64_t>(resident / args.groups, 1, blocks), args.groups);
    launch("norm forward", forward_kernel<decltype(element), aligned(), octets()>, grid, block, stream, args);
  });
}

void backward(const Args& args, cudaStream_t stream) {
  with_instance(args, [&](auto element, auto aligned, auto octets) {
    const dim3 grid(args.parts, args.groups);
    launch("norm backward", backward_kernel<decltype(element), aligned(), octets()>, grid, block_of(args, octets, kThreads), stream, args);
  });
  const int64_t parameters = args.groups * args.length;
  if (args.partials) finish_sums({args.partials, args.parts, parameters, parameters, args.dgamma, args.dbeta}, stream);
}

}  // namespace jaxfuse::cuda::norm
