// The loops of contraction_kernels.h, for the ISA that the including file is compiled for.
#pragma once

#include "contraction_bytes_loops.h"
#include "contraction_fetch.h"
#include "contraction_kernels.h"
#include "contraction_pixels_loops.h"
#include "simd_transpose.h"
#ifdef JAXFUSE_AMX
#include "contraction_amx_loops.h"
#endif

namespace jaxfuse::contraction {
namespace {

// ---- packing

// 0 if all that was seen is finite, else NaN in some lane.
struct Finite {
  Floats seen{};

  Floats operator()(Floats value) {
    seen += value * 0.0f;
    return value;
  }
  bool all() const { return to_bits(seen == 0.0f) == (1u << kLanes) - 1; }
};

// The step from element k on, of columns that lie side by side.
template <class Step, class T, class Lanes>
Floats step_beside(const T* from, int64_t inner_step, int64_t k, int64_t inner, Lanes lanes, Finite& finite) {
  const Floats first = finite(load(from + k * inner_step, lanes));
  const bool has_second = Step::kElements == 2 && k + 1 < inner;
  return Step::join(first, has_second ? finite(load(from + (k + 1) * inner_step, lanes)) : Floats{});
}

template <class Step, class T>
void pack_beside(const T* from, int64_t inner_step, int64_t count, int64_t inner, char* to, Layout layout, Finite& finite) {
  for (int64_t k = 0; k < inner; k += Step::kElements, to += layout.line) {
#pragma GCC unroll 4
    for (int64_t n = 0; n < kColumns; n += kLanes) {
      float* const at = reinterpret_cast<float*>(to + n / kPanel * layout.panel) + n % kPanel;
      if (n + kLanes <= count) {
        store(at, step_beside<Step>(from + n, inner_step, k, inner, Whole{}, finite));
      } else if (n < count) {
        store(at, step_beside<Step>(from + n, inner_step, k, inner, First{count - n}, finite));
      } else if (n / kPanel * kPanel < count) {
        store(at, Floats{});
      }
    }
  }
}

// Columns that lie anywhere, from element `first` on.
template <class Step, class T>
void pack_elements(const T* from, const Columns& c, int64_t count, int64_t first, int64_t inner, char* to, int64_t line, Finite& finite) {
  for (int64_t k = first; k < inner; k += Step::kElements) {
    for (int64_t n = 0; n < kPanel; ++n) {
      const T* at = from + n * c.column_step;
      const Floats step = n < count ? step_beside<Step>(at, c.inner_step, k, inner, First{1}, finite) : Floats{};
      store(reinterpret_cast<float*>(to + k / Step::kElements * line) + n, step, First{1});
    }
  }
}

// kLanes steps of a column whose elements are neighbours.
inline Floats steps_of_line(const float* from, OfFloats, Finite& finite) { return finite(load(from)); }
inline Floats steps_of_line(const bf16* from, OfFloats, Finite& finite) { return finite(load(from)); }
inline Floats steps_of_line(const bf16* from, OfPairs, Finite& finite) {
  const Floats pairs = load_bits<Floats>(from);
  finite(Floats(Uints(pairs) << 16));
  finite(Floats(Uints(pairs) & 0xffff0000));
  return pairs;
}
inline Floats steps_of_line(const float* from, OfPairs, Finite& finite) {
  Floats even, odd;
  for (int64_t i = 0; i < kLanes; ++i) even[i] = from[2 * i], odd[i] = from[2 * i + 1];
  return OfPairs::join(finite(even), finite(odd));
}

template <class Step, class T>
void pack_lines(const T* from, const Columns& c, int64_t count, int64_t inner, char* to, int64_t line, Finite& finite) {
  constexpr int64_t kBlock = kLanes * Step::kElements;
  const int64_t whole = inner / kBlock * kBlock;
  for (int64_t k = 0; k < whole; k += kBlock) {
    for (int64_t n = 0; n < kPanel; n += kLanes) {
      Floats block[kLanes] = {};
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        if (n + i < count) block[i] = steps_of_line(from + (n + i) * c.column_step + k, Step{}, finite);
      }
      transpose(block);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) store(reinterpret_cast<float*>(to + (k / Step::kElements + i) * line) + n, block[i]);
    }
  }
  pack_elements<Step>(from, c, count, whole, inner, to, line, finite);
}

template <class Step>
bool pack(const Columns& c, int64_t count, int64_t inner, char* to, Layout layout) {
  Finite finite;
  with_dtype(c.element == Element::bf16, [&](auto type) {
    const auto* from = static_cast<const decltype(type)*>(c.data);
    if (c.column_step == 1) return pack_beside<Step>(from, c.inner_step, count, inner, to, layout, finite);
    for (; count > 0; from += kPanel * c.column_step, count -= kPanel, to += layout.panel) {
      const int64_t columns = count < kPanel ? count : kPanel;
      if (c.inner_step == 1) {
        pack_lines<Step>(from, c, columns, inner, to, layout.line, finite);
      } else {
        pack_elements<Step>(from, c, columns, 0, inner, to, layout.line, finite);
      }
    }
  });
  return finite.all();
}

// ---- lines for rows

template <class Step, class T, class Lanes>
void transpose_block(const char* const* positions, int64_t channel, int64_t channels, char* to, int64_t stride, Lanes lanes) {
  const auto line = [&](int64_t p) { return load(reinterpret_cast<const T*>(positions[p]) + channel, lanes); };
  Floats block[kLanes];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes; ++i) {
    const int64_t p = i * Step::kElements;
    block[i] = Step::join(line(p), Step::kElements == 2 ? line(p + 1) : Floats{});
  }
  transpose(block);
  for (int64_t i = 0; i < kLanes && channel + i < channels; ++i) {
    store(reinterpret_cast<float*>(to + (channel + i) * stride), block[i]);
  }
}

