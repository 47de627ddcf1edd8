// Batch norm's kernels. A block has 256 threads: x counts octets of channels, y counts rows. Bytes per element that are read
// and written, in bf16 with residual and mask:
//   stats 2, apply 6.125                      forward 8.125
//   backward_stats 4.125, backward_apply 8.125    backward 12.25
#pragma once

#include "activation.cuh"
#include "batch_norm.h"
#include "columns.cuh"
#include "deal.cuh"

namespace jaxfuse::cuda::batch_norm {

// Rows whose loads a thread has in flight together: 8 accesses of 16 bytes of each tensor in stats, 4 where two are read.
template <class T, bool aligned>
constexpr int kStatsRows = sizeof(T) == 2 && aligned ? 8 : 4;
template <class T>
constexpr int kRows = sizeof(T) == 2 ? 4 : 2;

// ---- sums over rows: within a thread, over the lanes of a block in a tree, over the parts in column_sums.cu

// Two numbers for each thread and channel, side by side so that threads meet no bank conflicts.
struct PairLanes {
  float first[8][kThreads], second[8][kThreads];
};

// add(n, i of this lane, other lane's thread, other_n) halves the lanes until one is left.
template <class Add>
__device__ __forceinline__ void over_lanes(const Deal& deal, Add add) {
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.y) < half) {
      const int lane = threadIdx.y;
      add(float(deal.count(blockIdx.y, lane, 2 * half)), (lane + half) * blockDim.x + threadIdx.x,
          float(deal.count(blockIdx.y, lane + half, 2 * half)));
    }
  }
}

__device__ __forceinline__ void store_partials(const Args& args, const PairLanes& lanes, const Place& place, int thread) {
  if (threadIdx.y != 0) return;
  float* partials = args.partials + int64_t(blockIdx.y) * 2 * args.channels + place.channel;
  for (int i = 0; i < 8; ++i) {
    if (i < place.count) partials[i] = lanes.first[i][thread], partials[args.channels + i] = lanes.second[i][thread];
  }
}

// Sums about a shift, the mean of the thread's first rows: (mean - shift)² <= n/m·variance with m of them, so what
// Σ d² - (Σ d)²/n cancels is at most n/m times what it leaves. An Inf or NaN among them must not spoil the other rows' d.
template <class T, bool aligned>
__global__ void __launch_bounds__(kThreads, 2) stats_kernel(const Args args) {
  constexpr int kUnroll = kStatsRows<T, aligned>;
  __shared__ PairLanes lanes;
  const Deal deal{args.rows, args.parts, int32_t(blockDim.y) * kUnroll};
  const Place place(args.channels);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  float shift[8] = {}, sum[8] = {}, square[8] = {};
  if (place.count > 0) {
    for (int64_t chunk = blockIdx.y; chunk < deal.chunks(); chunk += args.parts) {
      const int64_t row = chunk * deal.chunk + threadIdx.y;
      Octet<T> x[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t r = row + u * blockDim.y;
        x[u] = load<aligned>(row_of<T>(args.x, r < args.rows ? r : 0, args.channels, place.channel), place.count);
      }
      if (chunk == blockIdx.y) {
        for (int i = 0; i < 8; ++i) {
          float total = 0, n = 0;
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            if (row + u * blockDim.y < args.rows) total += x[u].at(i), n += 1;
          }
          const float mean = total / n;
          shift[i] = mean - mean == 0.0f ? mean : 0.0f;
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u * blockDim.y >= args.rows) continue;
        for (int i = 0; i < 8; ++i) {
          const float d = x[u].at(i) - shift[i];
          sum[i] += d;
          square[i] = fmaf(d, d, square[i]);
        }
      }
    }
  }
  const float n = float(deal.count(blockIdx.y, threadIdx.y, blockDim.y));
  for (int i = 0; i < 8; ++i) {
    const float moved = n > 0 ? sum[i] / n : 0.0f, m2 = square[i] - sum[i] * moved;
    lanes.first[i][thread] = shift[i] + moved;
    lanes.second[i][thread] = m2 < 0 ? 0.0f : m2;
  }
  over_lanes(deal, [&](float n, int other, float other_n) {
    for (int i = 0; i < 8; ++i) {
      Moments moments{lanes.first[i][thread], lanes.second[i][thread]};
      moments.add(n, {lanes.first[i][other], lanes.second[i][other]}, other_n);
      lanes.first[i][thread] = moments.mean, lanes.second[i][thread] = moments.m2;
    }
  });
  store_partials(args, lanes, place, thread);
}

