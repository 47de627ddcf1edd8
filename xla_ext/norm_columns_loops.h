// Normalisation of groups of channels over the positions of a batch entry, channels last: sums for each channel, then for each group.
#pragma once

#include "norm_rows_loops.h"

namespace jaxfuse::norm {
namespace {

// What a task covers: `width` channels of every position, from `start` on.
struct Block {
  int64_t positions, stride, start, width, length, groups, channel, group;

  Block(const Extent& extent, const Columns& columns)
      : positions(extent.spatial),
        stride(extent.channels()),
        start(columns.entry * extent.entry() + columns.begin * extent.length),
        width((columns.end - columns.begin) * extent.length),
        length(extent.length),
        groups(columns.end - columns.begin),
        channel(columns.begin * extent.length),
        group(columns.entry * extent.groups + columns.begin) {}
};

// f(first, last) for at most `most` positions at a time: their sums are f32.
template <class F>
void for_positions(const Block& block, int64_t most, F f) {
  const int64_t fit = 65536 / block.width, step = fit < 1 ? 1 : fit > most ? most : fit;
  for (int64_t first = 0; first < block.positions; first += step) {
    f(first, block.positions - first < step ? block.positions : first + step);
  }
}

inline double sum_of_group(const float* values, int64_t length) {
  double sum = 0;
  for (int64_t i = 0; i < length; ++i) sum += values[i];
  return sum;
}

inline void fill(float* channels, int64_t length, float value) {
  for (int64_t i = 0; i < length; ++i) channels[i] = value;
}

// ---- forward

template <class T, class Lanes>
Floats summed(const Forward& f, int64_t at, Lanes lanes) {
  const Floats x = load(static_cast<const T*>(f.x) + at, lanes);
  return f.residual ? round_to<T>(x + load(static_cast<const T*>(f.residual) + at, lanes)) : x;
}

constexpr int64_t kMomentPositions = 256;

// Gradients may all be the same, as behind a mean over the positions: then each addition may err to the same side.
constexpr int64_t kGradientPositions = 32;

// sums[channel] = Σ (s - centers[channel])^power over positions [first, last)
template <class T, int power>
void add_positions(const Forward& f, const Block& block, int64_t first, int64_t last, const float* centers, float* sums) {
  fill(sums, block.width, 0);
  for (int64_t position = first; position < last; ++position) {
    const int64_t row = block.start + position * block.stride;
    for_vectors(0, block.width, [&](int64_t i, auto lanes) {
      Floats v = summed<T>(f, row + i, lanes) - load(centers + i, lanes);
      if constexpr (power == 2) v *= v;
      store(sums + i, load(sums + i, lanes) + v, lanes);
    });
  }
}

// centers[channel] = s at the position: a shift by which sums are as small as the deviations are. 0 where that is not finite, or so large
// that a difference might overflow.
template <class T>
void shift_by(const Forward& f, const Block& block, int64_t position, float* centers) {
  for_vectors(0, block.width, [&](int64_t i, auto lanes) {
    const Floats s = summed<T>(f, block.start + position * block.stride + i, lanes);
    store(centers + i, absolute(s) < 1e37f ? s : Floats{}, lanes);
  });
}

// doubles: the means of the groups, then Σ (s - mean)². Parts are put together as Chan, Golub & LeVeque (1979) do.
template <class T>
void column_moments(const Forward& f, const Block& block, float* centers, float* sums, double* means, double* squares) {
  for (int64_t g = 0; g < block.groups; ++g) means[g] = squares[g] = 0;
  fill(centers, block.width, 0);
  for_positions(block, kMomentPositions, [&](int64_t first, int64_t last) {
    const double before = double(first) * block.length, here = double(last - first) * block.length;
    if (f.options.centered) {
      shift_by<T>(f, block, first, centers);
      add_positions<T, 1>(f, block, first, last, centers, sums);
      for (int64_t g = 0; g < block.groups; ++g) {
        float* shifts = centers + g * block.length;
        const double sum = sum_of_group(shifts, block.length) * double(last - first);
        fill(shifts, block.length, float((sum + sum_of_group(sums + g * block.length, block.length)) / here));
      }
    }
    add_positions<T, 2>(f, block, first, last, centers, sums);
    for (int64_t g = 0; g < block.groups; ++g) {
      const double apart = centers[g * block.length] - means[g];
      means[g] += apart * (here / (before + here));
      squares[g] += sum_of_group(sums + g * block.length, block.length) + apart * apart * (before * here / (before + here));
    }
  });
}

template <class T>
void forward_columns(const Forward& f, Columns columns, Scratch scratch) {
  const Options& options = f.options;
  const Block block(options.extent, columns);
  float *centers = scratch.floats, *scales = centers + block.width, *z = scales + block.width;
  double *means = scratch.doubles, *squares = means + block.groups;
  column_moments<T>(f, block, centers, scales, means, squares);
  for (int64_t g = 0; g < block.groups; ++g) {
    const float rstd = reciprocal_root(options, squares[g] / (double(block.positions) * block.length)), mean = float(means[g]);
    if (f.mean) f.mean[block.group + g] = mean, f.rstd[block.group + g] = rstd;
    for (int64_t i = g * block.length; i < (g + 1) * block.length; ++i) {
      centers[i] = mean;
      scales[i] = rstd * options.gamma[block.channel + i];
    }
  }
  const float* beta = options.beta + block.channel;
  const bool plain = options.activation == Activation::none;
  const Activate activate = activate_by(options.activation);
  for (int64_t position = 0; position < block.positions; ++position) {
    const int64_t row = block.start + position * block.stride;
    T *y = static_cast<T*>(f.y) + row, *sum = f.sum ? static_cast<T*>(f.sum) + row : nullptr;
    for_vectors(0, block.width, [&](int64_t i, auto lanes) {
      const Floats s = summed<T>(f, row + i, lanes);
      if (sum) put(sum + i, s, lanes, f.stream);
      const Floats value = (s - load(centers + i, lanes)) * load(scales + i, lanes) + load(beta + i, lanes);
      plain ? put(y + i, value, lanes, f.stream) : store(z + i, value, lanes);
    });
    if (plain) continue;
    activate(z, block.width, options.parameters);
    for_vectors(0, block.width, [&](int64_t i, auto lanes) { put(y + i, load(z + i, lanes), lanes, f.stream); });
  }
  finish_streaming();
}

// ---- backward, by the formula of norm_rows_loops.h

// The gradient g of one position, as T in memory or made in a buffer.
template <class T>
struct Gradients {
  const Backward& b;
  const Block& block;
  const float *centers, *rstds;
  float *pulled, *given;
  PullBack pull_back;

