// Layer and RMS norm's kernels: y = (s - mean)·rstd·gamma + beta, s = x + residual. A block's threads are teams of blockDim.x, each
// with a row at a time in its registers: read once, the next one on its way meanwhile. Bytes per element in bf16: forward 4 (6 with a
// residual, 8 if the sum is written), backward 6, and 8·parts/rows of partial sums.
#pragma once

#include "norm.h"
#include "number.cuh"

namespace jaxfuse::cuda::norm {

constexpr int kThreads = 512, kMostOctets = 2;  // of a block; that a thread has of a row: 1 of rows to 4096
static_assert(kThreads * kMostOctets * 8 == kLongestRow);
template <class T, bool aligned, int kOctets>
constexpr int kBlocks = sizeof(T) == 2 && aligned && kOctets == 1 ? 2 : 1;  // that fit a multiprocessor: 64 registers a thread, or 128

// Σ over a team of n numbers, the same in every thread of it. All threads of the block must come, with `turn` 0 and 1 in turn: who has
// passed the barrier of one knows that the numbers of the other are read.
struct TeamSums {
  static constexpr int kWarps = kThreads / 32;
  float of_warp[2][2][kWarps];

  template <int n>
  __device__ __forceinline__ void add(float (&v)[n], int turn) {
    for (int k = 0; k < n; ++k) v[k] = warp_sum(v[k], 32);
    const int warps = blockDim.x / 32;
    if (warps == 1) return;
    float(&sums)[2][kWarps] = of_warp[turn];
    if (threadIdx.x % 32 == 0) {
      for (int k = 0; k < n; ++k) sums[k][(threadIdx.y * blockDim.x + threadIdx.x) / 32] = v[k];
    }
    __syncthreads();
    const int warp = threadIdx.x % kWarps;
    for (int k = 0; k < n; ++k) v[k] = warp_sum(warp < warps ? sums[k][threadIdx.y * warps + warp] : 0.0f, kWarps);
  }
};

// This thread's octets of a row: octet o begins at o·8·blockDim.x + 8·threadIdx.x.
template <bool aligned>
struct Columns {
  int64_t length;

  __device__ int64_t at(int o) const { return (int64_t(o) * blockDim.x + threadIdx.x) * 8; }
  __device__ int count(int o) const {
    const int64_t left = length - at(o);
    if constexpr (aligned) return left > 0 ? 8 : 0;
    return left < 0 ? 0 : left < 8 ? int(left) : 8;
  }
};

// Rows go to the blocks of their group in turn, and there to the teams: all do as many rounds, for they meet at barriers.
struct Rows {
  int64_t of_group, round, rounds, groups;  // rows of a group; rows of one round of all its blocks

  __device__ explicit Rows(const Args& args)
      : of_group(args.rows / args.groups), round(int64_t(gridDim.x) * blockDim.y), rounds((of_group + round - 1) / round),
        groups(args.groups) {}
  __device__ int64_t in_group(int64_t i) const { return i * round + int64_t(blockIdx.x) * blockDim.y + threadIdx.y; }
  __device__ bool here(int64_t i) const { return in_group(i) < of_group; }
  __device__ int64_t row(int64_t i) const { return (here(i) ? in_group(i) : 0) * groups + blockIdx.y; }
};

template <bool aligned, class T, int kOctets>
__device__ __forceinline__ void load_row(Octet<T> (&v)[kOctets], const void* tensor, int64_t row, const Columns<aligned>& columns) {
  const T* begin = static_cast<const T*>(tensor) + row * columns.length;
#pragma unroll
  for (int o = 0; o < kOctets; ++o) {
    if (columns.count(o) > 0) v[o] = load<aligned>(begin + columns.at(o), columns.count(o));
  }
}

// Into the second-level cache: what a load of the row then waits for is nearer, and it takes no registers.
template <class T, bool aligned, int kOctets>
__device__ __forceinline__ void fetch_row(const void* tensor, int64_t row, const Columns<aligned>& columns) {
  const T* begin = static_cast<const T*>(tensor) + row * columns.length;
#pragma unroll
  for (int o = 0; o < kOctets; ++o) {
    if (columns.count(o) > 0) fetch(begin + columns.at(o));
  }
}

// Those of this thread's columns, for all rows.
template <bool aligned, int kOctets>
__device__ __forceinline__ void load_parameters(float (&v)[kOctets][8], const float* of_group, const Columns<aligned>& columns) {
#pragma unroll
  for (int o = 0; o < kOctets; ++o) {
    if (columns.count(o) > 0) load_floats<aligned>(v[o], of_group + columns.at(o), columns.count(o));
  }
}

template <class T, bool aligned, int kOctets>
__global__ void __launch_bounds__(kThreads, kBlocks<T, aligned, kOctets>) forward_kernel(const Args args) {
  __shared__ TeamSums team;
  const Rows rows(args);
  const Columns<aligned> columns{args.length};
  const float n = float(args.length);
  float scale[kOctets][8], offset[kOctets][8];
  load_parameters<aligned>(scale, args.gamma + blockIdx.y * args.length, columns);
  load_parameters<aligned>(offset, args.beta + blockIdx.y * args.length, columns);
  Octet<T> x[kOctets], residual[kOctets];
  const auto load = [&](int64_t row) {
    load_row<aligned>(x, args.x, row, columns);
    if (args.residual) load_row<aligned>(residual, args.residual, row, columns);
  };
  load(rows.row(0));
  for (int64_t i = 0; i < rows.rounds; ++i) {
    const bool here = rows.here(i);
    const int64_t row = rows.row(i);
    float s[kOctets][8], total[1] = {}, squares[1] = {};
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      for (int k = 0; k < 8; ++k) {
        s[o][k] = 0;
        if (k >= columns.count(o)) continue;
        s[o][k] = to_float(x[o].at[k]);
        if (args.residual) s[o][k] = rounded<T>(s[o][k] + to_float(residual[o].at[k]));
        total[0] += s[o][k];
      }
      if (args.sum && here && columns.count(o) > 0) {
        store<aligned>(static_cast<T*>(args.sum) + row * args.length + columns.at(o), s[o], columns.count(o));
      }
    }
    if (i + 1 < rows.rounds) load(rows.row(i + 1));
    team.add(total, 0);
    const float mean = args.centered ? total[0] / n : 0.0f;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      for (int k = 0; k < 8; ++k) {
        const float centered = k < columns.count(o) ? s[o][k] - mean : 0.0f;
        squares[0] = fmaf(centered, centered, squares[0]);
      }
    }
    team.add(squares, 1);
    const float var = squares[0] / n;
    const float rstd = args.epsilon_outside ? 1.0f / (sqrtf(var) + args.epsilon) : 1.0f / sqrtf(var + args.epsilon);
    if (!here) continue;
    if (args.mean && threadIdx.x == 0) args.mean[row] = mean, args.rstd[row] = rstd;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      if (columns.count(o) == 0) continue;
      float y[8];
      for (int k = 0; k < 8; ++k) y[k] = fmaf((s[o][k] - mean) * rstd, scale[o][k], offset[o][k]);
      store<aligned>(static_cast<T*>(args.y) + row * args.length + columns.at(o), y, columns.count(o));
    }
  }
}

