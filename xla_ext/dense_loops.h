// The loops of dense_kernels.h, for the ISA that the including file is compiled for.
#pragma once

#include "activation_loops.h"
#include "dense_kernels.h"

namespace jaxfuse::dense {
namespace {

template <class T, Activation activation>
void epilogue(const EpilogueArgs& given, int64_t begin, int64_t end) {
  const EpilogueArgs args = given;  // of our own: no store changes it, and nothing is read again
  const T* residual = static_cast<const T*>(args.residual);
  T *z_out = static_cast<T*>(args.z), *y = static_cast<T*>(args.y);
  for (int64_t row = begin; row < end; ++row) {
    for_vectors(0, args.columns, [&](int64_t c, auto lanes) {
      const int64_t at = row * args.stride + c;
      Floats z = load(args.in + row * args.in_stride + c, lanes);
      if (args.scale) z *= load(args.scale + c, lanes);
      if (args.bias) z += load(args.bias + c, lanes);
      const Floats added = residual ? load(residual + at, lanes) : Floats{};
      if (residual && !args.residual_last) z += added;
      if (z_out) store(z_out + at, round_to<T>(z), lanes);
      Floats value = activated<activation>(z, args.parameters);
      if (args.residual_last) value += added;
      store(y + at, round_to<T>(value), lanes);
    });
  }
}

// Rows whose sum is taken in registers.
constexpr int64_t kGroupRows = 8;

template <class T, Activation activation>
void gradient(const GradientArgs& given, int64_t begin, int64_t end, float* sums) {
  const GradientArgs args = given;
  for (int64_t c = 0; sums && c < args.columns; ++c) sums[c] = 0;
  for (int64_t first = begin; first < end; first += kGroupRows) {
    const int64_t last = first + kGroupRows < end ? first + kGroupRows : end;
    for_vectors(0, args.columns, [&](int64_t c, auto lanes) {
      Floats sum{};
      for (int64_t row = first; row < last; ++row) {
        const int64_t at = row * args.columns + c;
        const Floats g = gradient_vector<T, activation>(args, at, lanes);
        if (args.g) store(static_cast<T*>(args.g) + at, g, lanes);
        sum += g;
      }
      if (sums) store(sums + c, load(sums + c, lanes) + sum, lanes);
    });
  }
}

constexpr Kernels kernels = {
    [](const EpilogueArgs& args, int64_t begin, int64_t end) {
      with_element(args.element, [&](auto t) {
        with_activation(args.activation, [&](auto act) { epilogue<decltype(t), act.value>(args, begin, end); });
      });
    },
    [](const GradientArgs& args, int64_t begin, int64_t end, float* sums) {
      with_element(args.element, [&](auto t) {
        with_activation(args.activation, [&](auto act) { gradient<decltype(t), act.value>(args, begin, end, sums); });
      });
    },
};

}  // namespace
}  // namespace jaxfuse::dense
