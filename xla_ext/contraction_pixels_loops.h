// Products of neighbouring pixels, for what stays in the first-level cache: bias and clip meet the sums in registers.
#pragma once

#include "contraction_kernels.h"
#include "contraction_steps.h"

namespace jaxfuse::contraction {
namespace {

// Sums of twelve pixels by two vectors of columns: each factor is loaded once for two products.
constexpr int64_t kPixels = kLanes == 16 ? 12 : 6, kPixelVectors = 2, kLongestSum = 256;

// Floats of the columns; of the last vector of them only some lanes.
template <int64_t vectors, class Lanes>
struct Vectors {
  const Lanes last;

  Floats load(const float* from, int64_t j) const {
    return j + 1 < vectors ? jaxfuse::load(from + j * kLanes) : jaxfuse::load(from + j * kLanes, last);
  }
  void store(float* to, int64_t j, Floats v) const {
    j + 1 < vectors ? jaxfuse::store(to + j * kLanes, v) : jaxfuse::store(to + j * kLanes, v, last);
  }
};

// total += the products of steps [begin, end), some lines fetched before every `together` of them.
template <class Step, int64_t count, int64_t vectors>
[[gnu::always_inline]] inline void add_products(Floats (&total)[count][vectors], const Pixels& p, const char* x, int64_t begin, int64_t end,
                                                const char* fetch, int64_t fetched, int64_t together) {
  const char* panels[vectors];
#pragma GCC unroll 2
  for (int64_t j = 0; j < vectors; ++j) {
    const int64_t column = p.column + j * kLanes;
    panels[j] = p.panels + column / kPanel * p.panel + column % kPanel * int64_t(sizeof(float));
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
  const int64_t whole = end < p.steps || !p.odd ? end : end - 1;
  for (int64_t s = begin; s < whole;) {
    for (int64_t i = 0; i < fetched; ++i, fetch += kLineBytes) __builtin_prefetch(fetch, 0, 2);
    const int64_t next = s + together < whole ? s + together : whole;
    for (; s < next; ++s) add_step(s, [](const char* at) { return Step::load_step(at); });
  }
  if (whole < end) add_step(whole, [](const char* at) { return Step::load_last(at); });
}

// Sums of more steps than are added one after the other: of kLongestSum at a time.
template <class Step, int64_t count, int64_t vectors, class Lanes>
[[gnu::noinline]] void multiply_long_pixels(const Pixels& p, const char* x, float* to, Lanes last) {
  const Vectors<vectors, Lanes> columns{last};
  for (int64_t begin = 0; begin < p.steps; begin += kLongestSum) {
    const int64_t end = begin + kLongestSum < p.steps ? begin + kLongestSum : p.steps;
    Floats total[count][vectors] = {};
    add_products<Step>(total, p, x, begin, end, nullptr, 0, kLongestSum);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < vectors; ++j) {
        float* const line = to + i * p.stride;
        const Floats before = begin > 0 ? columns.load(line, j) : p.bias ? columns.load(p.bias, j) : Floats{};
        const Floats sum = before + total[i][j];
        columns.store(line, j, end < p.steps ? sum : at_most(p.high, at_least(p.low, sum)));
      }
    }
  }
}

template <class Step, int64_t count, int64_t vectors, class Lanes>
void multiply_pixels(const Pixels& p, const char* x, float* to, Lanes last) {
  if (p.steps > kLongestSum) return multiply_long_pixels<Step, count, vectors>(p, x, to, last);
  const Vectors<vectors, Lanes> columns{last};
  Floats total[count][vectors];
#pragma GCC unroll 2
  for (int64_t j = 0; j < vectors; ++j) {
    const Floats start = p.bias ? columns.load(p.bias, j) : Floats{};
#pragma GCC unroll 16
    for (int64_t i = 0; i < count; ++i) total[i][j] = start;
  }
  const int64_t together = p.fetched > 0 ? 4 : p.steps;
  add_products<Step>(total, p, x, 0, p.steps, p.fetch, (p.fetched * together + p.steps - 1) / p.steps, together);
  const float low = p.low, high = p.high;
  const int64_t stride = p.stride;
#pragma GCC unroll 16
  for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 2
    for (int64_t j = 0; j < vectors; ++j) columns.store(to + i * stride, j, at_most(high, at_least(low, total[i][j])));
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
