// Normalisation of rows that lie in memory in one piece: read once, and again from the cache.
#pragma once

#include "activation_loops.h"
#include "norm_kernels.h"
#include "simd.h"

namespace jaxfuse::norm {
namespace {

template <class T, class Lanes>
void put(T* p, Floats v, Lanes lanes, bool stream) {
  stream ? store_streaming(p, round_to<T>(v), lanes) : store(p, round_to<T>(v), lanes);
}

// ---- activations, as passes over a few values in the L1 cache

using Activate = void (*)(float* z, int64_t n, const Parameters&);                  // z becomes activation(z)
using PullBack = void (*)(float* z, const float* g, int64_t n, const Parameters&);  // z becomes g·activation'(z)

inline Activate activate_by(Activation activation) {
  Activate pass = nullptr;
  with_activation(activation, [&](auto act) {
    [[maybe_unused]] constexpr Activation which = decltype(act)::value;
    pass = [](float* z, int64_t n, const Parameters& given) {
      const Parameters p = given;  // of our own: no store changes it
      for_vectors(0, n, [&](int64_t i, auto lanes) { store(z + i, activated<which>(load(z + i, lanes), p), lanes); });
    };
  });
  return pass;
}

inline PullBack pull_back_by(Activation activation) {
  PullBack pass = nullptr;
  with_activation(activation, [&](auto act) {
    [[maybe_unused]] constexpr Activation which = decltype(act)::value;
    pass = [](float* z, const float* g, int64_t n, const Parameters& given) {
      const Parameters p = given;
      for_vectors(0, n, [&](int64_t i, auto lanes) {
        store(z + i, pulled_back<which>(load(g + i, lanes), load(z + i, lanes), p), lanes);
      });
    };
  });
  return pass;
}

// ---- statistics

constexpr int64_t kLongestSum = 4096;  // of f32 numbers; sums of those are in double

// Σ f(index, lanes) over [0, n)
template <class F>
double sum_over(int64_t n, F f) {
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kLongestSum) {
    const int64_t end = n - begin < kLongestSum ? n : begin + kLongestSum;
    Floats parts[4] = {};
    int64_t i = begin;
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
      for (int k = 0; k < 4; ++k) parts[k] += f(i + k * kLanes, Whole{});
    }
    for_vectors(i, end, [&](int64_t at, auto lanes) { parts[0] += only(f(at, lanes), lanes); });
    sum += total((parts[0] + parts[1]) + (parts[2] + parts[3]));
  }
  return sum;
}

inline float reciprocal_root(const Options& options, double variance) {
  const float var = float(variance);
  if (options.epsilon_outside) return 1.0f / (__builtin_sqrtf(var) + options.epsilon);
  return 1.0f / __builtin_sqrtf(var + options.epsilon);
}

// -2·drstd/dvar / rstd², which is rstd unless epsilon is outside of the root.
inline float slope(const Options& options, float rstd) {
  return options.epsilon_outside ? 1.0f / (1.0f / rstd - options.epsilon) : rstd;
}

// ---- forward

// The row that is normalised, as floats: in place or made in `buffer`.
template <class T>
const float* row_of(const Forward& f, int64_t start, int64_t n, float* buffer) {
  const T* x = static_cast<const T*>(f.x) + start;
  if constexpr (sizeof(T) == sizeof(float)) {
    if (!f.residual) return x;
  }
  const T* residual = f.residual ? static_cast<const T*>(f.residual) + start : nullptr;
  T* sum = f.sum ? static_cast<T*>(f.sum) + start : nullptr;
  for_vectors(0, n, [&](int64_t i, auto lanes) {
    Floats s = load(x + i, lanes);
    if (residual) s = round_to<T>(s + load(residual + i, lanes));
    if (sum) put(sum + i, s, lanes, f.stream);
    store(buffer + i, s, lanes);
  });
  return buffer;
}

