// Depthwise convolution's kernels. In a block x counts octets of channels, y counts pixels. Bytes per element of the
// output that are read and written, in bf16, with stride 1 and windows of at most 9 taps:
//   convolve 4 (6 with z)                                 forward
//   filter_gradient 8 (x, dy, saved activation, dz), convolve 4       backward
#pragma once

#include "activation.cuh"
#include "columns.cuh"
#include "depthwise.h"

namespace jaxfuse::cuda::depthwise {

constexpr int kPixels = 4;  // of a row, of which a thread makes the sums together: each number of the filter is read once for them
constexpr int kTaps = 9;  // whose sums a thread keeps in registers
constexpr int kFilterThreads = 128;  // of the kernel that does: three blocks of them, with 168 registers, fit a multiprocessor

// The input that output t reads for tap k of the window; negative where that is in the padding.
__device__ __forceinline__ int32_t source(const Axis& axis, int32_t t, int32_t k) {
  int32_t at = t * axis.stride + axis.low + k * axis.rhs_dilation;
  if (axis.lhs_dilation != 1) {
    if (at < 0 || at % axis.lhs_dilation != 0) return -1;
    at /= axis.lhs_dilation;
  }
  return at < axis.in ? at : -1;
}

// Division in 64 bits takes a GPU several times as long.
HOST_DEVICE int64_t quotient(int64_t n, int32_t d) { return n >> 32 == 0 ? int64_t(uint32_t(n) / uint32_t(d)) : n / d; }

// Neighbouring items for a block, so that what their windows share is in its cache.
struct Run {
  int64_t begin, end;

