// Layer and RMS norm's kernels: y = (s - mean)·rstd·gamma + beta, s = x + residual. A block's threads are teams of blockDim.x, each
// with a row at a time in its registers: read once. Forward a team has one row. Backward it has many, for it gathers dgamma and dbeta,
// and the next row is on its way meanwhile. Bytes per element in bf16: forward 4 (6 with a residual, 8 if the sum is written),
// backward 6, and 8·parts/rows of partial sums.
#pragma once

#include "norm.h"
#include "number.cuh"

namespace jaxfuse::cuda::norm {

// Threads of a block at most, and octets of a row that a thread has at most.
struct Forward {
  static constexpr int kThreads = 256, kOctets = 4;
};
struct Backward {
  static constexpr int kThreads = 512, kOctets = 2;
};
static_assert(Forward::kThreads * Forward::kOctets * 8 == kLongestRow && Backward::kThreads * Backward::kOctets * 8 == kLongestRow);

// Σ over a team of n numbers, the same in every thread of it. All threads of the block must come, with `turn` 0 and 1 in turn: who has
// passed the barrier of one knows that the numbers of the other are read.
struct TeamSums {
  static constexpr int kWarps = Backward::kThreads / 32;
  float of_warp[2][3][kWarps];

  template <int n>
  __device__ __forceinline__ void add(float (&v)[n], int turn) {
    for (int k = 0; k < n; ++k) v[k] = warp_sum(v[k], 32);
    const int warps = blockDim.x / 32;
    if (warps == 1) return;
    float(&sums)[3][kWarps] = of_warp[turn];
    if (threadIdx.x % 32 == 0) {
      for (int k = 0; k < n; ++k) sums[k][(threadIdx.y * blockDim.x + threadIdx.x) / 32] = v[k];
    }
    __syncthreads();
    const int warp = threadIdx.x % kWarps;
    for (int k = 0; k < n; ++k) v[k] = warp_sum(warp < warps ? sums[k][threadIdx.y * warps + warp] : 0.0f, kWarps);
  }
};

__device__ __forceinline__ float sum_of(const float (&v)[8]) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

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
      : of_group(args.rows), round(int64_t(gridDim.x) * blockDim.y), rounds((of_group + round - 1) / round),
        groups(args.groups) {}
  __device__ int64_t in_group(int64_t i) const { return i * round + int64_t(blockIdx.x) * blockDim.y + threadIdx.y; }
  __device__ bool here(int64_t i) const { return in_group(i) < of_group; }
  __device__ int64_t row(int64_t i) const { return (here(i) ? in_group(i) : 0) * groups + blockIdx.y; }
};

// Zeros where the row has no more elements.
template <bool aligned, class T, int kOctets>
__device__ __forceinline__ void load_row(Octet<T> (&v)[kOctets], const void* tensor, int64_t row, const Columns<aligned>& columns) {
  const T* begin = static_cast<const T*>(tensor) + row * columns.length;
#pragma unroll
  for (int o = 0; o < kOctets; ++o) {
    v[o] = columns.count(o) > 0 ? load<aligned, true>(begin + columns.at(o), columns.count(o)) : Octet<T>{};
  }
}

template <class T, bool aligned, int kOctets>
__global__ void __launch_bounds__(Forward::kThreads, sizeof(T) == 2 && aligned ? 3 : 2) forward_kernel(const Args args) {
  __shared__ TeamSums team;
  const Columns<aligned> columns{args.length};
  const int64_t in_group = int64_t(blockIdx.x) * blockDim.y + threadIdx.y, first_channel = blockIdx.y * args.length;
  const bool here = in_group < args.rows;  // all threads meet at barriers
  const int64_t row = (here ? in_group : 0) * args.groups + blockIdx.y;
  Octet<T> x[kOctets];
  load_row<aligned>(x, args.x, row, columns);
  float s[kOctets][8], total[1] = {}, squares[1] = {};
#pragma unroll
  for (int o = 0; o < kOctets; ++o) {
    for (int k = 0; k < 8; ++k) s[o][k] = x[o].at(k);
  }
  if (args.residual) {
    load_row<aligned>(x, args.residual, row, columns);
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      for (int k = 0; k < 8; ++k) s[o][k] += x[o].at(k);
      const Octet<T> rounded = Octet<T>::of(s[o]);
      for (int k = 0; k < 8; ++k) s[o][k] = rounded.at(k);
      if (args.sum && here && columns.count(o) > 0) {
        store<aligned, true>(static_cast<T*>(args.sum) + row * args.length + columns.at(o), s[o], columns.count(o));
      }
    }
  }
  float mean = 0;
  if (args.centered) {
#pragma unroll
    for (int o = 0; o < kOctets; ++o) total[0] += sum_of(s[o]);
    team.add(total, 0);
    mean = total[0] * args.inverse_length;
  }
