// The loops of attention_kernels.h, for the ISA that the including file is compiled for.
#pragma once

#include "attention_kernels.h"
#include "simd_math.h"

namespace jaxfuse::attention {
namespace {

constexpr float kNothing = -__builtin_inff();  // the largest of no scores

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float largest_of(Floats v) {
  float largest = v[0];
  for (int i = 1; i < kLanes; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

// With no score in the lanes that are not touched.
inline Floats scores_in(Floats v, Whole) { return v; }
inline Floats scores_in(Floats v, First lanes) {
  for (int64_t i = lanes.n; i < kLanes; ++i) v[i] = kNothing;
  return v;
}

// Bytes as lanes that are true where the byte is not 0.
template <class Lanes>
Ints mask_of(const uint8_t* p, Lanes lanes) {
  using Bytes = uint8_t __attribute__((vector_size(kLanes)));
  Bytes bytes = {};
  if constexpr (__is_same(Lanes, Whole)) {
    bytes = load_bits<Bytes>(p);
  } else {
    for (int64_t i = 0; i < lanes.n; ++i) bytes[i] = p[i];
  }
  return __builtin_convertvector(bytes, Ints) != 0;
}

// What the softmax is taken of, of one row: score(c, lanes).
template <class T, bool has_bias, bool has_mask, bool has_factor>
struct Row {
  const Scores& scores;
  const float* s;
  const T* bias;
  const uint8_t* mask;
  const float* factor;

  Row(const Scores& of, int64_t row)
      : scores(of), s(of.s + row * of.stride), bias(static_cast<const T*>(of.bias) + (has_bias ? row * of.bias_row : 0)),
        mask(of.mask + (has_mask ? row * of.mask_row : 0)), factor(of.factor + (has_factor ? row * of.factor_row : 0)) {}

  template <class Lanes>
  Floats score(int64_t c, Lanes lanes) const {
    Floats score = load(s + c, lanes) * scores.scale;
    if constexpr (has_bias) score += load(bias + c, lanes);
    if constexpr (has_mask) score = mask_of(mask + c, lanes) ? score : Floats{} + scores.fill;
    return score;
  }
  template <class Lanes>
  Floats unmasked(int64_t c, Floats v, Lanes lanes) const {
    if constexpr (has_mask) return mask_of(mask + c, lanes) ? v : Floats{};
    return v;
  }
  template <class Lanes>
  Floats weighted(int64_t c, Floats v, Lanes lanes) const {
    if constexpr (has_factor) return v * load(factor + c, lanes);
    return v;
  }
};

// f(row) for each of the rows, with what they have known to the compiler.
template <class F>
void for_rows(const Scores& scores, F f) {
  const auto each = [&](auto type, auto has_bias, auto has_mask, auto has_factor) {
    for (int64_t i = 0; i < scores.rows; ++i) {
      f(Row<decltype(type), has_bias.value, has_mask.value, has_factor.value>(scores, i), i);
    }
  };
  with_bool(scores.factor != nullptr, [&](auto has_factor) {
    with_bool(scores.mask != nullptr, [&](auto has_mask) {
      if (!scores.bias) return each(float{}, Constant<false>{}, has_mask, has_factor);
      with_element(scores.bias_element, [&](auto type) { each(type, Constant<true>{}, has_mask, has_factor); });
    });
  });
}

// Before a first score nothing is subtracted: e^(-Inf - 0) is 0, and a row of nothing but -Inf ends as 0/0.
inline float shift_of(float largest) { return largest == kNothing ? 0.0f : largest; }

void softmax(const Scores& scores, const Softmax& state, bool first) {
  for_rows(scores, [&](const auto& row, int64_t i) {
    float* s = scores.s + i * scores.stride;
    Floats most = Floats{} + kNothing;
    for_vectors(0, scores.keys, [&](int64_t c, auto lanes) {
      const Floats score = row.score(c, lanes);
      store(s + c, score, lanes);
      most = larger(scores_in(score, lanes), most);
    });
    const float before = first ? kNothing : state.largest[i], largest = largest_of(larger(most, Floats{} + before));
    const Floats shift = broadcast(shift_of(largest));
    Floats sum{};
    for_vectors(0, scores.keys, [&](int64_t c, auto lanes) {
      const Floats e = exp(load(s + c, lanes) - shift);
      store(s + c, row.weighted(c, e, lanes), lanes);
      sum += only(e, lanes);
    });
    state.largest[i] = largest;
    if (first) {
      state.total[i] = total(sum);
    } else {
      const float factor = exp(Floats{} + before - shift)[0];
      float* sums = state.sums + i * state.stride;
      state.total[i] = state.total[i] * factor + total(sum);
      for_vectors(0, state.columns, [&](int64_t c, auto lanes) { store(sums + c, load(sums + c, lanes) * factor, lanes); });
    }
  });
}

void write(const float* from, int64_t stride, int64_t rows, int64_t columns, Element element, void* to, int64_t to_row) {
  with_element(element, [&](auto type) {
    using T = decltype(type);
    for (int64_t i = 0; i < rows; ++i) {
      T* line = static_cast<T*>(to) + i * to_row;
      for_vectors(0, columns, [&](int64_t c, auto lanes) { store(line + c, round_to<T>(load(from + i * stride + c, lanes)), lanes); });
    }
  });
}

// An infinity leaves nothing, and of a NaN it is enough that high is one.
void split(const float* from, int64_t stride, int64_t rows, int64_t columns, void* high, void* low, int64_t to_row) {
  for (int64_t i = 0; i < rows; ++i, from += stride) {
    bf16 *const high_row = static_cast<bf16*>(high) + i * to_row, *const low_row = static_cast<bf16*>(low) + i * to_row;
    for_vectors(0, columns, [&](int64_t c, auto lanes) {
      const Floats value = load(from + c, lanes), rounded = round_to<bf16>(value), rest = value - rounded;
      store(high_row + c, rounded, lanes);
      store(low_row + c, round_to<bf16>(rest == rest ? rest : Floats{}), lanes);
    });
  }
}

void finish(const Softmax& state, int64_t rows, Element element, void* y, int64_t y_row, float* largest, float* inverse) {
  for (int64_t i = 0; i < rows; ++i) {
    const float factor = 1.0f / state.total[i];
    float* sums = state.sums + i * state.stride;
    for_vectors(0, state.columns, [&](int64_t c, auto lanes) { store(sums + c, load(sums + c, lanes) * factor, lanes); });
    if (largest) largest[i] = shift_of(state.largest[i]), inverse[i] = factor;
  }
  write(state.sums, state.stride, rows, state.columns, element, y, y_row);
}

void gradient(const Scores& scores, const Gradient& g) {
  for_rows(scores, [&](const auto& row, int64_t i) {
    float *s = scores.s + i * scores.stride, *dp = g.dp + i * scores.stride;
    float* dscores = g.dscores ? g.dscores + i * g.dscores_row : nullptr;
    const Floats largest = broadcast(g.largest[i]), inverse = broadcast(g.inverse[i]);
    Floats sum{};
    for_vectors(0, scores.keys, [&](int64_t c, auto lanes) {
      const Floats p = exp(row.score(c, lanes) - largest) * inverse;
      store(s + c, p, lanes);
      sum += only(p * row.weighted(c, load(dp + c, lanes), lanes), lanes);
    });
    const Floats delta = broadcast(g.delta ? g.delta[i] : total(sum));
    for_vectors(0, scores.keys, [&](int64_t c, auto lanes) {
      const Floats p = load(s + c, lanes);
      const Floats dscore = row.unmasked(c, p * (row.weighted(c, load(dp + c, lanes), lanes) - delta), lanes);
      store(s + c, row.weighted(c, p, lanes), lanes);
      store(dp + c, dscore * scores.scale, lanes);
      if (dscores) store(dscores + c, dscore, lanes);
    });
  });
}

void row_products(Element element, const void* a, int64_t a_row, const void* b, int64_t b_row, int64_t rows, int64_t columns,
                  float* sums) {
  with_element(element, [&](auto type) {
    using T = decltype(type);
    for (int64_t i = 0; i < rows; ++i) {
      Floats sum{};
      for_vectors(0, columns, [&](int64_t c, auto lanes) {
        const T *at = static_cast<const T*>(a) + i * a_row + c, *bt = static_cast<const T*>(b) + i * b_row + c;
        sum = multiply_add(load(at, lanes), load(bt, lanes), sum);
      });
      sums[i] = total(sum);
    }
  });
}

constexpr Kernels kernels = {softmax, finish, gradient, row_products, split, write};

}  // namespace
}  // namespace jaxfuse::attention
