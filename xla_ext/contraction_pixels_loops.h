// Products of neighbouring pixels, for what stays in the first-level cache: bias and clip meet the sums in registers.
#pragma once

#include <utility>

#include "contraction_kernels.h"
#include "contraction_steps.h"
#include "cut.h"

namespace jaxfuse::contraction {
namespace {

// Sums of fourteen pixels by two vectors of columns, or of three by four: each factor is loaded once for two products, or four. Images are
// mostly 7, 14, 28, 56 or 112 pixels wide. Products of several instructions leave registers for twelve. Of fewer vectors with AVX2 as many
// pixels more, for a product takes as long as eight begin.
constexpr int64_t kPixelVectors = kLanes == 8 ? 4 : 2;
template <class Step>
constexpr int64_t pixels_of(int64_t vectors) {
  if (kLanes == 16) return Step::kIsOneInstruction ? 14 : 12;
  return kLanes == 4 ? 6 : vectors == 1 ? 8 : 12 / vectors;
}

template <class Step>
int64_t bytes_of(Element element) {
  return Step::kElements == 1 || element == Element::f32 ? sizeof(float) : sizeof(bf16);
}

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

constexpr int64_t kStepsOfFetch = 16;  // before which lines are fetched
constexpr int64_t kOfPointer = 3;      // pixels that are found by one: at it, and at once and twice the distance of two pixels

inline void fetch(Lines& lines) {
  for (int64_t i = 0; i < lines.count; ++i, lines.first += kLineBytes) __builtin_prefetch(lines.first, 0, 2);
}

// Past the next `bytes`, in a register: the compiler, which knows the distances, would keep a pointer for each pixel.
template <int64_t bytes>
[[gnu::always_inline]] inline void advance(const char*& pointer) {
  pointer += bytes;
  asm("" : "+r"(pointer));
}

// total += the products of a tap's steps. With a pointer for each pixel there were no registers left: a panel's numbers would be read from the
// stack for every product.
template <class Step, int64_t count, int64_t vectors, int64_t... i>
[[gnu::always_inline]] inline void add_products(Floats (&total)[count][vectors], const Pixels& p, const char* first, Lines fetched,
                                                const char* panels, std::integer_sequence<int64_t, i...>) {
  const int64_t pixel = p.pixel, panel = p.panel;
  const char* x[] = {first + i * kOfPointer * pixel...};
  const auto columns = [&](int64_t j) {
    return load(reinterpret_cast<const float*>(panels + j * kLanes / kPanel * panel) + j * kLanes % kPanel);
  };
  const bool odd = Step::kElements > 1 && p.odd;
  for (int64_t left = p.steps - odd; left > 0; left -= kStepsOfFetch) {
    fetch(fetched);
    const char* const behind = panels + (left < kStepsOfFetch ? left : kStepsOfFetch) * kLineBytes;
    while (panels < behind) {
      multiply_step<Step>(total, [&](int64_t n) { return Step::load_step(x[n / kOfPointer] + n % kOfPointer * pixel); }, columns);
      advance<kLineBytes>(panels);
      (advance<kStepBytes>(x[i]), ...);
    }
  }
  if (odd) multiply_step<Step>(total, [&](int64_t n) { return Step::load_last(x[n / kOfPointer] + n % kOfPointer * pixel); }, columns);
}

// The same with a pointer for each pixel, where they are few or two steps are taken at once.
template <class Step, int64_t count, int64_t vectors>
[[gnu::always_inline]] inline void add_products(Floats (&total)[count][vectors], const Pixels& p, const char* first, Lines fetched,
                                                const char* panel) {
  const char* x[count];
#pragma GCC unroll 16
  for (int64_t i = 0; i < count; ++i) {
    x[i] = first + i * p.pixel;
    if constexpr (kLanes == 8) asm("" : "+r"(x[i]));  // in a register, and not reckoned anew at every step
  }
  const char* panels[vectors];
#pragma GCC unroll 4
  for (int64_t j = 0; j < vectors; ++j) {
    panels[j] = panel + j * kLanes / kPanel * p.panel + j * kLanes % kPanel * int64_t(sizeof(float));
  }
  const auto columns = [&](int64_t s, int64_t j) { return load(reinterpret_cast<const float*>(panels[j] + s * kLineBytes)); };
  const auto add_step = [&](int64_t s, auto load_x) {
    multiply_step<Step>(total, [&](int64_t i) { return load_x(x[i] + s * kStepBytes); }, [&](int64_t j) { return columns(s, j); });
  };
  const auto add_two = [&](int64_t s) {
    if constexpr (Step::kTogether == 2) {
      multiply_two<Step>(total, [&](int64_t n, int64_t i) { return Step::load_step(x[i] + (s + n) * kStepBytes); },
                         [&](int64_t n, int64_t j) { return columns(s + n, j); });
    }
  };
  const bool odd = Step::kElements > 1 && p.odd;
  const int64_t whole = p.steps - odd;
  for (int64_t begin = 0; begin < whole; begin += kStepsOfFetch) {
    fetch(fetched);
    const int64_t end = begin + kStepsOfFetch < whole ? begin + kStepsOfFetch : whole;
    for_steps<Step, count + 1 >= pixels_of<Step>(vectors) ? kStepsOfFetch : 1>(begin, end, [&](int64_t s) {
      add_step(s, [](const char* at) { return Step::load_step(at); });
    }, add_two);
  }
  if (odd) add_step(whole, [](const char* at) { return Step::load_last(at); });
}

// What the sums of a vector of columns begin with.
template <class Step, int64_t vectors, class Lanes>
Floats start(const Pixels& p, Vectors<vectors, Lanes> columns, int64_t j) {
  if constexpr (Step::kIsExact) return columns.load(reinterpret_cast<const float*>(p.offsets), j);
  return p.bias && !p.scale ? columns.load(p.bias, j) : Floats{};
}

// scale·sum + bias.
template <class Step, int64_t count, int64_t vectors, class Lanes>
[[gnu::always_inline]] inline void scale(Floats (&total)[count][vectors], const Pixels& p, Vectors<vectors, Lanes> columns) {
#pragma GCC unroll 4
  for (int64_t j = 0; j < vectors; ++j) {
    const Floats scale = columns.load(p.scale, j), bias = p.bias ? columns.load(p.bias, j) : Floats{} - 0.0f;
#pragma GCC unroll 16
    for (int64_t i = 0; i < count; ++i) {
      const Floats sum = Step::kIsExact ? __builtin_convertvector(Ints(total[i][j]), Floats) : total[i][j];
      total[i][j] = sum * scale + bias;
    }
  }
}

template <class T, int64_t count, int64_t vectors, class Lanes>
[[gnu::always_inline]] inline void finish(Floats (&total)[count][vectors], const Pixels& p, char* y, const char* other, Vectors<vectors, Lanes> columns) {
  const float low = p.low, high = p.high;
  const int64_t stride = p.stride;
  T* const to = reinterpret_cast<T*>(y);
  if (const T* const residual = reinterpret_cast<const T*>(other)) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 4
      for (int64_t j = 0; j < vectors; ++j) total[i][j] += columns.load(residual + i * stride, j);
    }
  }
#pragma GCC unroll 16
  for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < vectors; ++j) columns.store(to + i * stride, j, round_to<T>(at_most(high, at_least(low, total[i][j]))));
  }
}

