// The loops of an LSTM for the ISA that the including file is compiled for.
//
//   z = gx + bias + h·Wh;  i, f, o = σ(z), g = tanh(z);  c' = f·c + i·g;  h' = o·tanh(c')
#pragma once

#include "recurrent_share.h"

namespace jaxfuse::recurrent {
namespace {

template <class G, class S>
void lstm_forward(const Args& a, const Team& team) {
  const Share share(a, team);
  const int64_t n = a.hidden;
  const OwnGates<G, 4> own(share, 4 * n);
  const auto gx = steps<const G>(a, a.gx, 4 * n);
  const auto gates = steps<G>(a, a.gates, 4 * n);
  const auto hs = steps<S>(a, a.hs, n), cs = steps<S>(a, a.cs, n, a.c0);
  share.template exchange_initial<G, S>();
  for (int64_t s = 0; s < a.length; ++s) {
    const int64_t t = share.step(s);
    const auto given = [&](int64_t row, int64_t unit, int gate, auto lanes) {
      const int64_t at = gate * n + unit;
      return load(gx.at(t, row) + at, lanes) + load(static_cast<const G*>(a.bias) + row * 4 * n + at, lanes);
    };
    const auto squash = [&](int64_t row, int64_t unit, auto lanes, float* zs) {
      const auto z = [&](int gate) { return load(zs + gate * kLanes); };
      const Floats i = sigmoid(z(0)), f = sigmoid(z(1)), g = tanh(z(2)), o = sigmoid(z(3));
      store(cs.at(t, row) + unit, round_to<S>(f * load(cs.before(t, row) + unit, lanes) + i * g), lanes);
      store(zs, o);
      if (a.gates != nullptr) keep(gates.at(t, row) + unit, n, lanes, i, f, g, o);
    };
    const auto finish = [&](int64_t row, int64_t unit, auto lanes, const float* o) {
      const Floats h = round_to<S>(load(o) * tanh(load(cs.at(t, row) + unit, lanes)));
      store(hs.at(t, row) + unit, h, lanes);
      store(share.exchanged(s + 1) + row * n + unit, round_to<G>(h), lanes);
    };
    own.multiplied_by(share.exchanged(s), given, squash, finish);
    share.meet();
  }
}

template <class G, class S>
void lstm_backward(const Args& a, const Team& team) {
  const Share share(a, team);
  const int64_t n = a.hidden;
  const OwnColumns<G> transposed{share, static_cast<G*>(a.packed), 4 * n};
  transposed.pack_rows(a.wh, 4 * n, 0);
  const auto gates = steps<const G>(a, a.gates, 4 * n);
  const auto dgx = steps<G>(a, a.dgx, 4 * n);
  const auto cs = steps<const S>(a, a.cs, n, a.c0);
  const auto dhs = steps<const S>(a, a.dhs, n), dcs = steps<const S>(a, a.dcs, n);
  share.clear_sums(4);
  for (int64_t s = a.length - 1; s >= 0; --s) {
    const int64_t t = share.step(s);
    float* dz = a.exchanged + s % 2 * a.batch * 4 * n;
    share.for_units([&](int64_t row, int64_t unit, auto lanes) {
      const G* kept = gates.at(t, row) + unit;
      const Floats i = load(kept, lanes), f = load(kept + n, lanes), g = load(kept + 2 * n, lanes),
                   o = load(kept + 3 * n, lanes);
      const Floats squashed = tanh(load(cs.at(t, row) + unit, lanes));
      float* own_c = a.own_c + row * n + unit;
      const Floats dh = load(a.own_h + row * n + unit, lanes) + load(dhs.at(t, row) + unit, lanes);
      const Floats dc = load(own_c, lanes) + load(dcs.at(t, row) + unit, lanes) + dh * o * (1.0f - squashed * squashed);
      store(own_c, dc * f, lanes);
      const Floats di = dc * g * i * (1.0f - i), df = dc * load(cs.before(t, row) + unit, lanes) * f * (1.0f - f),
                   dg = dc * i * (1.0f - g * g), d_o = dh * squashed * o * (1.0f - o);
      keep(dz + row * 4 * n + unit, n, lanes, di, df, dg, d_o);
      keep(dgx.at(t, row) + unit, n, lanes, di, df, dg, d_o);
      accumulate(a.own_bias + row * 4 * n + unit, n, lanes, di, df, dg, d_o);
    });
    share.meet();
    transposed.multiplied_by(dz, [&](int64_t row, int64_t unit, auto lanes, Floats dh) {
      store(a.own_h + row * n + unit, dh, lanes);
    });
  }
  share.template store_dbias<G>(4);
  share.template store_initial<S>(a.own_h, a.dh0);
  share.template store_initial<S>(a.own_c, a.dc0);
}

}  // namespace
}  // namespace jaxfuse::recurrent