#pragma unroll
  for (int o = 0; o < kOctets; ++o) {
    if (columns.count(o) == 0) continue;
    float square[8];
    for (int k = 0; k < 8; ++k) {
      const float centered = aligned || k < columns.count(o) ? s[o][k] - mean : 0.0f;
      square[k] = centered * centered;
    }
    squares[0] += sum_of(square);
  }
  team.add(squares, 1);
  const float var = squares[0] * args.inverse_length;
  const float rstd = args.epsilon_outside ? 1.0f / (sqrtf(var) + args.epsilon) : 1.0f / sqrtf(var + args.epsilon);
  if (!here) return;
  if (args.mean && threadIdx.x == 0) args.mean[row] = mean, args.rstd[row] = rstd;
#pragma unroll
  for (int o = 0; o < kOctets; ++o) {
    if (columns.count(o) == 0) continue;
    float scale[8], y[8];  // y: beta at first
    load_floats<aligned>(scale, args.gamma + first_channel + columns.at(o), columns.count(o));
    load_floats<aligned>(y, args.beta + first_channel + columns.at(o), columns.count(o));
    for (int k = 0; k < 8; ++k) y[k] = fmaf((s[o][k] - mean) * rstd, scale[k], y[k]);
    store<aligned, true>(static_cast<T*>(args.y) + row * args.length + columns.at(o), y, columns.count(o));
  }
}

// x̂ = (s - mean)·rstd, g = dy·gamma:  dx = rstd·(g - mean(g)) - slope·x̂·mean(g·x̂) + ds, where slope = -2·drstd/dvar / rstd², which is
// rstd unless epsilon is outside of the root. dgamma = Σ dy·x̂ and dbeta = Σ dy gather in registers over all rows of a thread.
template <class T, bool aligned, int kOctets>
__global__ void __launch_bounds__(Backward::kThreads, 1) backward_kernel(const Args args) {
  __shared__ TeamSums team;
  const Rows rows(args);
  const Columns<aligned> columns{args.length};
  const int64_t first_channel = blockIdx.y * args.length;
  float dgamma[kOctets][8] = {}, dbeta[kOctets][8] = {};
  Octet<T> s[kOctets], dy[kOctets], next_s[kOctets], next_dy[kOctets];
  float mean, rstd, next_mean, next_rstd;
  const auto take_next = [&](int64_t row) {
    next_mean = args.mean[row], next_rstd = args.rstd[row];
    load_row<aligned>(next_s, args.s, row, columns);
    load_row<aligned>(next_dy, args.dy, row, columns);
  };
  constexpr bool kAhead = sizeof(T) == 2;  // of f32 the registers hold one row
  if (kAhead) take_next(rows.row(0));
  for (int64_t i = 0; i < rows.rounds; ++i) {
    const bool here = rows.here(i);
    const int64_t row = rows.row(i);
    if (!kAhead) take_next(row);
    mean = next_mean, rstd = next_rstd;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) s[o] = next_s[o], dy[o] = next_dy[o];
    if (kAhead && i + 1 < rows.rounds) take_next(rows.row(i + 1));
    float sums[3] = {};  // of g, g·x̂ and (s - mean)²
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      if (columns.count(o) == 0 || !here) continue;
      float scale[8];
      load_floats<aligned>(scale, args.gamma + first_channel + columns.at(o), columns.count(o));
      for (int k = 0; k < 8; ++k) {  // where there is no column, dy is 0
        const float centered = aligned || k < columns.count(o) ? s[o].at(k) - mean : 0.0f, x = centered * rstd, g = dy[o].at(k);
        dgamma[o][k] = fmaf(g, x, dgamma[o][k]);
        dbeta[o][k] += g;
        sums[0] = fmaf(g, scale[k], sums[0]);
        sums[1] = fmaf(g * scale[k], x, sums[1]);
        sums[2] = fmaf(centered, centered, sums[2]);
      }
    }
    team.add(sums, i % 2);
    if (!here) continue;
    const float slope = args.epsilon_outside ? 1.0f / sqrtf(sums[2] * args.inverse_length) : rstd;
    const float shift = args.centered ? rstd * (sums[0] * args.inverse_length) : 0.0f, factor = slope * (sums[1] * args.inverse_length);
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      if (columns.count(o) == 0) continue;
      const int64_t at = row * args.length + columns.at(o);
      float scale[8], dx[8];
      load_floats<aligned>(scale, args.gamma + first_channel + columns.at(o), columns.count(o));
      Octet<T> ds;
      if (args.ds) ds = load<aligned, true>(static_cast<const T*>(args.ds) + at, columns.count(o));
      for (int k = 0; k < 8; ++k) {
        const float x = (s[o].at(k) - mean) * rstd;
        dx[k] = fmaf(rstd * scale[k], dy[o].at(k), -shift) - factor * x;
        if (args.ds) dx[k] += ds.at(k);
      }
      store<aligned, true>(static_cast<T*>(args.dx) + at, dx, columns.count(o));
    }
  }
  if (!args.partials) return;
  // The teams' sums of the block, one after the other through shared memory, an octet at a time.
  __shared__ float gammas[8][Backward::kThreads], betas[8][Backward::kThreads];
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
