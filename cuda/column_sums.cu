// The parts of sums over rows put together, in f64 and in a fixed order: x counts channels, y counts lanes that share the parts.
#include "column_sums.h"

namespace jaxfuse::cuda {
namespace {

constexpr int kChannels = 8, kLanes = 32;

__device__ inline double sum_over_lanes(double v) {
  __shared__ double sums[kLanes][kChannels];
  __syncthreads();
  sums[threadIdx.y][threadIdx.x] = v;
  for (int half = kLanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.y) < half) sums[threadIdx.y][threadIdx.x] += sums[threadIdx.y + half][threadIdx.x];
  }
  __syncthreads();
  return sums[0][threadIdx.x];
}

// f(part, the part's number of this thread's column, the one `further` on), summed over all parts.
template <class F>
__device__ __forceinline__ double over_parts(const ColumnSums& args, int64_t column, int64_t further, F f) {
  const int64_t width = args.of_first + args.of_second;
  double sum = 0;
  if (column + further < width) {
    for (int part = threadIdx.y; part < args.parts; part += kLanes) {
      const float* partials = args.partials + part * width + column;
      sum += f(part, double(partials[0]), double(partials[further]));
    }
  }
  return sum_over_lanes(sum);
}

struct Moments64 {
  ColumnSums args;
  Deal deal;
};

__global__ void moments_kernel(const Moments64 finish) {
  const ColumnSums& args = finish.args;
  const int64_t channels = args.of_first, channel = int64_t(blockIdx.x) * kChannels + threadIdx.x;
  const auto rows = [&](int part) { return double(finish.deal.count(part, 0, 1)); };
  const double n = double(finish.deal.rows);
  const double mean = over_parts(args, channel, channels, [&](int part, double mean, double) { return rows(part) * mean; }) / n;
  const double m2 = over_parts(args, channel, channels, [&](int part, double of_part, double m2) {
    return m2 + rows(part) * (of_part - mean) * (of_part - mean);
  });
  if (channel < channels && threadIdx.y == 0) args.first[channel] = float(mean), args.second[channel] = float(m2 / n);
}

__global__ void sums_kernel(const ColumnSums args) {
  const int64_t column = int64_t(blockIdx.x) * kChannels + threadIdx.x;
  const double sum = over_parts(args, column, 0, [](int, double v, double) { return v; });
  if (threadIdx.y != 0 || column >= args.of_first + args.of_second) return;
  (column < args.of_first ? args.first[column] : args.second[column - args.of_first]) = float(sum);
}

dim3 grid(int64_t columns) { return dim3((columns + kChannels - 1) / kChannels); }

}  // namespace

void finish_sums(const ColumnSums& args, cudaStream_t stream) {
  launch("finish_sums", sums_kernel, grid(args.of_first + args.of_second), dim3(kChannels, kLanes), stream, args);
}

void finish_moments(const ColumnSums& args, const Deal& deal, cudaStream_t stream) {
  launch("finish_moments", moments_kernel, grid(args.of_first), dim3(kChannels, kLanes), stream, Moments64{args, deal});
}

}  // namespace jaxfuse::cuda