template <class Step, class T>
void transpose_lines(const char* const* positions, int64_t count, int64_t channels, char* to, int64_t stride) {
  constexpr int64_t kBlock = kLanes * Step::kElements;
  static_assert(kPositions % kBlock == 0);
  for (int64_t p = 0; p < count; p += kBlock) {
    for_vectors(0, channels, [&](int64_t channel, auto lanes) {
      transpose_block<Step, T>(positions + p, channel, channels, to + p * int64_t(sizeof(T)), stride, lanes);
    });
  }
}

// ---- products

template <class Step, int64_t rows, int64_t vectors>
void multiply(const Tile& tile, float* sums, bool first) {
  Floats total[rows][vectors];
#pragma GCC unroll 16
  for (int64_t i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < vectors; ++j) total[i][j] = Floats{};
  }
  const char* line = tile.panels;
  const int64_t whole = tile.steps - tile.odd;
  Fetch fetch(tile);
  for (int64_t tap = 0; tap < tile.taps; ++tap) {
    const char* a[rows];
#pragma GCC unroll 16
    for (int64_t i = 0; i < rows; ++i) a[i] = tile.rows[tap * tile.row_step + i] + tile.offset;
    const auto columns = [&](int64_t step, int64_t j) {
      const char* const panel = line + step * tile.layout.line + j * kLanes / kPanel * tile.layout.panel;
      return load(reinterpret_cast<const float*>(panel) + j * kLanes % kPanel);
    };
    const auto add_step = [&](auto load_a) {
      multiply_step<Step>(total, [&](int64_t i) { return load_a(a[i]); }, [&](int64_t j) { return columns(0, j); });
      line += tile.layout.line;
    };
    const auto add_two = [&](int64_t s) {
      if constexpr (Step::kTogether == 2) {
        multiply_two<Step>(total, [&](int64_t n, int64_t i) { return Step::load_step(a[i] + (s + n) * kStepBytes); }, columns);
        line += 2 * tile.layout.line;
      }
    };
    for (int64_t begin = 0; begin < whole; begin += kLineSteps) {
      const int64_t end = begin + kLineSteps < whole ? begin + kLineSteps : whole;
      if (tile.next) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < rows; ++i) __builtin_prefetch(tile.next[tap * tile.row_step + i] + tile.offset + begin * kStepBytes);
      }
      fetch.some();
      for_steps<Step, rows + 1 >= kRows ? kLineSteps : 1>(begin, end, [&](int64_t s) {
        add_step([&](const char* row) { return Step::load_step(row + s * kStepBytes); });
      }, add_two);
    }
    if (tile.odd) add_step([&](const char* row) { return Step::load_last(row + whole * kStepBytes); });
  }
#pragma GCC unroll 16
  for (int64_t i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < vectors; ++j) {
      float* at = sums + i * kColumns + j * kLanes;
      store(at, first ? total[i][j] : Step::add(load(at), total[i][j]));
    }
  }
}

// Of `count` rows, at most `rows`, and of the vectors that have the tile's columns, at most `vectors`.
template <class Step, int64_t rows = kRows, int64_t vectors = kVectors>
void multiply_tile(const Tile& tile, int64_t count, float* sums, bool first) {
  if constexpr (rows > 1) {
    if (count < rows) return multiply_tile<Step, rows - 1, vectors>(tile, count, sums, first);
  }
  if constexpr (vectors > 1) {
    if (tile.columns <= (vectors - 1) * kLanes) return multiply_tile<Step, rows, vectors - 1>(tile, rows, sums, first);
  }
  multiply<Step, rows, vectors>(tile, sums, first);
}

template <class Step>
constexpr Products products = {kRows, 1, kMostSteps, 384 << 10, multiply_tile<Step>};

#if defined(JAXFUSE_AMX)  // what only such CPUs do so; the rest is AVX-512's
constexpr Kernels kernels = [] {
  Kernels all{kColumns, {}, matrix_products<MatricesOfPairs>, matrix_products<MatricesOfBytes>, matrix_products<MatricesOfBytes>};
  all.multiply_pairs = multiply_pairs;
  return all;
}();
#elif defined(JAXFUSE_BF16)
constexpr Kernels kernels = {
    kColumns, {}, products<OfPairs>, {}, {}, nullptr, pack<OfPairs>, nullptr, transpose_lines<OfPairs, bf16>,
    nullptr, nullptr, nullptr, nullptr, multiply_pixels<OfPairs>,
};
#elif defined(JAXFUSE_BYTES)
constexpr Kernels kernels = {kColumns, {}, {}, products<OfBytes<false>>, products<OfBytes<kSaturates>>};
#else
constexpr Kernels kernels = {
    kColumns, products<OfFloats>, products<OfPairs>, products<OfBytes<false>>, products<OfBytes<kSaturates>>,
    pack<OfFloats>, pack<OfPairs>, transpose_lines<OfFloats, float>, transpose_lines<OfPairs, bf16>,
    quantise<float>, quantise<bf16>, to_floats,
    multiply_pixels<OfFloats>, multiply_pixels<OfPairs>, multiply_pixels<OfBytes<kSaturates>>, kPixelVectors * kLanes,
};
#endif

}  // namespace
}  // namespace jaxfuse::contraction
