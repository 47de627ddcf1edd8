// What the sequences of an LSTM and of a GRU share: tensors with steps, the order of steps, h and its gradient between them.
// G is the gates' type, S the state's.
#pragma once

#include "recurrent_slice.h"

namespace jaxfuse::recurrent {
namespace {

template <class G, class S>
struct Forward {
  const Args& a;
  const ThreadSlice slice;
  const int64_t n, width;  // hidden units; gates that are saved, and that have a bias
  const Steps<const G> gx;
  const Steps<G> gates;
  const Steps<S> hs;

  Forward(const Args& a, const Team& team, int64_t gates_of_x, int64_t saved)
      : a(a), slice(a, team), n(a.hidden), width(saved), gx(steps<const G>(a, a.gx, gates_of_x * n)),
        gates(steps<G>(a, a.gates, saved * n)), hs(steps<S>(a, a.hs, n, a.h0)) {}

  template <class Lanes>
  Floats bias(int64_t row, int64_t unit, int gate, Lanes lanes) const {
    return load(static_cast<const G*>(a.bias) + (row * width + gate) * n + unit, lanes);
  }
  // What a gate has beside its product with h.
  template <class Lanes>
  Floats given(int64_t t, int64_t row, int64_t unit, int gate, Lanes lanes) const {
    return load(gx.at(t, row) + gate * n + unit, lanes) + bias(row, unit, gate, lanes);
  }
  // Gates from number `first` on, for the gradient.
  template <class Lanes, class... Values>
  void save(int64_t t, int64_t row, int64_t unit, int first, Lanes lanes, Values... values) const {
    if (a.gates) store_each(gates.at(t, row) + first * n + unit, n, lanes, values...);
  }
  template <class Lanes>
  void store_h(int64_t s, int64_t t, int64_t row, int64_t unit, Floats value, Lanes lanes) const {
    const Floats h = round_to<S>(value);
    store(hs.at(t, row) + unit, h, lanes);
    store(slice.exchanged(s + 1) + row * n + unit, round_to<G>(h), lanes);
  }
  // f(s, t) for the steps in their order, t where they lie. h before it is slice.exchanged(s).
  template <class F>
  void for_steps(F f) const {
    slice.template exchange_initial<G, S>();
    for (int64_t s = 0; s < a.length; ++s) {
      f(s, slice.step(s));
      slice.barrier();
    }
  }
};

template <class G, class S>
struct Backward {
  const Args& a;
  const ThreadSlice slice;
  const int64_t n, width;
  const Steps<const G> gates;
  const Steps<G> dgx;
  const Steps<const S> dhs;

  Backward(const Args& a, const Team& team, int64_t gates_of_x, int64_t saved)
      : a(a), slice(a, team), n(a.hidden), width(saved), gates(steps<const G>(a, a.gates, saved * n)),
        dgx(steps<G>(a, a.dgx, gates_of_x * n)), dhs(steps<const S>(a, a.dhs, n)) {}

  // The columns of wh for each unit of the slice, `count` gates from number `first` on, transposed.
  OwnColumns<G> transposed(G* memory, int64_t count, int64_t first, int64_t gates_of_x) const {
    const OwnColumns<G> own{slice, memory, count * n};
    own.pack_rows(a.wh, gates_of_x * n, first * n);
    return own;
  }
  template <class Lanes>
  Floats gate(int64_t t, int64_t row, int64_t unit, int number, Lanes lanes) const {
    return load(gates.at(t, row) + number * n + unit, lanes);
  }
  // The part of h's gradient that comes from the steps behind.
  float* own_h(int64_t row, int64_t unit) const { return a.own_h + row * n + unit; }
  template <class Lanes>
  Floats dh(int64_t t, int64_t row, int64_t unit, Lanes lanes) const {
    return load(own_h(row, unit), lanes) + load(dhs.at(t, row) + unit, lanes);
  }
  template <class Lanes>
  void add_to_h(int64_t row, int64_t unit, Floats value, Lanes lanes) const {
    store(own_h(row, unit), load(own_h(row, unit), lanes) + value, lanes);
  }
  // Gradients of gates from number `first` on, which are those of gx and, summed over the steps, of the bias.
  template <class Lanes, class... Values>
  void store_gates(int64_t t, int64_t row, int64_t unit, int first, Lanes lanes, Values... values) const {
    store_each(dgx.at(t, row) + first * n + unit, n, lanes, values...);
    accumulate(a.own_bias + (row * width + first) * n + unit, n, lanes, values...);
  }
  // f(s, t) for the steps from the last to the first, then the gradients of the bias and of h0.
  template <class F>
  void for_steps(F f) const {
    slice.clear_sums(width);
    for (int64_t s = a.length - 1; s >= 0; --s) f(s, slice.step(s));
    slice.template store_dbias<G>(width);
    slice.template store_initial<S>(a.own_h, a.dh0);
  }
};

}  // namespace
}  // namespace jaxfuse::recurrent