  __device__ Run(int64_t items, int32_t parts) {
    const int64_t rounds = (items + blockDim.y - 1) / blockDim.y, mine = (rounds + parts - 1) / parts * blockDim.y;
    begin = blockIdx.y * mine;
    end = begin + mine < items ? begin + mine : items;
  }
};

template <class T, bool aligned>
__device__ __forceinline__ void finish(const Args& args, const Place& place, int64_t pixel, float (&z)[8]) {
  float v[8];
  if (args.scale) {
    load_floats<aligned>(v, args.scale + place.channel, place.count);
    for (int i = 0; i < 8; ++i) z[i] *= v[i];
  }
  if (args.bias) {
    load_floats<aligned>(v, args.bias + place.channel, place.count);
    for (int i = 0; i < 8; ++i) z[i] += v[i];
  }
  if (args.z) store<aligned>(static_cast<T*>(args.z) + pixel * args.channels + place.channel, z, place.count);
  for (int i = 0; i < 8; ++i) v[i] = activated(args.activation, z[i], args.parameters);
  store<aligned>(static_cast<T*>(args.y) + pixel * args.channels + place.channel, v, place.count);
}

template <class T, bool aligned>
__global__ void __launch_bounds__(kThreads, 2) convolve_kernel(const Args args) {
  const Place place(args.channels);
  if (place.count <= 0) return;
  const Axis &height = args.height, &width = args.width;
  const int32_t strips = (width.out + kPixels - 1) / kPixels;  // of a row
  const Run run(args.images * height.out * strips, gridDim.y);
  for (int64_t strip = run.begin + threadIdx.y; strip < run.end; strip += blockDim.y) {
    const int64_t row = quotient(strip, strips), image = quotient(row, height.out);
    const int32_t top = int32_t(row - image * height.out), left = int32_t(strip - row * strips) * kPixels;
    float sum[kPixels][8] = {};
    for (int32_t kh = 0; kh < height.window; ++kh) {
      const int32_t line = source(height, top, kh);
      if (line < 0) continue;
      const T* x = row_of<T>(args.x, (image * height.in + line) * width.in, args.channels, place.channel);
      for (int32_t kw = 0; kw < width.window; ++kw) {
        const int64_t k = kh * width.window + kw;
        const Octet<T> w = load<aligned>(row_of<T>(args.w, k, args.channels, place.channel), place.count);
        int32_t at[kPixels];
        Octet<T> pixel[kPixels];
#pragma unroll
        for (int p = 0; p < kPixels; ++p) {
          at[p] = source(width, left + p, kw);
          pixel[p] = load<aligned>(x + int64_t(at[p] < 0 ? 0 : at[p]) * args.channels, place.count);
        }
#pragma unroll
        for (int p = 0; p < kPixels; ++p) {
          if (at[p] < 0) continue;  // not times zero: an Inf would become a NaN
          for (int i = 0; i < 8; ++i) sum[p][i] = fmaf(to_float(pixel[p].at[i]), to_float(w.at[i]), sum[p][i]);
        }
      }
    }
    // One pixel after the other from the same registers, which the next one's sums then move into: the activations are long code.
#pragma unroll 1
    for (int32_t p = 0; p < kPixels && left + p < width.out; ++p) {
      finish<T, aligned>(args, place, row * width.out + left + p, sum[0]);
#pragma unroll
      for (int next = 1; next < kPixels; ++next) {
        for (int i = 0; i < 8; ++i) sum[next - 1][i] = sum[next][i];
      }
    }
  }
}

// Σ dz·x for each tap of the window, and Σ dz, over the pixels of a part; blocks of the next z take the next taps.
template <class T, bool aligned>
__global__ void __launch_bounds__(kFilterThreads, 3) filter_gradient_kernel(const Args args) {
  __shared__ Lanes lanes;
  const Place place(args.channels);
  const Axis &height = args.height, &width = args.width;
  const int32_t taps = height.window * width.window, first = blockIdx.z * kTaps;
  float sums[kTaps][8] = {}, sum[8] = {};
  if (place.count > 0) {
    const Run run(args.images * height.out * width.out, args.parts);
    for (int64_t pixel = run.begin + threadIdx.y; pixel < run.end; pixel += blockDim.y) {
      const int64_t row = quotient(pixel, width.out), image = quotient(row, height.out);
      const int32_t top = int32_t(row - image * height.out), left = int32_t(pixel - row * width.out);
      const Octet<T> dy = load<aligned>(row_of<T>(args.dy, pixel, args.channels, place.channel), place.count);
      float dz[8];
      for (int i = 0; i < 8; ++i) dz[i] = to_float(dy.at[i]);
      if (args.saved_activation) {
        const Octet<T> saved = load<aligned>(row_of<T>(args.saved_activation, pixel, args.channels, place.channel), place.count);
        for (int i = 0; i < 8; ++i) {
          dz[i] = args.derivative_from_y ? pulled_back_from_y(args.activation, dz[i], to_float(saved.at[i]), args.parameters)
                                         : pulled_back(args.activation, dz[i], to_float(saved.at[i]), args.parameters);
        }
        if (first == 0) store<aligned>(static_cast<T*>(args.dz) + pixel * args.channels + place.channel, dz, place.count);
      }
      for (int i = 0; i < 8; ++i) sum[i] += dz[i];
      int32_t kh = first / width.window, kw = first % width.window;
#pragma unroll
      for (int t = 0; t < kTaps; ++t) {
        const int32_t line = source(height, top, kh), at = source(width, left, kw);
        if (first + t < taps && line >= 0 && at >= 0) {
          const Octet<T> x = load<aligned>(
              row_of<T>(args.x, (image * height.in + line) * width.in + at, args.channels, place.channel), place.count);
#pragma unroll
          for (int i = 0; i < 8; ++i) sums[t][i] = fmaf(dz[i], to_float(x.at[i]), sums[t][i]);
        }
        if (++kw == width.window) kw = 0, ++kh;
      }
    }
  }
  float* partials = args.partials + int64_t(blockIdx.y) * (taps + 1) * args.channels;
#pragma unroll
  for (int t = 0; t < kTaps; ++t) {
    if (first + t < taps) lanes.add_up(sums[t], place, partials + (first + t) * args.channels);
  }
  if (first == 0) lanes.add_up(sum, place, partials + taps * args.channels);
}

}  // namespace jaxfuse::cuda::depthwise
