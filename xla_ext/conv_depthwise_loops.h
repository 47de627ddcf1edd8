// The loops of conv_depthwise_kernels.h for the ISA that the including file is compiled for. The lanes of a vector are
// channels.
#pragma once

#include "conv_depthwise_line_loops.h"

namespace jaxfuse::conv::depthwise {
namespace {

constexpr int kTile = 8;  // outputs whose sums are in registers together

// f(Constant<n>) with the taps of a row of the filter, 0 where there is no unrolled code for them.
template <class F>
void with_taps(int64_t n, F f) {
  switch (n) {
    case 2: return f(Constant<2>{});
    case 3: return f(Constant<3>{});
    case 4: return f(Constant<4>{});
    case 5: return f(Constant<5>{});
    case 7: return f(Constant<7>{});
    default: return f(Constant<0>{});
  }
}

bool inside(int64_t i, int64_t extent) { return uint64_t(i) < uint64_t(extent); }

// Whether all that the outputs from number j of a phase on read is data.
bool is_inside(const Args& args, const Phase& phase, int64_t j) {
  const int64_t at = phase.in_first + j * phase.in_step;
  return at >= 0 && at + (kTile - 1) * phase.in_step + (phase.taps - 1) * phase.spacing < args.in;
}

inline Floats clipped(const Clip& clip, Floats z) {
  const Floats y = z <= clip.bounds[0] ? broadcast(clip.ends[0]) : z;
  return z >= clip.bounds[1] ? broadcast(clip.ends[1]) : y;
}

// sum[j] += Σ w[t]·x[at + (j·stride + t)·spacing], t < n: each input is loaded once for all outputs that read it.
template <int n, int stride, bool whole, class T, class Lanes>
[[gnu::always_inline]] inline void add_row(Floats (&sum)[kTile], const Args& args, const Phase& phase, const T* x,
                                           int64_t at, const float* w, Lanes lanes) {
  Floats tap[n];
  for (int t = 0; t < n; ++t, w += phase.tap_step * args.channels) tap[t] = load(w, lanes);
  const int64_t step = phase.spacing * args.channels;
  const T* v = x + at * args.channels;
#pragma GCC unroll 32
  for (int p = 0; p < (kTile - 1) * stride + n; ++p, v += step) {
    if (!whole && !inside(at + p * phase.spacing, args.in)) continue;
    const Floats in = load(v, lanes);
#pragma GCC unroll 8
    for (int t = 0; t < n; ++t) {
      const int j = (p - t) / stride;
      if (p >= t && (p - t) % stride == 0 && j < kTile) sum[j] = multiply_add(tap[t], in, sum[j]);
    }
  }
}

// The same for any phase, tap by tap.
template <class T, class Lanes>
void add_row_by_taps(Floats (&sum)[kTile], const Args& args, const Phase& phase, const T* x, int64_t at, const float* w,
                     Lanes lanes) {
  for (int64_t t = 0; t < phase.taps; ++t, at += phase.spacing, w += phase.tap_step * args.channels) {
    const Floats tap = load(w, lanes);
#pragma GCC unroll 8
    for (int j = 0; j < kTile; ++j) {
      const int64_t i = at + j * phase.in_step;
      if (inside(i, args.in)) sum[j] = multiply_add(tap, load(x + i * args.channels, lanes), sum[j]);
    }
  }
}

// The kTile outputs from number j on of a phase, those before `end`, for the channels of one vector. n: phase.taps, and
// stride: in_step over spacing; or 0 for any.
template <int n, int stride, bool whole, class T, class Lanes>
[[gnu::always_inline]] inline void convolve_tile(const Args& args, const Piece& piece, const Phase& phase, int64_t j,
                                                 int64_t end, const float* w, const Output& output, int64_t c, Lanes lanes) {
  Floats sum[kTile];
  const Floats start = output.bias ? load(output.bias + c, lanes) : Floats{};
  for (Floats& s : sum) s = start;
  const int64_t at = phase.in_first + j * phase.in_step;
  for (const Row* row = piece.rows; row < piece.rows + piece.n_rows; ++row) {
    const T* x = static_cast<const T*>(row->x) + c;
    const float* taps = w + (row->tap + phase.first_tap) * args.channels + c;
    if constexpr (n == 0) {
      add_row_by_taps(sum, args, phase, x, at, taps, lanes);
    } else {
      add_row<n, stride, whole>(sum, args, phase, x, at, taps, lanes);
    }
  }
  if (piece.next && c * sizeof(T) % 64 == 0) {
    const T* next = static_cast<const T*>(piece.next) + at * args.channels + c;
    for (int i = 0; i < kTile; ++i) __builtin_prefetch(next + i * phase.in_step * args.channels, 0, 2);
  }
  int64_t to = (phase.first + j * phase.step - piece.begin) * args.out_step + c;
  T* const y = static_cast<T*>(output.y);
  const Clip clip = output.clip;
  for (int i = 0; i < kTile && j + i < end; ++i, to += phase.step * args.out_step) {
    output.sums ? store(output.sums + to, sum[i], lanes) : store(y + to, round_to<T>(clipped(clip, sum[i])), lanes);
  }
}

template <int n, int stride, class T>
void convolve_phase(const Args& args, const Piece& piece, const Phase& phase, const float* w, const Output& output) {
  const auto number = [&](int64_t o) { return o < phase.first ? 0 : (o - phase.first + phase.step - 1) / phase.step; };
  const int64_t end = number(piece.end);
  for (int64_t j = number(piece.begin); j < end; j += kTile) {
    with_bool(is_inside(args, phase, j), [&](auto whole) {
      int64_t c = 0;
      for (; c + kLanes <= args.channels; c += kLanes) {
        convolve_tile<n, stride, whole.value, T>(args, piece, phase, j, end, w, output, c, Whole{});
      }
      if (c < args.channels) {
        convolve_tile<0, 0, false, T>(args, piece, phase, j, end, w, output, c, First{args.channels - c});
      }
    });
  }
}

template <class T>
void convolve(const Args& args, const Piece& piece, const float* w, const Output& output) {
  for (const Phase* phase = args.phases; phase < args.phases + args.n_phases; ++phase) {
    with_taps(phase->taps, [&](auto n) {
      if (n.value && phase->in_step == phase->spacing) return convolve_phase<n.value, 1, T>(args, piece, *phase, w, output);
      if constexpr (n.value % 2) {
        if (phase->in_step == 2 * phase->spacing) return convolve_phase<n.value, 2, T>(args, piece, *phase, w, output);
      }
      convolve_phase<0, 0, T>(args, piece, *phase, w, output);
    });
  }
}

// sum[t] += Σ g·x for kOutputs outputs that read neighbouring inputs, so that each input is loaded once.
constexpr int kOutputs = 4;

template <int n, class T, class Lanes>
[[gnu::always_inline]] inline void add_neighbours(Floats (&sum)[n], const Args& args, const T* x, int64_t at, const T* g,
                                                  Lanes lanes) {
  Floats v[kOutputs];
  for (int j = 0; j < kOutputs; ++j) v[j] = load(g + j * args.channels, lanes);
#pragma GCC unroll 16
  for (int p = 0; p < kOutputs + n - 1; ++p) {
    if (!inside(at + p, args.in)) continue;
    const Floats in = load(x + (at + p) * args.channels, lanes);
#pragma GCC unroll 8
    for (int t = 0; t < n; ++t) {
      if (p >= t && p - t < kOutputs) sum[t] = multiply_add(v[p - t], in, sum[t]);
    }
  }
}

// sums[t] += Σ g·x for n taps of a row of the filter, the first of which reads x[at] for the first output.
template <int n, class T, class Lanes>
void add_products(const Args& args, const Piece& piece, const T* x, int64_t at, const T* g, float* sums, Lanes lanes) {
  const int64_t spacing = args.phases->spacing, in_step = args.phases->in_step;
  Floats sum[n] = {};
  int64_t o = piece.begin;
  if (spacing == 1 && in_step == 1) {
    for (; o + kOutputs <= piece.end; o += kOutputs, at += kOutputs, g += kOutputs * args.channels) {
      add_neighbours<n>(sum, args, x, at, g, lanes);
    }
  }
  for (; o < piece.end; ++o, at += in_step, g += args.channels) {
    const Floats v = load(g, lanes);
#pragma GCC unroll 8
    for (int t = 0; t < n; ++t) {
      const int64_t i = at + t * spacing;
      if (inside(i, args.in)) sum[t] = multiply_add(v, load(x + i * args.channels, lanes), sum[t]);
    }
  }
  for (int t = 0; t < n; ++t) store(sums + t * args.channels, load(sums + t * args.channels, lanes) + sum[t], lanes);
}

template <class T, class Lanes>
void add_bias_gradient(const Args& args, const Piece& piece, const T* g, float* db, Lanes lanes) {
  Floats sum = {};
  for (int64_t o = piece.begin; o < piece.end; ++o, g += args.channels) sum += load(g, lanes);
  store(db, load(db, lanes) + sum, lanes);
}

template <class T>
void filter_gradient(const Args& args, const Piece& piece, int64_t begin, int64_t end, const void* dy, float* sums,
                     float* db) {
  const T* g = static_cast<const T*>(dy);
  const int64_t first = args.phases->in_first + piece.begin * args.phases->in_step;
  for_vectors(begin, end, [&](int64_t c, auto lanes) {
    for (const Row* row = piece.rows; row < piece.rows + piece.n_rows; ++row) {
      const T* x = static_cast<const T*>(row->x) + c;
      with_taps(args.taps, [&](auto n) {
        constexpr int at_once = n.value ? n.value : 1;
        for (int64_t t = 0; t < args.taps; t += at_once) {
          add_products<at_once>(args, piece, x, first + t * args.phases->spacing, g + c,
                                sums + (row->tap + t) * args.channels + c, lanes);
        }
      });
    }
    if (db) add_bias_gradient(args, piece, g + c, db + c, lanes);
  });
}

constexpr Kernels kernels = {
    [](const Args& args, const Piece& piece, const float* w, const Output& output) {
      with_dtype(args.bf16, [&](auto t) { convolve<decltype(t)>(args, piece, w, output); });
    },
    [](const Args& args, const Piece& piece, int64_t begin, int64_t end, const void* g, float* sums, float* db) {
      with_dtype(args.bf16, [&](auto t) { filter_gradient<decltype(t)>(args, piece, begin, end, g, sums, db); });
    },
    convolve_line,
    copy_tap,
    kLineStep,
};

}  // namespace
}  // namespace jaxfuse::conv::depthwise