  // f(index, s - mean, g, lanes) for the channels of a position.
  template <class F>
  void operator()(int64_t position, F f) const {
    const int64_t row = block.start + position * block.stride;
    const T *s = static_cast<const T*>(b.s) + row, *dy = static_cast<const T*>(b.dy) + row;
    const auto centered = [&](int64_t i, auto lanes) { return load(s + i, lanes) - load(centers + i, lanes); };
    if (pull_back) {
      const float *gamma = b.options.gamma + block.channel, *beta = b.options.beta + block.channel;
      for_vectors(0, block.width, [&](int64_t i, auto lanes) {
        const Floats scale = load(rstds + i, lanes) * load(gamma + i, lanes);
        store(pulled + i, centered(i, lanes) * scale + load(beta + i, lanes), lanes);
        store(given + i, load(dy + i, lanes), lanes);
      });
      pull_back(pulled, given, block.width, b.options.parameters);
    }
    for_vectors(0, block.width, [&](int64_t i, auto lanes) {
      f(i, centered(i, lanes), pull_back ? load(pulled + i, lanes) : load(dy + i, lanes), lanes);
    });
  }
};

// sums of g and of g·(s - mean) for each channel, over all positions
template <class T>
void gradient_sums(const Gradients<T>& gradients, const Block& block, float* part_g, float* part_gx, double* sum_g, double* sum_gx) {
  for (int64_t c = 0; c < block.width; ++c) sum_g[c] = sum_gx[c] = 0;
  for_positions(block, kGradientPositions, [&](int64_t first, int64_t last) {
    fill(part_g, block.width, 0);
    fill(part_gx, block.width, 0);
    for (int64_t position = first; position < last; ++position) {
      gradients(position, [&](int64_t i, Floats centered, Floats g, auto lanes) {
        store(part_g + i, load(part_g + i, lanes) + g, lanes);
        store(part_gx + i, load(part_gx + i, lanes) + g * centered, lanes);
      });
    }
    for (int64_t c = 0; c < block.width; ++c) sum_g[c] += part_g[c], sum_gx[c] += part_gx[c];
  });
}

// Σ (s - mean)² over a group, of what is normalised.
template <class T>
double squares_of_group(const Backward& b, const Block& block, int64_t group, const float* centers, float* sums) {
  const Forward f{b.options, b.s, nullptr, nullptr, nullptr, nullptr, nullptr, false};
  Block one = block;
  one.start += group * block.length, one.width = block.length;
  double sum = 0;
  for_positions(one, kMomentPositions, [&](int64_t first, int64_t last) {
    add_positions<T, 2>(f, one, first, last, centers + group * block.length, sums);
    sum += sum_of_group(sums, block.length);
  });
  return sum;
}

template <class T>
void backward_columns(const Backward& b, Columns columns, float* dgamma, float* dbeta, Scratch scratch) {
  const Options& options = b.options;
  const Block block(options.extent, columns);
  const int64_t width = block.width;
  float *centers = scratch.floats, *rstds = centers + width, *pulled = rstds + width, *given = pulled + width;
  float *first = given + width, *second = first + width;  // for each channel: sums, then coefficients
  double *sum_g = scratch.doubles, *sum_gx = sum_g + width;
  for (int64_t g = 0; g < block.groups; ++g) {
    fill(centers + g * block.length, block.length, b.mean[block.group + g]);
    fill(rstds + g * block.length, block.length, b.rstd[block.group + g]);
  }
  const bool plain = options.activation == Activation::none;
  const Gradients<T> gradients{b, block, centers, rstds, pulled, given, plain ? nullptr : pull_back_by(options.activation)};
  gradient_sums(gradients, block, first, second, sum_g, sum_gx);
  const float* gamma = options.gamma + block.channel;
  const double count = double(block.positions) * block.length;
  for (int64_t g = 0; g < block.groups; ++g) {
    const float rstd = b.rstd[block.group + g];
    double mean_g = 0, mean_gx = 0;
    for (int64_t i = g * block.length; i < (g + 1) * block.length; ++i) {
      if (dbeta) dbeta[i] = float(sum_g[i]);
      if (dgamma) dgamma[i] = float(sum_gx[i] * rstd);
      mean_g += gamma[i] * sum_g[i] / count;
      mean_gx += gamma[i] * (sum_gx[i] * rstd) / count;
    }
    const auto variance = [&] { return squares_of_group<T>(b, block, g, centers, second + g * block.length) / count; };
    const float factor = slope(options, rstd, variance);
    fill(first + g * block.length, block.length, options.centered ? -rstd * float(mean_g) : 0);
    fill(second + g * block.length, block.length, -factor * rstd * float(mean_gx));
  }
  for (int64_t position = 0; position < block.positions; ++position) {
    const int64_t row = block.start + position * block.stride;
    const T* ds = b.ds ? static_cast<const T*>(b.ds) + row : nullptr;
    T* dx = static_cast<T*>(b.dx) + row;
    gradients(position, [&](int64_t i, Floats centered, Floats g, auto lanes) {
      Floats value = load(rstds + i, lanes) * (g * load(gamma + i, lanes)) + load(first + i, lanes);
      value += load(second + i, lanes) * centered;
      if (ds) value += load(ds + i, lanes);
      put(dx + i, value, lanes, b.stream);
    });
  }
  finish_streaming();
}

}  // namespace
}  // namespace jaxfuse::norm
