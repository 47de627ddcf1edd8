// Lines of few channels, in the first-level cache: every distance is known, so that a product costs one instruction.
#pragma once

#include "conv_depthwise_kernels.h"
#include "simd.h"

namespace jaxfuse::conv::depthwise {
namespace {

constexpr int64_t kLineStep = kLanes == 4 ? 8 : 32;  // as many channels as the contraction multiplies pixels by together

// Outputs [begin, end) for the channels of one vector, `count` together. Tap by tap: the sums of one do not wait for each other. Numbers by
// value: no store changes them. No vectors by value: where they are, GCC leaves their registers in use at the end, and on Intel's CPUs
// the next instruction of SSE waits (benchmarks/README.md).
template <int n, int stride, int count, class Lanes>
[[gnu::noinline]] void convolve_outputs(const Row* rows, int64_t n_rows, const float* w, const float* bias, int64_t begin, int64_t end, float* y,
                                        int64_t step, float low, float high, int64_t c, Lanes lanes) {
  const Floats start = bias ? load(bias + c, lanes) : Floats{};
  for (int64_t o = begin; o < end; o += count) {
    Floats sum[count];
    for (Floats& s : sum) s = start;
    for (int64_t r = 0; r < n_rows; ++r) {
      const float *x = static_cast<const float*>(rows[r].x) + o * stride * kLineStep + c, *taps = w + rows[r].tap * kLineStep;
#pragma GCC unroll 8
      for (int t = 0; t < n; ++t) {
        const Floats tap = load(taps + t * kLineStep);
#pragma GCC unroll 16
        for (int i = 0; i < count; ++i) sum[i] = multiply_add(tap, load(x + (i * stride + t) * kLineStep), sum[i]);
      }
    }
    const auto write = [&](int i) { store(y + (o + i) * step, at_most(high, at_least(low, sum[i])), lanes); };
    if (o + count <= end) {
#pragma GCC unroll 16
      for (int i = 0; i < count; ++i) write(i);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < count; ++i) {
        if (o + i < end) write(i);
      }
    }
  }
}

// Some outputs for all channels before the next: two vectors share a line of the cache, which does not hold three lines of a large image.
template <int n, int stride, int count>
void convolve_blocks(const Line& line) {
  constexpr int64_t kBlock = 28 / count * count;
  for (int64_t begin = 0; begin < line.outputs; begin += kBlock) {
    const int64_t end = begin + kBlock < line.outputs ? begin + kBlock : line.outputs;
    for_vectors(0, line.channels, [&](int64_t c, auto lanes) {
      convolve_outputs<n, stride, count>(line.rows, line.n_rows, line.w + c, line.bias, begin, end, line.y + c, line.out_step, line.low,
                                         line.high, c, lanes);
    });
  }
}

template <int n, int stride>
void convolve_line(const Line& line) {
  // Of a long filter the sums wait for their own products: more of them are under way together.
  if (n > 3 && line.outputs % 14 == 0) return convolve_blocks<n, stride, 14>(line);
  line.outputs % 7 == 0 ? convolve_blocks<n, stride, 7>(line) : convolve_blocks<n, stride, kTogether>(line);
}

template <int n>
void convolve_line(const Line& line) {
  line.stride == 1 ? convolve_line<n, 1>(line) : convolve_line<n, 2>(line);
}

bool copy_tap(const float* from, int64_t channels, float* to) {
  Floats seen{};
  for (int64_t c = 0; c < kLineStep; c += kLanes) {
    Floats some{};
    if (channels - c >= kLanes) some = load(from + c);
    if (channels - c > 0 && channels - c < kLanes) some = load(from + c, First{channels - c});
    seen += some * 0.0f;
    store(to + c, some);
  }
  return to_bits(seen == 0.0f) == (1u << kLanes) - 1;
}

void convolve_line(const Line& line) {
  line.taps == 3 ? convolve_line<3>(line) : line.taps == 5 ? convolve_line<5>(line) : convolve_line<7>(line);
}

}  // namespace
}  // namespace jaxfuse::conv::depthwise
