// The loops of conv_kernels.h, for the ISA that the including conv_<isa>.cc file is compiled for.
#pragma once

#include "conv_kernels.h"
#include "simd_math.h"

namespace jaxfuse::conv {
namespace {

// ---- forward

// The formulas of jax.nn. Every comparison is written so that NaN takes the branch that keeps it.
template <Activation activation>
Floats activated(Floats z, float alpha) {
  switch (activation) {
    case Activation::none: return z;
    case Activation::relu: return z < 0.0f ? Floats{} : z;
    case Activation::relu6: {
      const Floats positive = z < 0.0f ? Floats{} : z;
      return positive > 6.0f ? Floats{} + 6.0f : positive;
    }
    case Activation::leaky_relu: return z < 0.0f ? alpha * z : z;
    case Activation::elu: return z < 0.0f ? alpha * expm1_of_negative(z) : z;
    case Activation::sigmoid: return 1.0f / (1.0f + exp(-z));
    case Activation::tanh: return tanh(z);
    case Activation::silu: return z / (1.0f + exp(-z));
    case Activation::gelu: return z * normal_cdf(z);
    case Activation::gelu_tanh: {  // z·(1 + tanh u)/2 = z/(1 + e^(-2u))
      const Floats u = 0.797884561f * (z + 0.044715f * z * z * z);
      return z / (1.0f + exp(-2.0f * u));
    }
    case Activation::hard_swish: return z * (activated<Activation::relu6>(z + 3.0f, 0) / 6.0f);
    case Activation::softplus: {
      const Floats positive = z < 0.0f ? Floats{} : z;
      return positive + log1p_up_to_1(exp(z < 0.0f ? z : -z));
    }
  }
}

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
  if (args.residual) z += load(static_cast<const T*>(args.residual) + at, lanes);
  store(static_cast<T*>(args.y) + at, round_to<T>(activated<activation>(z, args.alpha)), lanes);
}

template <class T, Activation activation>
void epilogue(const EpilogueArgs& args, int64_t begin, int64_t end) {
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
    store(y + at, z - z == 0.0f ? kept : round_to<T>(activated<activation>(z, args.alpha)), lanes);
  });
}

// ---- backward

// dy·activation'(y), the derivative told by the value.
template <Activation activation>
Floats gradient_of(Floats dy, Floats y, float alpha) {
  switch (activation) {
    case Activation::relu: return y > 0.0f ? dy : Floats{};
    case Activation::relu6: return (y > 0.0f) & (y < 6.0f) ? dy : Floats{};
    case Activation::leaky_relu: return y >= 0.0f ? dy : alpha * dy;
    case Activation::elu: return y > 0.0f ? dy : dy * (y + alpha);
    case Activation::sigmoid: return dy * y * (1.0f - y);
    case Activation::tanh: return dy * (1.0f - y * y);
    default: return dy;
  }
}

template <class T, Activation activation, class Lanes>
Floats gradient_vector(const GradientArgs& args, int64_t at, Lanes lanes) {
  const Floats dy = load(static_cast<const T*>(args.dy) + at, lanes);
  if constexpr (activation == Activation::none) return dy;
  const Floats y = load(static_cast<const T*>(args.y) + at, lanes);
  return round_to<T>(gradient_of<activation>(dy, y, args.alpha));
}

// Rows whose sum is taken in registers.
constexpr int64_t kGroupRows = 8;

template <class T, Activation activation>
void gradient_features_last(const GradientArgs& args, int64_t begin, int64_t end, float* sums) {
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

template <class T, Activation activation>
void gradient_inner(const GradientArgs& args, int64_t begin, int64_t end, float* sums) {
  for (int64_t row = begin; row < end; ++row) {
    Floats sum{};
    for_vectors(0, args.inner, [&](int64_t i, auto lanes) {
      const Floats g = gradient_vector<T, activation>(args, row * args.inner + i, lanes);
      if (args.g) store(static_cast<T*>(args.g) + row * args.inner + i, g, lanes);
      sum += g;
    });
    float total = 0;
    for (int i = 0; i < kLanes; ++i) total += sum[i];
    if (sums) sums[row - begin] = total;
  }
}

// ---- from run-time choices to template arguments

template <class F>
void with_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::none: return f(Constant<Activation::none>{});
    case Activation::relu: return f(Constant<Activation::relu>{});
    case Activation::relu6: return f(Constant<Activation::relu6>{});
    case Activation::leaky_relu: return f(Constant<Activation::leaky_relu>{});
    case Activation::elu: return f(Constant<Activation::elu>{});
    case Activation::sigmoid: return f(Constant<Activation::sigmoid>{});
    case Activation::tanh: return f(Constant<Activation::tanh>{});
    case Activation::silu: return f(Constant<Activation::silu>{});
    case Activation::gelu: return f(Constant<Activation::gelu>{});
    case Activation::gelu_tanh: return f(Constant<Activation::gelu_tanh>{});
    case Activation::hard_swish: return f(Constant<Activation::hard_swish>{});
    case Activation::softplus: return f(Constant<Activation::softplus>{});
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
