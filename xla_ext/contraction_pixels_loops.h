// Products of neighbouring pixels, for what stays in the first-level cache: bias and clip meet the sums in registers.
#pragma once

#include "contraction_kernels.h"
#include "contraction_steps.h"

namespace jaxfuse::contraction {
namespace {

// Sums of twelve pixels by two vectors of columns: each factor is loaded once for two products.
constexpr int64_t kPixels = kLanes == 16 ? 12 : 6, kPixelVectors = 2;

inline int64_t bytes_of(Element element) { return element == Element::f32 ? sizeof(float) : sizeof(bf16); }

// Elements of the columns; of the last vector of them only some lanes.
template <int64_t vectors, class Lanes>
struct Vectors {
  const Lanes last;

  template <class T>
  Floats load(const T* from, int64_t j) const {
    return j + 1 < vectors ? jaxfuse::load(from + j * kLanes) : jaxfuse::load(from + j * kLanes, last);
  }
  template <class T>
  void store(T* to, int64_t j, Floats v) const {
    j + 1 < vectors ? jaxfuse::store(to + j * kLanes, v) : jaxfuse::store(to + j * kLanes, v, last);
  }
};

constexpr int64_t kStepsTogether = 4;  // before which lines are fetched

// total += the products of a tap's steps [begin, end).
template <class Step, int64_t count, int64_t vectors>
[[gnu::always_inline]] inline void add_products(Floats (&total)[count][vectors], const Pixels& p, int64_t tap, int64_t begin, int64_t end,
                                                const char* fetch, int64_t fetched) {
  const char* const x = p.x + tap * p.tap;
  const char* panels[vectors];
#pragma GCC unroll 2
  for (int64_t j = 0; j < vectors; ++j) {
    const int64_t column = p.column + j * kLanes;
    panels[j] = p.panels + column / kPanel * p.panel + column % kPanel * int64_t(sizeof(float)) + tap * p.steps * kLineBytes;
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
  const int64_t together = fetched > 0 ? kStepsTogether : p.steps, lines = (fetched * together + p.steps - 1) / p.steps;
  for (int64_t s = begin; s < whole;) {
    for (int64_t i = 0; i < lines; ++i, fetch += kLineBytes) __builtin_prefetch(fetch, 0, 2);
    const int64_t until = s + together < whole ? s + together : whole;
    for (; s < until; ++s) add_step(s, [](const char* at) { return Step::load_step(at); });
  }
  if (whole < end) add_step(whole, [](const char* at) { return Step::load_last(at); });
}

// Sums of more steps than are added one after the other: of kMostPixelSteps at a time.
template <class Step, int64_t count, int64_t vectors, class Lanes>
[[gnu::noinline]] void multiply_long_pixels(const Pixels& p, Lanes last) {
  const Vectors<vectors, Lanes> columns{last};
  float* const to = static_cast<float*>(p.to);
  const float* const residual = static_cast<const float*>(p.residual);
  for (int64_t begin = 0; begin < p.steps; begin += kMostPixelSteps) {
    const int64_t end = begin + kMostPixelSteps < p.steps ? begin + kMostPixelSteps : p.steps;
    Floats total[count][vectors] = {};
    add_products<Step>(total, p, 0, begin, end, nullptr, 0);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < vectors; ++j) {
        float* const line = to + i * p.stride;
        const Floats before = begin > 0 ? columns.load(line, j) : p.bias ? columns.load(p.bias, j) : Floats{};
        Floats sum = before + total[i][j];
        if (end == p.steps && residual) sum += columns.load(residual + i * p.stride, j);
        columns.store(line, j, end < p.steps ? sum : at_most(p.high, at_least(p.low, sum)));
      }
    }
  }
}

template <class T, int64_t count, int64_t vectors, class Lanes>
[[gnu::always_inline]] inline void finish(Floats (&total)[count][vectors], const Pixels& p, Vectors<vectors, Lanes> columns) {
  const float low = p.low, high = p.high;
  const int64_t stride = p.stride;
  T* const to = static_cast<T*>(p.to);
  if (const T* const residual = static_cast<const T*>(p.residual)) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 2
      for (int64_t j = 0; j < vectors; ++j) total[i][j] += columns.load(residual + i * stride, j);
    }
  }
#pragma GCC unroll 16
  for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 2
    for (int64_t j = 0; j < vectors; ++j) columns.store(to + i * stride, j, round_to<T>(at_most(high, at_least(low, total[i][j]))));
  }
}

template <class Step, int64_t count, int64_t vectors, class Lanes>
void multiply_pixels(const Pixels& p, Lanes last) {
  if (p.taps * p.steps > kMostPixelSteps) return multiply_long_pixels<Step, count, vectors>(p, last);
  const Vectors<vectors, Lanes> columns{last};
  const int64_t bytes = bytes_of(p.element);
  if (p.residual) {
    const char* const residual = static_cast<const char*>(p.residual);
#pragma GCC unroll 16
    for (int64_t i = 0; i < count; ++i) {
      __builtin_prefetch(residual + i * p.stride * bytes);
      if (bytes * vectors * kLanes > 64) __builtin_prefetch(residual + i * p.stride * bytes + 64);
    }
  }
  Floats total[count][vectors];
#pragma GCC unroll 2
  for (int64_t j = 0; j < vectors; ++j) {
    const Floats start = p.bias ? columns.load(p.bias, j) : Floats{};
#pragma GCC unroll 16
    for (int64_t i = 0; i < count; ++i) total[i][j] = start;
  }
  for (int64_t tap = 0; tap < p.taps; ++tap) add_products<Step>(total, p, tap, 0, p.steps, p.fetch, tap == 0 ? p.fetched : 0);
  p.element == Element::f32 ? finish<float>(total, p, columns) : finish<bf16>(total, p, columns);
}

// The same of `given` pixels, at most `count`.
template <class Step, int64_t count, int64_t vectors, class Lanes>
void multiply_pixels(int64_t given, const Pixels& p, Lanes last) {
  if constexpr (count > 1) {
    if (given < count) return multiply_pixels<Step, count - 1, vectors>(given, p, last);
  }
  multiply_pixels<Step, count, vectors>(p, last);
}

template <class Step, int64_t vectors, class Lanes>
void multiply_all_pixels(const Pixels& given, Lanes last) {
  Pixels p = given;
  const int64_t tiles = (p.count + kPixels - 1) / kPixels, row = p.stride * bytes_of(p.element);
  for (int64_t i = 0; i < tiles; ++i) {
    p.fetch = given.fetch + i * given.fetched / tiles * kLineBytes, p.fetched = (i + 1) * given.fetched / tiles - i * given.fetched / tiles;
    const int64_t begin = i * p.count / tiles, end = (i + 1) * p.count / tiles;
    p.x = given.x + begin * p.pixel, p.to = static_cast<char*>(given.to) + begin * row;
    if (p.residual) p.residual = static_cast<const char*>(given.residual) + begin * row;
    multiply_pixels<Step, kPixels, vectors>(end - begin, p, last);
  }
}

template <class Step>
void multiply_pixels(const Pixels& p) {
  if (p.columns == kPixelVectors * kLanes) return multiply_all_pixels<Step, 2>(p, Whole{});
  if (p.columns > kLanes) return multiply_all_pixels<Step, 2>(p, First{p.columns - kLanes});
  if (p.columns == kLanes) return multiply_all_pixels<Step, 1>(p, Whole{});
  multiply_all_pixels<Step, 1>(p, First{p.columns});
}

}  // namespace
}  // namespace jaxfuse::contraction
