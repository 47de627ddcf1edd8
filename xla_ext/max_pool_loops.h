// The loops of max_pool_kernels.h for the ISA that the including file is compiled for. The lanes of a vector are
// channels.
#pragma once

#include "max_pool_kernels.h"
#include "simd.h"

namespace jaxfuse::max_pool {
namespace {

using Bytes = uint8_t __attribute__((vector_size(kLanes)));

inline Ints load_winners(const int32_t* p) { return load_bits<Ints>(p); }
inline Ints load_winners(const uint8_t* p) {
#if defined(__AVX512F__)
  return Ints(_mm512_maskz_cvtepu8_epi32(0xffff, __m128i(load_bits<Bytes>(p))));
#elif defined(__AVX2__)
  return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector(load_bits<Bytes>(p), Ints);
#endif
}

inline void store_winners(int32_t* p, Ints v) { store_bits(p, v); }
inline void store_winners(uint8_t* p, Ints v) {
#if defined(__AVX512F__)
  store_bits(p, Bytes(_mm512_maskz_cvtepi32_epi8(0xffff, __m512i(v))));
#else
  store_bits(p, __builtin_convertvector(v, Bytes));
#endif
}

template <class W>
Ints load_winners(const W* p, Whole) {
  return load_winners(p);
}
template <class W>
Ints load_winners(const W* p, First lanes) {
  W values[kLanes] = {};
  for (int64_t i = 0; i < lanes.n; ++i) values[i] = p[i];
  return load_winners(values);
}

template <class W>
void store_winners(W* p, Ints v, Whole) {
  store_winners(p, v);
}
template <class W>
void store_winners(W* p, Ints v, First lanes) {
  W values[kLanes];
  store_winners(values, v);
  for (int64_t i = 0; i < lanes.n; ++i) p[i] = values[i];
}

template <int n>
struct Vectors {
  static constexpr int count = n;
};

// f(first channel, lanes, how many vectors at once): four where there are as many, so that walking over a window, which
// costs a few instructions for each position, is paid for once.
template <class F>
void for_channels(int64_t channels, F f) {
  constexpr int kAtOnce = 4;
  int64_t c = 0;
  for (; c + kAtOnce * kLanes <= channels; c += kAtOnce * kLanes) f(c, Whole{}, Vectors<kAtOnce>{});
  for_vectors(c, channels, [&](int64_t i, auto lanes) { f(i, lanes, Vectors<1>{}); });
}

// f(i0, i1, i2) for rows [begin, end) of a dimension that is followed by two others.
template <class F>
void for_pixels(Range rows, int64_t n1, int64_t n2, F f) {
  for (int64_t i0 = rows.begin; i0 < rows.end; ++i0) {
    for (int64_t i1 = 0; i1 < n1; ++i1) {
      for (int64_t i2 = 0; i2 < n2; ++i2) f(i0, i1, i2);
    }
  }
}

// The inputs that window `o` covers: all, and those that are no padding.
Range covered(const Axis& axis, int64_t o) {
  const int64_t begin = o * axis.stride - axis.padding_low;
  return {begin, begin + axis.window};
}
Range inside(const Axis& axis, int64_t o) {
  const Range all = covered(axis, o);
  return {all.begin < 0 ? 0 : all.begin, all.end > axis.in ? axis.in : all.end};
}
bool contains(const Axis& axis, int64_t i) { return i >= 0 && i < axis.in; }

constexpr float kLowest = -__builtin_inff();

template <class T>
void forward(const Args& args, const Block& block) {
  const auto& [a0, a1, a2] = args.axes;
  const int64_t channels = args.channels;
  const T* x = static_cast<const T*>(args.in) + block.entry * a0.in * a1.in * a2.in * channels;
  T* y = static_cast<T*>(args.out) + (block.entry * a0.out + block.rows.begin) * a1.out * a2.out * channels;
  for_pixels(block.rows, a1.out, a2.out, [&, &a0 = a0, &a1 = a1, &a2 = a2](int64_t o0, int64_t o1, int64_t o2) {
    const Range r0 = inside(a0, o0), r1 = inside(a1, o1), r2 = inside(a2, o2);
    for_channels(channels, [&](int64_t c, auto lanes, auto vectors) {
      Floats largest[vectors.count];
      for (Floats& l : largest) l = Floats{} + kLowest;
      for (int64_t i0 = r0.begin; i0 < r0.end; ++i0) {
        for (int64_t i1 = r1.begin; i1 < r1.end; ++i1) {
          const T* p = x + ((i0 * a1.in + i1) * a2.in + r2.begin) * channels + c;
          for (int64_t i2 = r2.begin; i2 < r2.end; ++i2, p += channels) {
            for (int j = 0; j < vectors.count; ++j) {
              const Floats v = load(p + j * kLanes, lanes);
              largest[j] = ((v > largest[j]) | (v != v)) ? v : largest[j];
            }
          }
        }
      }
      for (int j = 0; j < vectors.count; ++j) store(y + c + j * kLanes, largest[j], lanes);
    });
    y += channels;
  });
}

// With the winners. XLA's select_and_scatter with `>=` on its CPU, where the padding is -inf like any other: the winner so
// far stays if it is >= the next, so that the first of equals wins, a NaN beats what is before it and loses to what comes
// after, and a window of -inf that begins in the padding has its winner there.
template <class T, class W>
void forward_with_winners(const Args& args, const Block& block) {
  const auto& [a0, a1, a2] = args.axes;
  const int64_t channels = args.channels, at = (block.entry * a0.out + block.rows.begin) * a1.out * a2.out * channels;
  const T* x = static_cast<const T*>(args.in) + block.entry * a0.in * a1.in * a2.in * channels;
  T* y = static_cast<T*>(args.out) + at;
  W* winners = static_cast<W*>(args.winners) + at;
  for_pixels(block.rows, a1.out, a2.out, [&, &a0 = a0, &a1 = a1, &a2 = a2](int64_t o0, int64_t o1, int64_t o2) {
    const Range r0 = covered(a0, o0), r1 = covered(a1, o1), r2 = covered(a2, o2);
    for_channels(channels, [&](int64_t c, auto lanes, auto vectors) {
      Floats largest[vectors.count], not_number[vectors.count] = {};
      Ints winner[vectors.count] = {};
      for (Floats& l : largest) l = Floats{} + kLowest;
      int32_t position = 0;
      for (int64_t i0 = r0.begin; i0 < r0.end; ++i0) {
        for (int64_t i1 = r1.begin; i1 < r1.end; ++i1) {
          const bool row_inside = contains(a0, i0) && contains(a1, i1);
          for (int64_t i2 = r2.begin; i2 < r2.end; ++i2, ++position) {
            const bool is_data = row_inside && contains(a2, i2);
            const T* p = is_data ? x + ((i0 * a1.in + i1) * a2.in + i2) * channels + c : nullptr;
            for (int j = 0; j < vectors.count; ++j) {
              const Floats v = is_data ? load(p + j * kLanes, lanes) : Floats{} + kLowest;
              const Ints stays = largest[j] >= v;
              largest[j] = stays ? largest[j] : v;
              winner[j] = stays ? winner[j] : Ints{} + position;
              not_number[j] = v == v ? not_number[j] : v;
            }
          }
        }
      }
      for (int j = 0; j < vectors.count; ++j) {
        const Floats value = not_number[j] == not_number[j] ? largest[j] : not_number[j];
        store(y + c + j * kLanes, value, lanes);
        store_winners(winners + c + j * kLanes, winner[j], lanes);
      }
    });
    y += channels, winners += channels;
  });
}

// Each input adds up, in f32 and in the order of the windows, the dy of the windows that it wins.
template <class T, class W>
void backward(const Args& args, const Block& block) {
  const auto& [a0, a1, a2] = args.axes;
  const int64_t channels = args.channels, entry = block.entry * a0.out * a1.out * a2.out * channels;
  const T* dy = static_cast<const T*>(args.in) + entry;
  const W* winners = static_cast<const W*>(args.winners) + entry;
  T* dx = static_cast<T*>(args.out) + (block.entry * a0.in + block.rows.begin) * a1.in * a2.in * channels;
  for_pixels(block.rows, a1.in, a2.in, [&, &a0 = a0, &a1 = a1, &a2 = a2](int64_t i0, int64_t i1, int64_t i2) {
    const Range r0 = a0.windows_of[i0], r1 = a1.windows_of[i1], r2 = a2.windows_of[i2];
    for_channels(channels, [&](int64_t c, auto lanes, auto vectors) {
      Floats sum[vectors.count] = {};
      for (int64_t o0 = r0.begin; o0 < r0.end; ++o0) {
        for (int64_t o1 = r1.begin; o1 < r1.end; ++o1) {
          const int64_t row = (i0 - covered(a0, o0).begin) * a1.window + i1 - covered(a1, o1).begin;
          for (int64_t o2 = r2.begin; o2 < r2.end; ++o2) {
            const int64_t at = ((o0 * a1.out + o1) * a2.out + o2) * channels + c;
            const Ints position = Ints{} + int32_t(row * a2.window + i2 - covered(a2, o2).begin);
            for (int j = 0; j < vectors.count; ++j) {
              const Floats g = load(dy + at + j * kLanes, lanes);
              sum[j] += load_winners(winners + at + j * kLanes, lanes) == position ? g : Floats{};
            }
          }
        }
      }
      for (int j = 0; j < vectors.count; ++j) store(dx + c + j * kLanes, round_to<T>(sum[j]), lanes);
    });
    dx += channels;
  });
}

template <class F>
void with_winners(bool wide, F f) {
  wide ? f(int32_t{}) : f(uint8_t{});
}

constexpr Kernels kernels = {
    [](const Args& args, const Block& block) {
      with_element(args.element, [&](auto t) {
        if (!args.winners) return forward<decltype(t)>(args, block);
        with_winners(args.wide_winners, [&](auto w) { forward_with_winners<decltype(t), decltype(w)>(args, block); });
      });
    },
    [](const Args& args, const Block& block) {
      with_element(args.element, [&](auto t) {
        with_winners(args.wide_winners, [&](auto w) { backward<decltype(t), decltype(w)>(args, block); });
      });
    },
};

}  // namespace
}  // namespace jaxfuse::max_pool
