// A thread's slice of a sequence. Lanes are hidden units: a thread computes all gates of its own units. So there is one barrier a
// step, before threads read one another's h (backward: the gates' gradients).
#pragma once

#include "recurrent_kernels.h"
#include "recurrent_matmul.h"

namespace jaxfuse::recurrent {
namespace {

// Blocks of kLanes hidden units, and the order of steps.
struct ThreadSlice {
  const Args& a;
  const Team& team;
  int64_t blocks, begin, end;

  ThreadSlice(const Args& a, const Team& team)
      : a(a), team(team), blocks(parts(a.hidden, kLanes)), begin(blocks * team.thread / team.size),
        end(blocks * (team.thread + 1) / team.size) {}

  void barrier() const {
    if (team.size > 1) team.barrier();
  }
  int64_t step(int64_t s) const { return a.reverse ? a.length - 1 - s : s; }
  // What all threads read of step s of the order of steps: forward h before it, backward `gates` of gradients.
  float* exchanged(int64_t s, int64_t gates = 1) const { return a.exchanged + s % 2 * a.batch * gates * a.hidden; }
  template <class G, class S>
  void exchange_initial() const {
    for_units([&](int64_t row, int64_t unit, auto lanes) {
      const int64_t at = row * a.hidden + unit;
      store(a.exchanged + at, round_to<G>(load(static_cast<const S*>(a.h0) + at, lanes)), lanes);
    });
    barrier();
  }

  // What is summed up over the steps, of the slice's units; `gates` of own_bias.
  void clear_sums(int gates) const {
    for_units([&](int64_t row, int64_t unit, auto lanes) {
      store(a.own_h + row * a.hidden + unit, Floats{}, lanes);
      store(a.own_c + row * a.hidden + unit, Floats{}, lanes);
      for (int g = 0; g < gates; ++g) store(a.own_bias + (row * gates + g) * a.hidden + unit, Floats{}, lanes);
    });
  }
  template <class G>
  void store_dbias(int gates) const {
    for_units([&](int64_t row, int64_t unit, auto lanes) {
      for (int g = 0; g < gates; ++g) {
        const int64_t at = (row * gates + g) * a.hidden + unit;
        store(static_cast<G*>(a.dbias) + at, round_to<G>(load(a.own_bias + at, lanes)), lanes);
      }
    });
  }
  // The sums over all steps that are the gradient of an initial state.
  template <class S>
  void store_initial(const float* sums, void* to) const {
    for_units([&](int64_t row, int64_t unit, auto lanes) {
      const int64_t at = row * a.hidden + unit;
      store(static_cast<S*>(to) + at, round_to<S>(load(sums + at, lanes)), lanes);
    });
  }

  int64_t width(int64_t block) const { return smaller(kLanes, a.hidden - block * kLanes); }

  // f(row, first unit, lanes) for all units of the slice
  template <class F>
  void for_units(F f) const {
    for (int64_t row = 0; row < a.batch; ++row) {
      for_blocks(begin, end, [&](int64_t block, auto lanes) { f(row, block * kLanes, lanes); });
    }
  }

  // f(block, lanes) for blocks [first, last)
  template <class F>
  void for_blocks(int64_t first, int64_t last, F f) const {
    for (int64_t block = first; block < last; ++block) {
      with_lanes(block * kLanes, a.hidden, [&](auto lanes) { f(block, lanes); });
    }
  }
};

// A tensor with steps: row `row` of step t. Step -1, before the first in order, is `initial`.
template <class T>
struct Steps {
  T* data;
  int64_t batch, width;
  T* initial = nullptr;
  bool reverse = false;
  int64_t length = 0;

  T* at(int64_t t, int64_t row) const { return data + (t * batch + row) * width; }
  T* before(int64_t t, int64_t row) const {
    const int64_t previous = reverse ? t + 1 : t - 1;
    return previous < 0 || previous == length ? initial + row * width : at(previous, row);
  }
};

template <class T>
Steps<T> steps(const Args& a, const void* data, int64_t width, const void* initial = nullptr) {
  const auto pointer = [](const void* p) { return static_cast<T*>(const_cast<void*>(p)); };
  return {pointer(data), a.batch, width, pointer(initial), a.reverse, a.length};
}

// Values of several gates, `stride` apart.
template <class G, class Lanes, class... Values>
void store_each(G* p, int64_t stride, Lanes lanes, Values... values) {
  int64_t i = 0;
  (store(p + i++ * stride, round_to<G>(values), lanes), ...);
}

// Adds to the sums over all steps that become the gradient of the bias.
template <class Lanes, class... Values>
void accumulate(float* p, int64_t stride, Lanes lanes, Values... values) {
  int64_t i = 0;
  ((store(p + i * stride, load(p + i * stride, lanes) + values, lanes), ++i), ...);
}

constexpr int64_t kTileRows = 32;  // of the products of one block that wait for what follows elementwise

// Packed columns for a thread's own units, one for each unit.
template <class G>
struct OwnColumns {
  const ThreadSlice& slice;
  G* data;
  int64_t inner;

