// Products of neighbouring pixels, for what stays in the first-level cache: bias and clip meet the sums in registers.
#pragma once

#include "contraction_kernels.h"
#include "contraction_steps.h"

namespace jaxfuse::contraction {
namespace {

// Sums of twelve pixels by two vectors of columns: each factor is loaded once for two products.
constexpr int64_t kPixels = kLanes == 16 ? 12 : 6, kPixelVectors = 2, kLongestSum = 256;

template <class Step, int64_t count, int64_t vectors, class Lanes>
void multiply_pixels(const Pixels& p, const char* x, float* to, Lanes last) {
  const int64_t whole = p.steps - p.odd;
  const int64_t together = p.fetched > 0 ? 4 : p.steps;  // steps, between which lines are fetched
  const int64_t fetched = (p.fetched * together + p.steps - 1) / p.steps;
  const char* fetch = p.fetch;
  const char* panels[vectors];
#pragma GCC unroll 2
  for (int64_t j = 0; j < vectors; ++j) {
    const int64_t column = p.column + j * kLanes;
    panels[j] = p.panels + column / kPanel * p.panel + column % kPanel * int64_t(sizeof(float));
  }
  const auto load_columns = [&](const float* from, int64_t j) {
    return j + 1 < vectors ? load(from + j * kLanes) : load(from + j * kLanes, last);
  };
  for (int64_t first = 0; first < p.steps; first += kLongestSum) {
    const int64_t end = first + kLongestSum < p.steps ? first + kLongestSum : p.steps;
    Floats total[count][vectors];
#pragma GCC unroll 2
    for (int64_t j = 0; j < vectors; ++j) {
      const Floats start = first == 0 && p.bias ? load_columns(p.bias, j) : Floats{};
#pragma GCC unroll 16
      for (int64_t i = 0; i < count; ++i) total[i][j] = start;
    }
    const auto add_step = [&](int64_t s, auto load_x) {
      Floats b[vectors];
#pragma GCC unroll 2
      for (int64_t j = 0; j < vectors; ++j) b[j] = load(reinterpret_cast<const float*>(panels[j] + s * kLineBytes));
#pragma GCC unroll 16
      for (int64_t i = 0; i < count; ++i) {
        const Floats factor = load_x(x + i * p.pixel + s * kStepBytes);
#pragma GCC unroll 2
        for (int64_t j = 0; j < vectors; ++j) total[i][j] = Step::multiply_add(factor, b[j], total[i][j]);
      }
    };
    const int64_t last_whole = end < whole ? end : whole;
    for (int64_t begin = first; begin < last_whole; begin += together) {
      for (int64_t i = 0; i < fetched; ++i, fetch += kLineBytes) __builtin_prefetch(fetch, 0, 2);
      for (int64_t s = begin; s < begin + together && s < last_whole; ++s) add_step(s, [](const char* at) { return Step::load_step(at); });
    }
    if (end > whole) add_step(whole, [](const char* at) { return Step::load_last(at); });
#pragma GCC unroll 16
    for (int64_t i = 0; i < count; ++i) {
      float* const line = to + i * p.stride;
#pragma GCC unroll 2
      for (int64_t j = 0; j < vectors; ++j) {
        Floats sum = total[i][j];
        if (first > 0) sum += load_columns(line, j);
        if (end == p.steps) sum = at_most(p.high, at_least(p.low, sum));
        j + 1 < vectors ? store(line + j * kLanes, sum) : store(line + j * kLanes, sum, last);
      }
    }
  }
}

// The same of `given` pixels, at most `count`.
template <class Step, int64_t count, int64_t vectors, class Lanes>
void multiply_pixels(int64_t given, const Pixels& p, const char* x, float* to, Lanes last) {
  if constexpr (count > 1) {
    if (given < count) return multiply_pixels<Step, count - 1, vectors>(given, p, x, to, last);
  }
  multiply_pixels<Step, count, vectors>(p, x, to, last);
}

template <class Step, int64_t vectors, class Lanes>
void multiply_all_pixels(const Pixels& given, float* to, Lanes last) {
  Pixels p = given;
  const int64_t tiles = (p.count + kPixels - 1) / kPixels;
  for (int64_t i = 0; i < tiles; ++i) {
    p.fetch = given.fetch + i * given.fetched / tiles * kLineBytes, p.fetched = (i + 1) * given.fetched / tiles - i * given.fetched / tiles;
    const int64_t begin = i * p.count / tiles, end = (i + 1) * p.count / tiles;
    multiply_pixels<Step, kPixels, vectors>(end - begin, p, p.x + begin * p.pixel, to + begin * p.stride, last);
  }
}

template <class Step>
void multiply_pixels(const Pixels& p, float* to) {
  if (p.columns == kPixelVectors * kLanes) return multiply_all_pixels<Step, 2>(p, to, Whole{});
  if (p.columns > kLanes) return multiply_all_pixels<Step, 2>(p, to, First{p.columns - kLanes});
  if (p.columns == kLanes) return multiply_all_pixels<Step, 1>(p, to, Whole{});
  multiply_all_pixels<Step, 1>(p, to, First{p.columns});
}

}  // namespace
}  // namespace jaxfuse::contraction