// A tile. `fetched` are as many lines as are fetched before kStepsOfFetch steps.
template <class Step, int64_t count, int64_t vectors, class Lanes>
[[gnu::always_inline]] inline void multiply_tile(const Pixels& p, const char* x, char* to, const char* residual, Lines fetched, Lanes last) {
  const Vectors<vectors, Lanes> columns{last};
  const int64_t bytes = bytes_of<Step>(p.element);
  if (residual) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < count; ++i) {
      __builtin_prefetch(residual + i * p.stride * bytes);
      if (bytes * vectors * kLanes > 64) __builtin_prefetch(residual + i * p.stride * bytes + 64);
    }
  }
  Floats total[count][vectors];
#pragma GCC unroll 4
  for (int64_t j = 0; j < vectors; ++j) {
    const Floats first = start<Step>(p, columns, j);
#pragma GCC unroll 16
    for (int64_t i = 0; i < count; ++i) total[i][j] = first;
  }
  for (int64_t tap = 0; tap < p.taps; ++tap, fetched.count = 0) {
    const char *const pixels = x + tap * p.tap, *const panels = p.panels + tap * p.steps * kLineBytes;
    if constexpr (kLanes == 16 && Step::kTogether == 1) {
      add_products<Step>(total, p, pixels, fetched, panels, std::make_integer_sequence<int64_t, (count + kOfPointer - 1) / kOfPointer>());
    } else {
      add_products<Step>(total, p, pixels, fetched, panels);
    }
  }
  if (Step::kIsExact || p.scale) scale<Step>(total, p, columns);
  Step::kElements == 1 || p.element == Element::f32 ? finish<float>(total, p, to, residual, columns) : finish<bf16>(total, p, to, residual, columns);
}

