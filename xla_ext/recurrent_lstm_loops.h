// The loops of an LSTM for the ISA that the including file is compiled for.
//
//   z = gx + bias + h·Wh;  i, f, o = σ(z), g = tanh(z);  c' = f·c + i·g;  h' = o·tanh(c')
#pragma once

#include "recurrent_steps.h"

namespace jaxfuse::recurrent {
namespace {

template <class G, class S>
void lstm_forward(const Args& a, const Team& team) {
  const Forward<G, S> pass(a, team, 4, 4);
  const OwnGates<G, 4> own(pass.slice, 4 * a.hidden);
  const auto cs = steps<S>(a, a.cs, a.hidden, a.c0);
  pass.for_steps([&](int64_t s, int64_t t) {
    const auto given = [&](int64_t row, int64_t unit, int gate, auto lanes) { return pass.given(t, row, unit, gate, lanes); };
    const auto squash = [&](int64_t row, int64_t unit, auto lanes, float* zs) {
      const auto z = [&](int gate) { return load(zs + gate * kLanes); };
      const Floats i = sigmoid(z(0)), f = sigmoid(z(1)), g = tanh(z(2)), o = sigmoid(z(3));
      store(cs.at(t, row) + unit, round_to<S>(f * load(cs.before(t, row) + unit, lanes) + i * g), lanes);
      store(zs, o);
      pass.save(t, row, unit, 0, lanes, i, f, g, o);
    };
    const auto finish = [&](int64_t row, int64_t unit, auto lanes, const float* o) {
      pass.store_h(s, t, row, unit, load(o) * tanh(load(cs.at(t, row) + unit, lanes)), lanes);
    };
    own.multiplied_by(pass.slice.exchanged(s), given, squash, finish);
  });
}

template <class G, class S>
void lstm_backward(const Args& a, const Team& team) {
  const Backward<G, S> pass(a, team, 4, 4);
  const int64_t n = a.hidden;
  const OwnColumns<G> transposed = pass.transposed(static_cast<G*>(a.packed), 4, 0, 4);
  const auto cs = steps<const S>(a, a.cs, n, a.c0), dcs = steps<const S>(a, a.dcs, n);
  pass.for_steps([&](int64_t s, int64_t t) {
    float* dz = pass.slice.exchanged(s, 4);
    pass.slice.for_units([&](int64_t row, int64_t unit, auto lanes) {
      const auto gate = [&](int number) { return pass.gate(t, row, unit, number, lanes); };
      const Floats i = gate(0), f = gate(1), g = gate(2), o = gate(3);
      const Floats squashed = tanh(load(cs.at(t, row) + unit, lanes));
      float* own_c = a.own_c + row * n + unit;
      const Floats dh = pass.dh(t, row, unit, lanes);
      const Floats dc = load(own_c, lanes) + load(dcs.at(t, row) + unit, lanes) + dh * o * (1.0f - squashed * squashed);
      store(own_c, dc * f, lanes);
      const Floats di = dc * g * i * (1.0f - i), df = dc * load(cs.before(t, row) + unit, lanes) * f * (1.0f - f),
                   dg = dc * i * (1.0f - g * g), d_o = dh * squashed * o * (1.0f - o);
      store_each(dz + row * 4 * n + unit, n, lanes, di, df, dg, d_o);
      pass.store_gates(t, row, unit, 0, lanes, di, df, dg, d_o);
    });
    pass.slice.barrier();
    transposed.multiplied_by(dz, [&](int64_t row, int64_t unit, auto lanes, Floats dh) { store(pass.own_h(row, unit), dh, lanes); });
  });
  pass.slice.template store_initial<S>(a.own_c, a.dc0);
}

}  // namespace
}  // namespace jaxfuse::recurrent