// x̂ = (s - mean)·rstd, g = dy·gamma:  dx = rstd·(g - mean(g)) - slope·x̂·mean(g·x̂) + ds, where slope = -2·drstd/dvar / rstd², which is
// rstd unless epsilon is outside of the root. dgamma = Σ dy·x̂ and dbeta = Σ dy gather in registers over all rows of a thread.
template <class T, bool aligned, int kOctets>
__global__ void __launch_bounds__(kThreads, kBlocks<T, aligned, kOctets>) backward_kernel(const Args args) {
  __shared__ TeamSums team;
  const Rows rows(args);
  const Columns<aligned> columns{args.length};
  const int64_t first_channel = blockIdx.y * args.length;
  const float n = float(args.length);
  float scale[kOctets][8], dgamma[kOctets][8] = {}, dbeta[kOctets][8] = {};
  load_parameters<aligned>(scale, args.gamma + first_channel, columns);
  for (int64_t i = 0; i < rows.rounds; ++i) {
    const bool here = rows.here(i);
    const int64_t row = rows.row(i);
    Octet<T> s[kOctets], dy[kOctets];
    load_row<aligned>(s, args.s, row, columns);
    load_row<aligned>(dy, args.dy, row, columns);
    const float mean = args.mean[row], rstd = args.rstd[row];
    if (i + 1 < rows.rounds) {
      fetch_row<T, aligned, kOctets>(args.s, rows.row(i + 1), columns);
      fetch_row<T, aligned, kOctets>(args.dy, rows.row(i + 1), columns);
    }
    float sums[2] = {};  // of g and g·x̂
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      for (int k = 0; k < 8; ++k) {
        if (k >= columns.count(o) || !here) continue;
        const float x = (to_float(s[o].at[k]) - mean) * rstd, g = to_float(dy[o].at[k]);
        dgamma[o][k] = fmaf(g, x, dgamma[o][k]);
        dbeta[o][k] += g;
        sums[0] = fmaf(g, scale[o][k], sums[0]);
        sums[1] = fmaf(g * scale[o][k], x, sums[1]);
      }
    }
    team.add(sums, i % 2);
    if (!here) continue;
    const float slope = args.epsilon_outside ? 1.0f / (1.0f / rstd - args.epsilon) : rstd;
    const float shift = args.centered ? rstd * (sums[0] / n) : 0.0f, factor = slope * (sums[1] / n);
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      if (columns.count(o) == 0) continue;
      const int64_t at = row * args.length + columns.at(o);
      float dx[8];
      Octet<T> ds;
      if (args.ds) ds = load<aligned>(static_cast<const T*>(args.ds) + at, columns.count(o));
      for (int k = 0; k < 8; ++k) {
        const float x = (to_float(s[o].at[k]) - mean) * rstd;
        dx[k] = fmaf(rstd * scale[o][k], to_float(dy[o].at[k]), -shift) - factor * x;
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