// ---- z, y and g

// z = (x - center)·scale + offset, the same bits wherever it is computed.
template <bool aligned>
struct Affine {
  float center[8], scale[8], offset[8];

  __device__ Affine(const Args& args, const Place& place) {
    load_floats<aligned>(center, args.center + place.channel, place.count);
    load_floats<aligned>(scale, args.scale + place.channel, place.count);
    load_floats<aligned>(offset, args.offset + place.channel, place.count);
  }
  __device__ float operator()(float x, int i) const { return fmaf(x - center[i], scale[i], offset[i]); }
};

// Where the derivative is 1, of an activation that has a mask.
HOST_DEVICE bool passes(Activation activation, float z, const Parameters& parameters) {
  return activation == Activation::relu ? z > 0.0f : slope_at(parameters.pieces, parameters.pieces.bounds, z) == 1.0f;
}

// Rows from the end to the beginning, for the last ones read by stats are in the cache. `any`: every activation, and a residual or not;
// else none or relu.
template <class T, bool aligned, bool any, bool has_residual>
__global__ void __launch_bounds__(kThreads, 2) apply_kernel(const Args args) {
  constexpr int kUnroll = any ? 1 : kRows<T>;
  const Place place(args.channels);
  if (place.count <= 0) return;
  const Affine<aligned> affine(args, place);
  const bool adds = any ? args.residual != nullptr : has_residual, relu = args.activation == Activation::relu;
  const int chunk_rows = blockDim.y * kUnroll;
  const int64_t chunks = (args.rows + chunk_rows - 1) / chunk_rows, mask_bytes = (args.channels + 7) / 8;
  for (int64_t chunk = chunks - 1 - blockIdx.y; chunk >= 0; chunk -= gridDim.y) {
    const int64_t row = chunk * chunk_rows + threadIdx.y;
    Octet<T> x[kUnroll], residual[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t r = row + u * blockDim.y, at = r < args.rows ? r : 0;
      x[u] = load<aligned>(row_of<T>(args.x, at, args.channels, place.channel), place.count);
      if (adds) residual[u] = load<aligned>(row_of<T>(args.residual, at, args.channels, place.channel), place.count);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t r = row + u * blockDim.y;
      if (r >= args.rows) continue;
      float y[8];
      uint32_t bits = 0;
      for (int i = 0; i < 8; ++i) {
        float z = affine(x[u].at(i), i);
        if (adds) z += residual[u].at(i);
        if constexpr (any) {
          y[i] = activated(args.activation, z, args.parameters);
          z = rounded<T>(z);
        } else {
          z = rounded<T>(z);
          y[i] = relu && z <= 0.0f ? 0.0f : z;
        }
        if (i < place.count) bits |= uint32_t(any ? passes(args.activation, z, args.parameters) : z > 0.0f) << i;
      }
      store<aligned>(static_cast<T*>(args.y) + r * args.channels + place.channel, y, place.count);
      if (args.saved_mask) args.saved_mask[r * mask_bytes + place.channel / 8] = uint8_t(bits);
    }
  }
}

// Where the derivative comes from: nowhere, the mask, z of a relu without residual, or what the arguments say.
enum class Source { none, mask, relu, any };

template <class T, bool aligned, Source source>
struct Gradient {
  static constexpr int kUnroll = source == Source::any ? 1 : kRows<T>;
  struct Empty {
    __device__ Empty(const Args&, const Place&) {}
    __device__ float operator()(float, int) const { return 0; }
  };
  static constexpr bool kRecomputes = source == Source::relu || source == Source::any;
  std::conditional_t<kRecomputes, Affine<aligned>, Empty> affine;
  const Args& args;
  const Place& place;
  bool by_mask, recomputes;
  int64_t mask_bytes;
  Octet<T> dy[kUnroll], x[kUnroll], residual[1];
  uint8_t bits[kUnroll];

  // Without a need for them the coefficients are those of mean: any that can be read.
  __device__ Gradient(const Args& args, const Place& place)
      : affine(args, place),
        args(args),
        place(place),
        by_mask(source == Source::mask || (source == Source::any && args.derivative == Derivative::mask)),
        recomputes(source == Source::relu || (source == Source::any && args.derivative == Derivative::recompute)),
        mask_bytes((args.channels + 7) / 8) {}