  G* at(int64_t block) const { return data + block * inner * kLanes; }

  // Columns [first, first + hidden) of a row-major matrix of this width.
  void pack_columns(const void* matrix, int64_t width, int64_t first) const {
    for (int64_t block = slice.begin; block < slice.end; ++block) {
      pack(static_cast<const G*>(matrix), 0, inner, width, first + block * kLanes, slice.width(block), at(block));
    }
  }
  // Columns [first, first + inner) of such a matrix with a row for each unit, transposed.
  void pack_rows(const void* matrix, int64_t width, int64_t first) const {
    for (int64_t block = slice.begin; block < slice.end; ++block) {
      pack_transposed(static_cast<const G*>(matrix), width, first, inner, block * kLanes, slice.width(block), at(block));
    }
  }

  // f(row, first unit, lanes, x · columns) for all units of the slice; x is (batch, inner)
  template <class F>
  void multiplied_by(const float* x, F f) const {
    const Args& a = slice.a;
    for (int64_t block = slice.begin; block < slice.end; block += 4) {
      const int count = int(smaller(4, slice.end - block));
      for (int64_t first = 0; first < a.batch; first += kTileRows) {
        float product[kTileRows * 4 * kLanes] = {};
        const int64_t rows = smaller(kTileRows, a.batch - first);
        add_product(x + first * inner, inner, rows, inner, packed<G>(at(block), inner), count, product, 4 * kLanes);
        for (int i = 0; i < count; ++i) {
          with_lanes((block + i) * kLanes, a.hidden, [&](auto lanes) {
            for (int64_t row = first; row < first + rows; ++row) {
              f(row, (block + i) * kLanes, lanes, load(product + (row - first) * 4 * kLanes + i * kLanes));
            }
          });
        }
      }
    }
  }
};

// All gates of a thread's own units. One step has no use for packing, if no vector of it would be read beyond the matrix.
template <class G, int gates>
struct OwnGates {
  const ThreadSlice& slice;
  const G* wh;
  int64_t width;  // of wh, of which the first `gates` gates are read
  G* data;
  const bool is_packed;

  OwnGates(const ThreadSlice& slice, int64_t width)
      : slice(slice), wh(static_cast<const G*>(slice.a.wh)), width(width), data(static_cast<G*>(slice.a.packed)),
        is_packed(slice.a.length > 1 || slice.a.hidden % kLanes != 0) {
    constexpr int64_t kRows = 16;  // so many at a time: their pages and lines are used while they are at hand
    const int64_t n = slice.a.hidden;
    for (int64_t row = 0; is_packed && row < n; row += kRows) {
      for (int g = 0; g < gates; ++g) {
        for (int64_t block = slice.begin; block < slice.end; ++block) {
          G* to = packed_at(block) + g * n * kLanes;
          pack(wh, row, smaller(row + kRows, n), width, g * n + block * kLanes, slice.width(block), to);
        }
      }
    }
  }

  G* packed_at(int64_t block) const { return data + block * gates * slice.a.hidden * kLanes; }

  // For all units of the slice, some units of one row after the other: z = given(row, first unit, gate, lanes) + x·columns, x
  // (batch, hidden), then squash(row, first unit, lanes, z), kLanes of every gate, and with what that leaves in z
  // finish(row, first unit, lanes, z). In passes, so that a unit waits neither for memory nor for another's chain of functions.
  template <class Given, class Squash, class Finish>
  void multiplied_by(const float* x, Given given, Squash squash, Finish finish) const {
    constexpr int64_t kGroup = 12 / gates;  // blocks
    const Args& a = slice.a;
    const int64_t n = a.hidden, group = is_packed ? kGroup : 1;
    for (int64_t block = slice.begin; block < slice.end; block += group) {
      const int64_t end = smaller(block + group, slice.end);
      const Columns<G> columns = is_packed ? packed<G>(packed_at(block), n) : Columns<G>{wh + block * kLanes, width, n};
      for (int64_t first = 0; first < a.batch; first += kTileRows) {
        constexpr int64_t kRow = kGroup * gates * kLanes;
        float tile[kTileRows * kRow];
        const int64_t rows = smaller(kTileRows, a.batch - first);
        const auto for_units = [&](int64_t row, auto f) {
          slice.for_blocks(block, end, [&](int64_t b, auto lanes) {
            f(first + row, b * kLanes, lanes, tile + row * kRow + (b - block) * gates * kLanes);
          });
        };
        for (int64_t row = 0; row < rows; ++row) {
          for_units(row, [&](int64_t r, int64_t unit, auto lanes, float* z) {
            for (int g = 0; g < gates; ++g) store(z + g * kLanes, given(r, unit, g, lanes));
          });
        }
        add_product(x + first * n, n, rows, n, columns, int((end - block) * gates), tile, kRow);
        for (int64_t row = 0; row < rows; ++row) {
          for_units(row, squash);
          for_units(row, finish);
        }
      }
    }
  }
};

}  // namespace
}  // namespace jaxfuse::recurrent
