// The loops of conv_kernels.h, for the ISA that the including file is compiled for.
#pragma once

#include "activation_loops.h"
#include "conv_kernels.h"

namespace jaxfuse::conv {
namespace {

// ---- forward

// What belongs to the features of a vector's lanes: consecutive ones if features are last, else one for all lanes.
template <class Lanes>
Floats load_feature(const float* values, int64_t feature, Constant<true>, Lanes lanes) {
  return load(values + feature, lanes);
}
template <class Lanes>
Floats load_feature(const float* values, int64_t feature, Constant<false>, Lanes) {
  return Floats{} + values[feature];
}

template <class T, Activation activation, class FeaturesLast, class Lanes>
void epilogue_vector(const EpilogueArgs& args, int64_t at, int64_t feature, FeaturesLast last, Lanes lanes) {
  Floats z{};
  if (args.in && args.in_f32) {
    z = load(static_cast<const float*>(args.in) + at, lanes);
  } else if (args.in) {
    z = load(static_cast<const T*>(args.in) + at, lanes);
  }
  if (args.scale) z *= load_feature(args.scale, feature, last, lanes);
  if (args.bias) z += load_feature(args.bias, feature, last, lanes);
  const Floats residual = args.residual ? load(static_cast<const T*>(args.residual) + at, lanes) : Floats{};
  if (args.residual && !args.residual_last) z += residual;
  Floats y = activated<activation>(z, args.parameters);
  if (args.residual && args.residual_last) y += residual;
  store(static_cast<T*>(args.y) + at, round_to<T>(y), lanes);
}

template <class T, Activation activation>
void epilogue(const EpilogueArgs& given, int64_t begin, int64_t end) {
  const EpilogueArgs args = given;  // of our own: no store changes it, and nothing is read again
  if (args.inner == 1) {
    for (int64_t row = begin; row < end; row += args.features) {
      for_vectors(0, args.features, [&](int64_t c, auto lanes) {
        epilogue_vector<T, activation>(args, row + c, c, Constant<true>{}, lanes);
      });
    }
    return;
  }
  for (int64_t row = begin; row < end; ++row) {
    for_vectors(0, args.inner, [&](int64_t i, auto lanes) {
      epilogue_vector<T, activation>(args, row * args.inner + i, row % args.features, Constant<false>{}, lanes);
    });
  }
}

template <class T, Activation activation>
void restore(const EpilogueArgs& args, int64_t begin, int64_t end) {
  T* y = static_cast<T*>(args.y);
  for_vectors(begin * args.inner, end * args.inner, [&](int64_t at, auto lanes) {
    const Floats z = load(static_cast<const T*>(args.in) + at, lanes), kept = load(y + at, lanes);
    Floats restored = activated<activation>(z, args.parameters);
    if (args.residual) restored += load(static_cast<const T*>(args.residual) + at, lanes);
    store(y + at, z - z == 0.0f ? kept : round_to<T>(restored), lanes);
  });
}

// ---- backward

// Rows whose sum is taken in registers.
constexpr int64_t kGroupRows = 8;

template <class T, Activation activation>
void gradient_features_last(const GradientArgs& given, int64_t begin, int64_t end, float* sums) {
  const GradientArgs args = given;
  for (int64_t c = 0; sums && c < args.features; ++c) sums[c] = 0;
  const int64_t group = kGroupRows * args.features;
  for (int64_t first = begin; first < end; first += group) {
    const int64_t last = first + group < end ? first + group : end;
    for_vectors(0, args.features, [&](int64_t c, auto lanes) {
      Floats sum{};
      for (int64_t row = first; row < last; row += args.features) {
        const Floats g = gradient_vector<T, activation>(args, row + c, lanes);
        if (args.g) store(static_cast<T*>(args.g) + row + c, g, lanes);
        sum += g;
      }
      if (sums) store(sums + c, load(sums + c, lanes) + sum, lanes);
    });
  }
}

constexpr int64_t kLongestSum = 1024;  // of f32 numbers; sums of those are in double

template <class T, Activation activation>
void gradient_inner(const GradientArgs& given, int64_t begin, int64_t end, float* sums) {
  const GradientArgs args = given;
  for (int64_t row = begin; row < end; ++row) {
    double total = 0;
    for (int64_t first = 0; first < args.inner; first += kLongestSum) {
      const int64_t last = args.inner - first < kLongestSum ? args.inner : first + kLongestSum;
      Floats sum{};
      for_vectors(first, last, [&](int64_t i, auto lanes) {
        const Floats g = gradient_vector<T, activation>(args, row * args.inner + i, lanes);
        if (args.g) store(static_cast<T*>(args.g) + row * args.inner + i, g, lanes);
        sum += g;
      });
      for (int i = 0; i < kLanes; ++i) total += sum[i];
    }
    if (sums) sums[row - begin] = float(total);
  }
}

constexpr Kernels kernels = {
    [](const EpilogueArgs& args, int64_t begin, int64_t end) {
      with_dtype(args.bf16, [&](auto t) {
        with_activation(args.activation, [&](auto act) { epilogue<decltype(t), act.value>(args, begin, end); });
      });
    },
    [](const EpilogueArgs& args, int64_t begin, int64_t end) {
      with_dtype(args.bf16, [&](auto t) {
        with_activation(args.activation, [&](auto act) { restore<decltype(t), act.value>(args, begin, end); });
      });
    },
    [](const GradientArgs& args, int64_t begin, int64_t end, float* sums) {
      with_dtype(args.bf16, [&](auto t) {
        with_activation(args.activation, [&](auto act) {
          auto* loop = args.inner == 1 ? &gradient_features_last<decltype(t), act.value>
                                       : &gradient_inner<decltype(t), act.value>;
          loop(args, begin, end, sums);
        });
      });
    },
};

}  // namespace
}  // namespace jaxfuse::conv
