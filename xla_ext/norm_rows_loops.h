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

// ---- statistics

constexpr int64_t kLongestSum = 4096;  // of f32; sums of those are in double

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

// -2·drstd/dvar / rstd²: rstd, or 1/sqrt(var) where epsilon is outside of the root. There var() is Σ(s - mean)²/n once more: as
// (1/rstd - epsilon)² it would cancel.
template <class Variance>
float slope(const Options& options, float rstd, Variance var) {
  return options.epsilon_outside ? 1.0f / __builtin_sqrtf(float(var())) : rstd;
}

// ---- forward

// s of rows as floats, made in `buffer`, and in `sum` where that is wanted.
template <class T, class Stream>
void add_residual(const T* x, const T* residual, T* sum, int64_t n, float* buffer, Stream stream) {
  for_vectors(0, n, [&](int64_t i, auto lanes) {
    const Floats s = round_to<T>(load(x + i, lanes) + load(residual + i, lanes));
    if (sum) put(sum + i, s, lanes, stream.value);
    store(buffer + i, s, lanes);
  });
}

// A few rows, one behind the other in s and y: first the means of all, then the deviations, so that no row waits for another's.
// S is T, or float where s was made in a buffer.
template <class T, class S, class Stream>
void forward_block(const Forward& f, Rows rows, const S* s, T* y, Activate activate, float* z, Stream stream) {
  const Options& options = f.options;
  const int64_t n = options.extent.length, count = rows.end - rows.begin;
  float means[kRowsAtOnce] = {}, rstds[kRowsAtOnce];
  for (int64_t k = 0; k < count && options.centered; ++k) {
    means[k] = float(sum_over(n, [&](int64_t i, auto lanes) { return load(s + k * n + i, lanes); }) / n);
  }
  for (int64_t k = 0; k < count; ++k) {
    const float mean = means[k];
    const double squares = sum_over(n, [&](int64_t i, auto lanes) {
      const Floats centered = load(s + k * n + i, lanes) - mean;
      return centered * centered;
    });
    rstds[k] = reciprocal_root(options, squares / n);
  }
  for (int64_t k = 0; k < count; ++k) {
    const int64_t row = rows.begin + k, channel = row % options.extent.groups * n, start = k * n;
    const float *gamma = options.gamma + channel, *beta = options.beta + channel;
    const float mean = means[k], rstd = rstds[k];
    if (f.mean) f.mean[row] = mean, f.rstd[row] = rstd;
    const auto value = [&](int64_t i, auto lanes) {
      return (load(s + start + i, lanes) - mean) * rstd * load(gamma + i, lanes) + load(beta + i, lanes);
    };
    if (!activate) {
      for_vectors(0, n, [&](int64_t i, auto lanes) { put(y + start + i, value(i, lanes), lanes, stream.value); });
      continue;
    }
    for_vectors(0, n, [&](int64_t i, auto lanes) { store(z + i, value(i, lanes), lanes); });
    activate(z, n, options.parameters);
    for_vectors(0, n, [&](int64_t i, auto lanes) { put(y + start + i, load(z + i, lanes), lanes, stream.value); });
  }
}

template <class T>
void forward_rows(const Forward& f, Rows rows, Scratch scratch) {
  const int64_t n = f.options.extent.length, step = rows_at_once(n);
  const Activate activate = f.options.activation == Activation::none ? nullptr : activate_by(f.options.activation);
  float *s = scratch.floats, *z = scratch.floats + step * n;
  with_bool(f.stream, [&](auto stream) {
    for (int64_t begin = rows.begin; begin < rows.end; begin += step) {
      const Rows block{begin, rows.end - begin < step ? rows.end : begin + step};
      const int64_t start = begin * n, count = (block.end - begin) * n;
      const T* x = static_cast<const T*>(f.x) + start;
      T *y = static_cast<T*>(f.y) + start, *sum = f.sum ? static_cast<T*>(f.sum) + start : nullptr;
      if (!f.residual) {
        forward_block(f, block, x, y, activate, z, stream);
        continue;
      }
      add_residual(x, static_cast<const T*>(f.residual) + start, sum, count, s, stream);
      forward_block(f, block, s, y, activate, z, stream);
    }
  });
  finish_streaming();
}

// ---- backward
//
// x̂ = (s - mean)·rstd, g' = g·gamma:  ds = rstd·(g' - mean(g')) - slope·(x̂ - mean(x̂))·mean(g'·x̂)
// mean(x̂) is what rounding the mean left, much where that is large beside the deviation.

