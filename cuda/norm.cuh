// Layer and RMS norm's kernels: y = (s - mean)·rstd·gamma + beta, s = x + residual. A block's threads are teams of blockDim.x, each
// with a row at a time in its registers: read once. Bytes per element in bf16: forward 4 (6 with a residual, 8 if the sum is
// written), backward 6, and 8·parts/rows of partial sums.
#pragma once

#include "norm.h"
#include "number.cuh"

namespace jaxfuse::cuda::norm {

constexpr int kThreads = 512, kOctets = 2;  // of a block; that each thread has of a row
static_assert(kThreads * kOctets * 8 == kLongestRow);

// Σ over a team of two numbers, the same in every thread of it. All threads of the block must come.
struct TeamSums {
  float of_warp[2][kThreads / 32];

  __device__ __forceinline__ void add(float& first, float& second) {
    first = warp_sum(first, 32), second = warp_sum(second, 32);
    const int warps = blockDim.x / 32;
    if (warps == 1) return;
    const int warp = (threadIdx.y * blockDim.x + threadIdx.x) / 32;
    __syncthreads();  // the last sums are read
    if (threadIdx.x % 32 == 0) of_warp[0][warp] = first, of_warp[1][warp] = second;
    __syncthreads();
    first = second = 0;
    for (int w = 0; w < warps; ++w) {
      first += of_warp[0][threadIdx.y * warps + w];
      second += of_warp[1][threadIdx.y * warps + w];
    }
  }
};

// This thread's octets of a row: octet o begins at o·8·blockDim.x + 8·threadIdx.x.
struct Columns {
  int64_t length;

  __device__ int64_t at(int o) const { return (int64_t(o) * blockDim.x + threadIdx.x) * 8; }
  __device__ int count(int o) const {
    const int64_t left = length - at(o);
    return left < 0 ? 0 : left < 8 ? int(left) : 8;
  }
};

// Rows go to the blocks of their group in turn, and there to the teams: all do as many rounds, for they meet at barriers.
struct Rows {
  int64_t of_group, round;  // rows of a group; rows of one round of all its blocks

  __device__ explicit Rows(const Args& args) : of_group(args.rows / args.groups), round(int64_t(gridDim.x) * blockDim.y) {}
  __device__ int64_t rounds() const { return (of_group + round - 1) / round; }
  __device__ int64_t in_group(int64_t i) const { return i * round + int64_t(blockIdx.x) * blockDim.y + threadIdx.y; }
};

template <bool aligned, class T>
__device__ __forceinline__ void load_row(Octet<T> (&v)[kOctets], const void* tensor, int64_t row, const Columns& columns) {
  const T* begin = static_cast<const T*>(tensor) + row * columns.length;
#pragma unroll
  for (int o = 0; o < kOctets; ++o) {
    if (columns.count(o) > 0) v[o] = load<aligned>(begin + columns.at(o), columns.count(o));
  }
}

template <class T, bool aligned>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const Args args) {
  __shared__ TeamSums team;
  const Rows rows(args);
  const Columns columns{args.length};
  const float *gamma = args.gamma + blockIdx.y * args.length, *beta = args.beta + blockIdx.y * args.length;
  const float n = float(args.length);
  for (int64_t i = 0; i < rows.rounds(); ++i) {
    const bool here = rows.in_group(i) < rows.of_group;
    const int64_t row = (here ? rows.in_group(i) : 0) * args.groups + blockIdx.y;
    Octet<T> x[kOctets], residual[kOctets];
    load_row<aligned>(x, args.x, row, columns);
    if (args.residual) load_row<aligned>(residual, args.residual, row, columns);
    float s[kOctets][8], total = 0, squares = 0, nothing = 0;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      for (int k = 0; k < 8; ++k) {
        s[o][k] = 0;
        if (k >= columns.count(o)) continue;
        s[o][k] = to_float(x[o].at[k]);
        if (args.residual) s[o][k] = rounded<T>(s[o][k] + to_float(residual[o].at[k]));
        total += s[o][k];
      }
      if (args.sum && here && columns.count(o) > 0) {
        store<aligned>(static_cast<T*>(args.sum) + row * args.length + columns.at(o), s[o], columns.count(o));
      }
    }
    team.add(total, nothing);
    const float mean = args.centered ? total / n : 0.0f;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      for (int k = 0; k < 8; ++k) {
        const float centered = k < columns.count(o) ? s[o][k] - mean : 0.0f;
        squares = fmaf(centered, centered, squares);
      }
    }
    team.add(squares, nothing);
    const float var = squares / n;
    const float rstd = args.epsilon_outside ? 1.0f / (sqrtf(var) + args.epsilon) : 1.0f / sqrtf(var + args.epsilon);
    if (!here) continue;
    if (args.mean && threadIdx.x == 0) args.mean[row] = mean, args.rstd[row] = rstd;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      if (columns.count(o) == 0) continue;
      float scale[8], offset[8], y[8];
      load_floats<aligned>(scale, gamma + columns.at(o), columns.count(o));
      load_floats<aligned>(offset, beta + columns.at(o), columns.count(o));
      for (int k = 0; k < 8; ++k) y[k] = fmaf((s[o][k] - mean) * rstd, scale[k], offset[k]);
      store<aligned>(static_cast<T*>(args.y) + row * args.length + columns.at(o), y, columns.count(o));
    }
  }
}