// Past so many pixels, which fetched so many lines.
template <class Step>
[[gnu::always_inline]] inline void move_on(const Pixels& p, int64_t pixels, int64_t lines, const char*& x, char*& to, const char*& residual, Lines& fetched) {
  const int64_t bytes = pixels * p.stride * bytes_of<Step>(p.element);
  x += pixels * p.pixel, to += bytes, fetched.first += lines * kLineBytes;
  if (residual) residual += bytes;
}

// `n` tiles of `count` pixels, each of which fetches so many lines.
template <class Step, int64_t count, int64_t vectors, class Lanes>
[[gnu::noinline]] void multiply_tiles(const Pixels& given, const char* x, char* to, const char* residual, Lines fetched, int64_t n, Lanes last) {
  Pixels p = given;  // whose numbers no store changes
  p.panels += p.column / kPanel * p.panel + p.column % kPanel * int64_t(sizeof(float));
  const int64_t together = fetched.count ? (fetched.count * kStepsOfFetch + p.steps - 1) / p.steps : 0;
  for (; n > 0; --n) {
    multiply_tile<Step, count, vectors>(p, x, to, residual, {fetched.first, together}, last);
    move_on<Step>(p, count, fetched.count, x, to, residual, fetched);
  }
}

// The same of tiles of `given` pixels, at most `count`.
template <class Step, int64_t vectors, class Lanes, int64_t count = pixels_of<Step>(vectors)>
void multiply_tiles(int64_t given, const Pixels& p, const char* x, char* to, const char* residual, Lines fetched, int64_t n, Lanes last) {
  if constexpr (count > 1) {
    if (given < count) return multiply_tiles<Step, vectors, Lanes, count - 1>(given, p, x, to, residual, fetched, n, last);
  }
  multiply_tiles<Step, count, vectors>(p, x, to, residual, fetched, n, last);
}

// Sums of more steps than are added one after the other: what the sums of the steps before became is the residual of the next. They are
// of one tap, and of f32. Tile by tile, what the parts of one give stays in the first-level cache.
template <class Step, int64_t vectors, class Lanes>
void multiply_in_parts(int64_t count, const Pixels& all, const char* x, char* to, const char* residual, Lines fetched, int64_t n, Lanes last) {
  for (; n > 0; --n) {
    for (int64_t begin = 0; begin < all.steps; begin += kMostPixelSteps) {
      Pixels p = all;
      p.steps = all.steps - begin < kMostPixelSteps ? all.steps - begin : kMostPixelSteps;
      p.panels += begin * kLineBytes;
      if (begin > 0) p.bias = nullptr;
      if (begin + p.steps < all.steps) p.low = -__builtin_inff(), p.high = __builtin_inff();
      const Lines own{fetched.first, begin == 0 ? fetched.count : 0};
      multiply_tiles<Step, vectors>(count, p, x + begin * kStepBytes, to, begin == 0 ? residual : to, own, 1, last);
    }
    move_on<Step>(all, count, fetched.count, x, to, residual, fetched);
  }
}

template <class Step, int64_t vectors, class Lanes>
void multiply_all_pixels(const Pixels& p, const char* x, char* to, const char* residual, Lines fetched, Lanes last) {
  if (p.count == 0) return;
  constexpr int64_t kPixels = pixels_of<Step>(vectors);
  const int64_t tiles = (p.count + kPixels - 1) / kPixels, least = p.count / tiles, larger = p.count % tiles;  // tiles of one pixel more
  const bool is_long = !Step::kIsExact && p.steps > kMostPixelSteps;
  const auto multiply = is_long ? multiply_in_parts<Step, vectors, Lanes> : multiply_tiles<Step, vectors, Lanes>;
  fetched.count = (fetched.count + tiles - 1) / tiles;
  if (larger > 0) multiply(least + 1, p, x, to, residual, fetched, larger, last);
  move_on<Step>(p, larger * (least + 1), larger * fetched.count, x, to, residual, fetched);
  multiply(least, p, x, to, residual, fetched, tiles - larger, last);
}

// Of as many vectors as have the columns.
template <class Step, int64_t vectors = kPixelVectors>
void multiply_pixels(const Pixels& p, const char* x, char* to, const char* residual, Lines fetched) {
  if constexpr (vectors > 1) {
    if (p.columns <= (vectors - 1) * kLanes) return multiply_pixels<Step, vectors - 1>(p, x, to, residual, fetched);
  }
  if (p.columns == vectors * kLanes) return multiply_all_pixels<Step, vectors>(p, x, to, residual, fetched, Whole{});
  multiply_all_pixels<Step, vectors>(p, x, to, residual, fetched, First{p.columns - (vectors - 1) * kLanes});
}

}  // namespace
}  // namespace jaxfuse::contraction