// A few rows: first the sums of all, then dx. `pulled` has room for these rows, `given` for one.
template <class T>
void backward_block(const Backward& b, Rows rows, float* dgamma, float* dbeta, PullBack pull_back, float* pulled, float* given) {
  const Options& options = b.options;
  const int64_t n = options.extent.length, first = rows.begin * n, count = rows.end - rows.begin;
  const T *s = static_cast<const T*>(b.s) + first, *dy = static_cast<const T*>(b.dy) + first;
  const T* ds = b.ds ? static_cast<const T*>(b.ds) + first : nullptr;
  T* dx = static_cast<T*>(b.dx) + first;
  float shifts[kRowsAtOnce], factors[kRowsAtOnce];
  for (int64_t k = 0; k < count; ++k) {
    const int64_t row = rows.begin + k, channel = row % options.extent.groups * n, start = k * n;
    const float *gamma = options.gamma + channel, *beta = options.beta + channel;
    const float mean = b.mean[row], rstd = b.rstd[row];
    const auto normalised = [&](int64_t i, auto lanes) { return (load(s + start + i, lanes) - mean) * rstd; };
    if (pull_back) {
      for_vectors(0, n, [&](int64_t i, auto lanes) {
        store(pulled + start + i, normalised(i, lanes) * load(gamma + i, lanes) + load(beta + i, lanes), lanes);
        store(given + i, load(dy + start + i, lanes), lanes);
      });
      pull_back(pulled + start, given, n, options.parameters);
    }
    double sum_g = 0, sum_gx = 0, sum_x = 0;
    for (int64_t begin = 0; begin < n; begin += kLongestSum) {
      Floats part_g{}, part_gx{}, part_x{};
      for_vectors(begin, n - begin < kLongestSum ? n : begin + kLongestSum, [&](int64_t i, auto lanes) {
        const Floats g = pull_back ? load(pulled + start + i, lanes) : load(dy + start + i, lanes);
        const Floats x = normalised(i, lanes), gx = g * x, scale = load(gamma + i, lanes);
        if (dbeta) store(dbeta + channel + i, load(dbeta + channel + i, lanes) + g, lanes);
        if (dgamma) store(dgamma + channel + i, load(dgamma + channel + i, lanes) + gx, lanes);
        part_g += only(g * scale, lanes);
        part_gx += only(gx * scale, lanes);
        part_x += only(x, lanes);
      });
      sum_g += total(part_g), sum_gx += total(part_gx), sum_x += total(part_x);
    }
    const auto variance = [&] {
      return sum_over(n, [&](int64_t i, auto lanes) {
        const Floats centered = load(s + start + i, lanes) - mean;
        return centered * centered;
      }) / n;
    };
    factors[k] = slope(options, rstd, variance) * float(sum_gx / n);
    shifts[k] = options.centered ? rstd * float(sum_g / n) - factors[k] * float(sum_x / n) : 0;
  }
  for (int64_t k = 0; k < count; ++k) {
    const int64_t row = rows.begin + k, channel = row % options.extent.groups * n, start = k * n;
    const float* gamma = options.gamma + channel;
    const float mean = b.mean[row], rstd = b.rstd[row], shift = shifts[k], factor = factors[k];
    for_vectors(0, n, [&](int64_t i, auto lanes) {
      const Floats g = pull_back ? load(pulled + start + i, lanes) : load(dy + start + i, lanes);
      Floats value = rstd * (g * load(gamma + i, lanes)) - shift - factor * ((load(s + start + i, lanes) - mean) * rstd);
      if (ds) value += load(ds + start + i, lanes);
      put(dx + start + i, value, lanes, b.stream);
    });
  }
}

// dgamma and dbeta of a task: of a few rows in f32, then of all. Gradients may all be the same, and each addition err to the same side.
class ParameterSums {
 public:
  ParameterSums(int64_t channels, float* dgamma, float* dbeta, float* memory)
      : channels_(dgamma ? channels : 0), totals_{dgamma, dbeta}, parts_{dgamma ? memory : nullptr, dbeta ? memory + channels : nullptr} {
    for (int i = 0; i < 2; ++i) fill(totals_[i], 0), fill(parts_[i], 0);
  }
  float* dgamma() const { return parts_[0]; }
  float* dbeta() const { return parts_[1]; }
  void add_up() const {
    for (int i = 0; i < 2; ++i) {
      for_vectors(0, channels_, [&](int64_t c, auto lanes) {
        store(totals_[i] + c, load(totals_[i] + c, lanes) + load(parts_[i] + c, lanes), lanes);
      });
      fill(parts_[i], 0);
    }
  }

 private:
  void fill(float* sums, float value) const {
    for (int64_t c = 0; c < channels_; ++c) sums[c] = value;
  }

  const int64_t channels_;
  float *const totals_[2], *const parts_[2];
};

template <class T>
void backward_rows(const Backward& b, Rows rows, float* dgamma, float* dbeta, Scratch scratch) {
  constexpr int64_t kGradientRows = 32;  // of each group
  const Extent& extent = b.options.extent;
  const int64_t n = extent.length, step = rows_at_once(n);
  const bool plain = b.options.activation == Activation::none;
  const PullBack pull_back = plain ? nullptr : pull_back_by(b.options.activation);
  float *pulled = scratch.floats, *given = pulled + step * n;
  const ParameterSums sums(extent.channels(), dgamma, dbeta, given + n);
  int64_t added_up = rows.begin;
  for (int64_t begin = rows.begin; begin < rows.end; begin += step) {
    const Rows block{begin, rows.end - begin < step ? rows.end : begin + step};
    backward_block<T>(b, block, sums.dgamma(), sums.dbeta(), pull_back, pulled, given);
    if (block.end - added_up >= kGradientRows * extent.groups || block.end == rows.end) sums.add_up(), added_up = block.end;
  }
  finish_streaming();
}

}  // namespace
}  // namespace jaxfuse::norm