// x̂ = (s - mean)·rstd, g = dy·gamma:  dx = rstd·(g - mean(g)) - slope·x̂·mean(g·x̂) + ds, where slope = -2·drstd/dvar / rstd², which is
// rstd unless epsilon is outside of the root. dgamma = Σ dy·x̂ and dbeta = Σ dy gather in registers over all rows of a thread.
template <class T, bool aligned>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const Args args) {
  __shared__ TeamSums team;
  const Rows rows(args);
  const Columns columns{args.length};
  const int64_t first_channel = blockIdx.y * args.length;
  const float n = float(args.length);
  float dgamma[kOctets][8] = {}, dbeta[kOctets][8] = {};
  for (int64_t i = 0; i < rows.rounds(); ++i) {
    const bool here = rows.in_group(i) < rows.of_group;
    const int64_t row = (here ? rows.in_group(i) : 0) * args.groups + blockIdx.y;
    Octet<T> s[kOctets], dy[kOctets];
    load_row<aligned>(s, args.s, row, columns);
    load_row<aligned>(dy, args.dy, row, columns);
    const float mean = args.mean[row], rstd = args.rstd[row];
    float sum_g = 0, sum_gx = 0;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      if (columns.count(o) == 0 || !here) continue;
      float scale[8];
      load_floats<aligned>(scale, args.gamma + first_channel + columns.at(o), columns.count(o));
      for (int k = 0; k < 8; ++k) {
        if (k >= columns.count(o)) continue;
        const float x = (to_float(s[o].at[k]) - mean) * rstd, g = to_float(dy[o].at[k]);
        dgamma[o][k] = fmaf(g, x, dgamma[o][k]);
        dbeta[o][k] += g;
        sum_g = fmaf(g, scale[k], sum_g);
        sum_gx = fmaf(g * scale[k], x, sum_gx);
      }
    }
    team.add(sum_g, sum_gx);
    if (!here) continue;
    const float slope = args.epsilon_outside ? 1.0f / (1.0f / rstd - args.epsilon) : rstd;
    const float shift = args.centered ? rstd * (sum_g / n) : 0.0f, factor = slope * (sum_gx / n);
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      if (columns.count(o) == 0) continue;
      const int64_t at = row * args.length + columns.at(o);
      float scale[8], dx[8];
      load_floats<aligned>(scale, args.gamma + first_channel + columns.at(o), columns.count(o));
      Octet<T> ds;
      if (args.ds) ds = load<aligned>(static_cast<const T*>(args.ds) + at, columns.count(o));
      for (int k = 0; k < 8; ++k) {
        const float x = (to_float(s[o].at[k]) - mean) * rstd;
        dx[k] = fmaf(rstd * scale[k], to_float(dy[o].at[k]), -shift) - factor * x;
        if (args.ds) dx[k] += to_float(ds.at[k]);
      }
      store<aligned>(static_cast<T*>(args.dx) + at, dx, columns.count(o));
    }
  }
  if (!args.partials) return;
  // The teams' sums of the block, one after the other through shared memory, an octet at a time.
  __shared__ float gammas[8][kThreads], betas[8][kThreads];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int64_t channels = args.groups * args.length;
  float* partials = args.partials + int64_t(blockIdx.x) * 2 * channels + first_channel;
#pragma unroll
  for (int o = 0; o < kOctets; ++o) {
    __syncthreads();
    for (int k = 0; k < 8; ++k) gammas[k][thread] = dgamma[o][k], betas[k][thread] = dbeta[o][k];
    __syncthreads();
    if (threadIdx.y != 0) continue;
    for (int k = 0; k < columns.count(o); ++k) {
      float gamma = 0, beta = 0;
      for (int t = 0; t < int(blockDim.y); ++t) {
        gamma += gammas[k][t * blockDim.x + threadIdx.x], beta += betas[k][t * blockDim.x + threadIdx.x];
      }
      partials[columns.at(o) + k] = gamma, partials[channels + columns.at(o) + k] = beta;
    }
  }
}

}  // namespace jaxfuse::cuda::norm
