// A thread's share of a sequence. Lanes are hidden units: a thread computes all gates of its own units, so the threads meet
// once a step, to read one another's h (backward: the gates' gradients).
#pragma once

#include "recurrent_kernels.h"
#include "recurrent_matmul.h"

namespace jaxfuse::recurrent {
namespace {

// A thread's share of a sequence: blocks of kLanes hidden units, and the order of steps.
struct Share {
  const Args& a;
  const Team& team;
  int64_t blocks, begin, end;

  Share(const Args& a, const Team& team)
      : a(a), team(team), blocks(parts(a.hidden, kLanes)), begin(blocks * team.thread / team.size),
        end(blocks * (team.thread + 1) / team.size) {}

  void meet() const {
    if (team.size > 1) team.barrier();
  }
  int64_t step(int64_t s) const { return a.reverse ? a.length - 1 - s : s; }
  // h before step s of the order of steps, by all threads.
  float* exchanged(int64_t s) const { return a.exchanged + s % 2 * a.batch * a.hidden; }
  template <class G, class S>
  void exchange_initial() const {
    for_units([&](int64_t row, int64_t unit, auto lanes) {
      const int64_t at = row * a.hidden + unit;
      store(a.exchanged + at, round_to<G>(load(static_cast<const S*>(a.h0) + at, lanes)), lanes);
    });
    meet();
  }

  // What is summed up over the steps, of the share's units; `gates` of own_bias.
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

  // f(row, first unit, lanes) for all units of the share
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

// Values of several gates, for the backward pass, `stride` apart.
template <class G, class Lanes, class... Values>
void keep(G* p, int64_t stride, Lanes lanes, Values... values) {
  int64_t i = 0;
  (store(p + i++ * stride, round_to<G>(values), lanes), ...);
}

// Adds to the sums over all steps that become the gradient of the bias.
template <class Lanes, class... Values>
void accumulate(float* p, int64_t stride, Lanes lanes, Values... values) {
  int64_t i = 0;
  ((store(p + i * stride, load(p + i * stride, lanes) + values, lanes), ++i), ...);
}

constexpr int64_t kTileRows = 32;  // of the products of one block that wait for their pointwise work

// Packed columns for a thread's own units, one for each unit.
template <class G>
struct OwnColumns {
  const Share& share;
  G* data;
  int64_t inner;

  G* at(int64_t block) const { return data + block * inner * kLanes; }

  // Columns [first, first + hidden) of a row-major matrix of this width.
  void pack_columns(const void* matrix, int64_t width, int64_t first) const {
    for (int64_t block = share.begin; block < share.end; ++block) {
      pack(static_cast<const G*>(matrix), 0, inner, width, first + block * kLanes, share.width(block), at(block));
    }
  }
  // Columns [first, first + inner) of such a matrix with a row for each unit, transposed.
  void pack_rows(const void* matrix, int64_t width, int64_t first) const {
    for (int64_t block = share.begin; block < share.end; ++block) {
      pack_transposed(static_cast<const G*>(matrix), width, first, inner, block * kLanes, share.width(block), at(block));
    }
  }

  // f(row, first unit, lanes, x · columns) for all units of the share; x is (batch, inner)
  template <class F>
  void multiplied_by(const float* x, F f) const {
    const Args& a = share.a;
    for (int64_t block = share.begin; block < share.end; block += 4) {
      const int count = int(smaller(4, share.end - block));
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
  const Share& share;
  const G* wh;
  int64_t width;  // of wh, of which the first `gates` gates are read
  G* data;
  const bool is_packed;

  OwnGates(const Share& share, int64_t width)
      : share(share), wh(static_cast<const G*>(share.a.wh)), width(width), data(static_cast<G*>(share.a.packed)),
        is_packed(share.a.length > 1 || share.a.hidden % kLanes != 0) {
    constexpr int64_t kRows = 16;  // so many at a time: their pages and lines are used while they are at hand
    const int64_t n = share.a.hidden;
    for (int64_t row = 0; is_packed && row < n; row += kRows) {
      for (int g = 0; g < gates; ++g) {
        for (int64_t block = share.begin; block < share.end; ++block) {
          G* to = packed_at(block) + g * n * kLanes;
          pack(wh, row, smaller(row + kRows, n), width, g * n + block * kLanes, share.width(block), to);
        }
      }
    }
  }

  G* packed_at(int64_t block) const { return data + block * gates * share.a.hidden * kLanes; }

  // For all units of the share, some units of one row after the other: z = given(row, first unit, gate, lanes) + x·columns, x
  // (batch, hidden), then squash(row, first unit, lanes, z), kLanes of every gate, and with what that leaves in z
  // finish(row, first unit, lanes, z). In passes, so that a unit waits neither for memory nor for another's chain of functions.
  template <class Given, class Squash, class Finish>
  void multiplied_by(const float* x, Given given, Squash squash, Finish finish) const {
    constexpr int64_t kGroup = 12 / gates;  // blocks
    const Args& a = share.a;
    const int64_t n = a.hidden, group = is_packed ? kGroup : 1;
    for (int64_t block = share.begin; block < share.end; block += group) {
      const int64_t end = smaller(block + group, share.end);
      const Columns<G> columns = is_packed ? packed<G>(packed_at(block), n) : Columns<G>{wh + block * kLanes, width, n};
      for (int64_t first = 0; first < a.batch; first += kTileRows) {
        constexpr int64_t kRow = kGroup * gates * kLanes;
        float tile[kTileRows * kRow];
        const int64_t rows = smaller(kTileRows, a.batch - first);
        const auto for_units = [&](int64_t row, auto f) {
          share.for_blocks(block, end, [&](int64_t b, auto lanes) {
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