  __device__ __forceinline__ void load_rows(int64_t row) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t r = row + u * blockDim.y, at = r < args.rows ? r : 0;
      dy[u] = load<aligned>(row_of<T>(args.dy, at, args.channels, place.channel), place.count);
      x[u] = load<aligned>(row_of<T>(args.x, at, args.channels, place.channel), place.count);
      if (by_mask) bits[u] = args.mask[at * mask_bytes + place.channel / 8];
      if (source == Source::any && recomputes && args.residual) {
        residual[0] = load<aligned>(row_of<T>(args.residual, at, args.channels, place.channel), place.count);
      }
    }
  }

  // g of element i of row u.
  __device__ __forceinline__ float operator()(int u, int i) const {
    const float g = dy[u].at(i);
    if (by_mask) return bits[u] >> i & 1 ? g : 0.0f;
    if (!recomputes) return g;
    float z = affine(x[u].at(i), i);
    if constexpr (source == Source::any) {
      if (args.residual) z += residual[0].at(i);
      if (is_gate(args.activation)) z = rounded<T>(z);
      return pulled_back(args.activation, g, z, args.parameters);
    }
    return rounded<T>(z) > 0.0f ? g : 0.0f;
  }
};

template <class T, bool aligned, Source source>
__global__ void __launch_bounds__(kThreads, 2) backward_stats_kernel(const Args args) {
  using G = Gradient<T, aligned, source>;
  __shared__ PairLanes lanes;
  const Deal deal{args.rows, args.parts, int32_t(blockDim.y) * G::kUnroll};
  const Place place(args.channels);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  float sum_g[8] = {}, sum_gx[8] = {};
  if (place.count > 0) {
    G gradient(args, place);
    float mean[8];
    load_floats<aligned>(mean, args.mean + place.channel, place.count);
    for (int64_t chunk = blockIdx.y; chunk < deal.chunks(); chunk += args.parts) {
      const int64_t row = chunk * deal.chunk + threadIdx.y;
      gradient.load_rows(row);
#pragma unroll
      for (int u = 0; u < G::kUnroll; ++u) {
        if (row + u * blockDim.y >= args.rows) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float g = gradient(u, i);
          sum_g[i] += g;
          sum_gx[i] = fmaf(g, gradient.x[u].at(i) - mean[i], sum_gx[i]);
        }
      }
    }
  }
  for (int i = 0; i < 8; ++i) lanes.first[i][thread] = sum_g[i], lanes.second[i][thread] = sum_gx[i];
  over_lanes(deal, [&](float, int other, float) {
    for (int i = 0; i < 8; ++i) {
      lanes.first[i][thread] += lanes.first[i][other];
      lanes.second[i][thread] += lanes.second[i][other];
    }
  });
  store_partials(args, lanes, place, thread);
}

// From the end to the beginning, as apply.
template <class T, bool aligned, Source source>
__global__ void __launch_bounds__(kThreads, 2) backward_apply_kernel(const Args args) {
  using G = Gradient<T, aligned, source>;
  const Place place(args.channels);
  if (place.count <= 0) return;
  G gradient(args, place);
  float mean[8], a[8], b[8], c[8];
  load_floats<aligned>(mean, args.mean + place.channel, place.count);
  load_floats<aligned>(a, args.a + place.channel, place.count);
  load_floats<aligned>(b, args.b + place.channel, place.count);
  load_floats<aligned>(c, args.c + place.channel, place.count);
  const int chunk_rows = blockDim.y * G::kUnroll;
  const int64_t chunks = (args.rows + chunk_rows - 1) / chunk_rows;
  for (int64_t chunk = chunks - 1 - blockIdx.y; chunk >= 0; chunk -= gridDim.y) {
    const int64_t row = chunk * chunk_rows + threadIdx.y;
    gradient.load_rows(row);
#pragma unroll
    for (int u = 0; u < G::kUnroll; ++u) {
      const int64_t r = row + u * blockDim.y;
      if (r >= args.rows) continue;
      float g[8], dx[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        g[i] = gradient(u, i);
        dx[i] = fmaf(a[i], g[i], fmaf(b[i], gradient.x[u].at(i) - mean[i], c[i]));
      }
      store<aligned>(static_cast<T*>(args.dx) + r * args.channels + place.channel, dx, place.count);
      if (args.dresidual) store<aligned>(static_cast<T*>(args.dresidual) + r * args.channels + place.channel, g, place.count);
    }
  }
}

}  // namespace jaxfuse::cuda::batch_norm
