// The loops of max_pool_kernels.h for the ISA that the including x_<isa>.cc file is compiled for. The lanes of a vector are
// channels.
#pragma once

#include "max_pool_kernels.h"
#include "simd.h"

namespace jaxfuse::max_pool {
namespace {

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
  const T* x = static_cast<const T*>(args.x) + block.item * a0.in * a1.in * a2.in * channels;
  T* y = static_cast<T*>(args.result) + (block.item * a0.out + block.rows.begin) * a1.out * a2.out * channels;
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
              largest[j] = (v > largest[j]) | (v != v) ? v : largest[j];
            }
          }
        }
      }
      for (int j = 0; j < vectors.count; ++j) store(y + c + j * kLanes, largest[j], lanes);
    });
    y += channels;
  });
}

// The position in its window of the value that wins it. As XLA's select_and_scatter with `>=` on its CPU does it, where
// the padding is -inf like any other: the winner so far stays if it is >= the next, so that the first of equals wins, a
// NaN beats what is before it and loses to what comes after, and a window of -inf that begins in the padding has its
// winner there.
template <class T>
void find_winners(const Args& args, int64_t item, Range windows, int32_t* winners) {
  const auto& [a0, a1, a2] = args.axes;
  const int64_t channels = args.channels, per_window = winners_per_window(channels);
  const T* x = static_cast<const T*>(args.x) + item * a0.in * a1.in * a2.in * channels;
  for_pixels(windows, a1.out, a2.out, [&, &a0 = a0, &a1 = a1, &a2 = a2](int64_t o0, int64_t o1, int64_t o2) {
    const Range r0 = covered(a0, o0), r1 = covered(a1, o1), r2 = covered(a2, o2);
    for_channels(channels, [&](int64_t c, auto lanes, auto vectors) {
      Floats largest[vectors.count];
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
            }
          }
        }
      }
      for (int j = 0; j < vectors.count; ++j) store_bits(winners + c + j * kLanes, winner[j]);
    });
    winners += per_window;
  });
}

// Each input adds up, in f32 and in the order of the windows, the dy of the windows that it wins.
template <class T>
void gather(const Args& args, const Block& block, int64_t first_row_of_windows, const int32_t* winners) {
  const auto& [a0, a1, a2] = args.axes;
  const int64_t channels = args.channels, per_window = winners_per_window(channels);
  const int64_t first_window = first_row_of_windows * a1.out * a2.out;
  const T* dy = static_cast<const T*>(args.dy) + block.item * a0.out * a1.out * a2.out * channels;
  T* dx = static_cast<T*>(args.result) + (block.item * a0.in + block.rows.begin) * a1.in * a2.in * channels;
  for_pixels(block.rows, a1.in, a2.in, [&, &a0 = a0, &a1 = a1, &a2 = a2](int64_t i0, int64_t i1, int64_t i2) {
    const Range r0 = a0.windows_of[i0], r1 = a1.windows_of[i1], r2 = a2.windows_of[i2];
    for_channels(channels, [&](int64_t c, auto lanes, auto vectors) {
      Floats sum[vectors.count] = {};
      for (int64_t o0 = r0.begin; o0 < r0.end; ++o0) {
        for (int64_t o1 = r1.begin; o1 < r1.end; ++o1) {
          const int64_t row = (i0 - covered(a0, o0).begin) * a1.window + i1 - covered(a1, o1).begin;
          for (int64_t o2 = r2.begin; o2 < r2.end; ++o2) {
            const int64_t window = (o0 * a1.out + o1) * a2.out + o2;
            const Ints position = Ints{} + int32_t(row * a2.window + i2 - covered(a2, o2).begin);
            const int32_t* winner = winners + (window - first_window) * per_window + c;
            for (int j = 0; j < vectors.count; ++j) {
              const Floats g = load(dy + window * channels + c + j * kLanes, lanes);
              sum[j] += load_bits<Ints>(winner + j * kLanes) == position ? g : Floats{};
            }
          }
        }
      }
      for (int j = 0; j < vectors.count; ++j) store(dx + c + j * kLanes, round_to<T>(sum[j]), lanes);
    });
    dx += channels;
  });
}

template <class T>
void backward(const Args& args, const Block& block, int32_t* winners) {
  const Range* windows_of = args.axes[0].windows_of;
  const Range windows = {windows_of[block.rows.begin].begin, windows_of[block.rows.end - 1].end};
  find_winners<T>(args, block.item, windows, winners);
  gather<T>(args, block, windows.begin, winners);
}

constexpr Kernels kernels = {
    [](const Args& args, const Block& block) { (args.bf16 ? forward<bf16> : forward<float>)(args, block); },
    [](const Args& args, const Block& block, int32_t* winners) {
      (args.bf16 ? backward<bf16> : backward<float>)(args, block, winners);
    },
};

}  // namespace
}  // namespace jaxfuse::max_pool