template <class T>
void forward_rows(const Forward& f, Rows rows, Scratch scratch) {
  const Options& options = f.options;
  const int64_t n = options.extent.length;
  const bool plain = options.activation == Activation::none;
  const Activate activate = activate_by(options.activation);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t start = row * n, channel = row % options.extent.groups * n;
    const float *s = row_of<T>(f, start, n, scratch.floats), *gamma = options.gamma + channel, *beta = options.beta + channel;
    const float mean = options.centered ? float(sum_over(n, [&](int64_t i, auto lanes) { return load(s + i, lanes); }) / n) : 0;
    const double squares = sum_over(n, [&](int64_t i, auto lanes) {
      const Floats centered = load(s + i, lanes) - mean;
      return centered * centered;
    });
    const float rstd = reciprocal_root(options, squares / n);
    if (f.mean) f.mean[row] = mean, f.rstd[row] = rstd;
    T* y = static_cast<T*>(f.y) + start;
    float* z = scratch.floats + n;
    for_vectors(0, n, [&](int64_t i, auto lanes) {
      const Floats value = (load(s + i, lanes) - mean) * rstd * load(gamma + i, lanes) + load(beta + i, lanes);
      plain ? put(y + i, value, lanes, f.stream) : store(z + i, value, lanes);
    });
    if (plain) continue;
    activate(z, n, options.parameters);
    for_vectors(0, n, [&](int64_t i, auto lanes) { put(y + i, load(z + i, lanes), lanes, f.stream); });
  }
  finish_streaming();
}

// ---- backward
//
// x̂ = (s - mean)·rstd, g' = g·gamma:  ds = rstd·(g' - mean(g')) - slope·x̂·mean(g'·x̂)

template <class T>
void backward_row(const Backward& b, int64_t row, float* dgamma, float* dbeta, PullBack pull_back, Scratch scratch) {
  const Options& options = b.options;
  const int64_t n = options.extent.length, start = row * n, channel = row % options.extent.groups * n;
  const T *s = static_cast<const T*>(b.s) + start, *dy = static_cast<const T*>(b.dy) + start;
  const T* ds = b.ds ? static_cast<const T*>(b.ds) + start : nullptr;
  T* dx = static_cast<T*>(b.dx) + start;
  const float *gamma = options.gamma + channel, *beta = options.beta + channel;
  const float mean = b.mean[row], rstd = b.rstd[row];
  const auto normalised = [&](int64_t i, auto lanes) { return (load(s + i, lanes) - mean) * rstd; };
  float *pulled = scratch.floats, *given = scratch.floats + n;
  if (pull_back) {
    for_vectors(0, n, [&](int64_t i, auto lanes) {
      store(pulled + i, normalised(i, lanes) * load(gamma + i, lanes) + load(beta + i, lanes), lanes);
      store(given + i, load(dy + i, lanes), lanes);
    });
    pull_back(pulled, given, n, options.parameters);
  }
  const auto gradient = [&](int64_t i, auto lanes) { return pull_back ? load(pulled + i, lanes) : load(dy + i, lanes); };
  double sum_g = 0, sum_gx = 0;
  for (int64_t begin = 0; begin < n; begin += kLongestSum) {
    Floats part_g{}, part_gx{};
    for_vectors(begin, n - begin < kLongestSum ? n : begin + kLongestSum, [&](int64_t i, auto lanes) {
      const Floats x = normalised(i, lanes), g = gradient(i, lanes), gx = g * x, scale = load(gamma + i, lanes);
      if (dbeta) store(dbeta + channel + i, load(dbeta + channel + i, lanes) + g, lanes);
      if (dgamma) store(dgamma + channel + i, load(dgamma + channel + i, lanes) + gx, lanes);
      part_g += only(g * scale, lanes);
      part_gx += only(gx * scale, lanes);
    });
    sum_g += total(part_g), sum_gx += total(part_gx);
  }
  const float shift = options.centered ? rstd * float(sum_g / n) : 0, factor = slope(options, rstd) * float(sum_gx / n);
  for_vectors(0, n, [&](int64_t i, auto lanes) {
    Floats value = rstd * (gradient(i, lanes) * load(gamma + i, lanes)) - shift - factor * normalised(i, lanes);
    if (ds) value += load(ds + i, lanes);
    put(dx + i, value, lanes, b.stream);
  });
}

template <class T>
void backward_rows(const Backward& b, Rows rows, float* dgamma, float* dbeta, Scratch scratch) {
  const bool plain = b.options.activation == Activation::none;
  const PullBack pull_back = plain ? nullptr : pull_back_by(b.options.activation);
  for (int64_t c = 0; c < b.options.extent.channels(); ++c) {
    if (dgamma) dgamma[c] = 0;
    if (dbeta) dbeta[c] = 0;
  }
  for (int64_t row = rows.begin; row < rows.end; ++row) backward_row<T>(b, row, dgamma, dbeta, pull_back, scratch);
  finish_streaming();
}

}  // namespace
}  // namespace jaxfuse::norm
