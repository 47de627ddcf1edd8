// The loops of a GRU for the ISA that the including file is compiled for.
//
//   r = σ(gx_r + b_r + h·Wr);  z = σ(gx_z + b_z + h·Wz);  h' = (1 - z)·n + z·h
//   n = tanh(gx_n + b_n + r·m), m = h·Wn + b_m    reset after the product
//   n = tanh(gx_n + b_n + (r·h)·Wn)               reset before it
#pragma once

#include "recurrent_share.h"

namespace jaxfuse::recurrent {
namespace {

template <class G, class S>
void gru_forward_after(const Args& a, const Team& team) {
  const Share share(a, team);
  const int64_t n = a.hidden;
  const OwnGates<G, 3> own(share, 3 * n);
  const auto gx = steps<const G>(a, a.gx, 3 * n);
  const auto gates = steps<G>(a, a.gates, 4 * n);
  const auto hs = steps<S>(a, a.hs, n, a.h0);
  share.template exchange_initial<G, S>();
  for (int64_t s = 0; s < a.length; ++s) {
    const int64_t t = share.step(s);
    const auto* bias = static_cast<const G*>(a.bias);
    const auto given = [&](int64_t row, int64_t unit, int gate, auto lanes) {  // of r, z and m
      const Floats b = load(bias + row * 4 * n + (gate == 2 ? 3 : gate) * n + unit, lanes);
      return gate == 2 ? b : load(gx.at(t, row) + gate * n + unit, lanes) + b;
    };
    const auto squash = [&](int64_t row, int64_t unit, auto lanes, float* zs) {
      const Floats r = sigmoid(load(zs)), z = sigmoid(load(zs + kLanes)), m = load(zs + 2 * kLanes);
      const Floats x = load(gx.at(t, row) + 2 * n + unit, lanes) + load(bias + row * 4 * n + 2 * n + unit, lanes);
      store(zs, x + r * m);
      store(zs + kLanes, z);
      if (a.gates != nullptr) {
        G* kept = gates.at(t, row) + unit;
        keep(kept, n, lanes, r, z), keep(kept + 3 * n, n, lanes, m);
      }
    };
    const auto finish = [&](int64_t row, int64_t unit, auto lanes, const float* zs) {
      const Floats candidate = tanh(load(zs)), z = load(zs + kLanes);
      const Floats h = round_to<S>((1.0f - z) * candidate + z * load(hs.before(t, row) + unit, lanes));
      store(hs.at(t, row) + unit, h, lanes);
      store(share.exchanged(s + 1) + row * n + unit, round_to<G>(h), lanes);
      if (a.gates != nullptr) keep(gates.at(t, row) + 2 * n + unit, n, lanes, candidate);
    };
    own.multiplied_by(share.exchanged(s), given, squash, finish);
    share.meet();
  }
}

template <class G, class S>
void gru_forward_before(const Args& a, const Team& team) {
  const Share share(a, team);
  const int64_t n = a.hidden;
  const OwnGates<G, 2> own(share, 3 * n);
  const OwnColumns<G> candidates{share, static_cast<G*>(a.packed) + 2 * share.blocks * n * kLanes, n};
  candidates.pack_columns(a.wh, 3 * n, 2 * n);
  const auto gx = steps<const G>(a, a.gx, 3 * n);
  const auto gates = steps<G>(a, a.gates, 3 * n);
  const auto hs = steps<S>(a, a.hs, n, a.h0);
  float* reset = a.exchanged + 2 * a.batch * n;  // r·h of all threads
  share.template exchange_initial<G, S>();
  for (int64_t s = 0; s < a.length; ++s) {
    const int64_t t = share.step(s);
    const auto given = [&](int64_t row, int64_t unit, int gate, auto lanes) {
      const int64_t at = gate * n + unit;
      return load(gx.at(t, row) + at, lanes) + load(static_cast<const G*>(a.bias) + row * 3 * n + at, lanes);
    };
    const auto squash = [&](int64_t row, int64_t unit, auto lanes, const float* zs) {
      const Floats r = sigmoid(load(zs)), z = sigmoid(load(zs + kLanes));
      store(reset + row * n + unit, round_to<G>(r * load(hs.before(t, row) + unit, lanes)), lanes);
      store(a.own_h + row * n + unit, z, lanes);
      if (a.gates != nullptr) keep(gates.at(t, row) + unit, n, lanes, r, z);
    };
    own.multiplied_by(share.exchanged(s), given, squash, [](auto...) {});
    share.meet();
    candidates.multiplied_by(reset, [&](int64_t row, int64_t unit, auto lanes, Floats product) {
      const Floats bias = load(static_cast<const G*>(a.bias) + row * 3 * n + 2 * n + unit, lanes);
      const Floats candidate = tanh(product + (load(gx.at(t, row) + 2 * n + unit, lanes) + bias));
      const Floats z = load(a.own_h + row * n + unit, lanes);
      const Floats h = round_to<S>((1.0f - z) * candidate + z * load(hs.before(t, row) + unit, lanes));
      store(hs.at(t, row) + unit, h, lanes);
      store(share.exchanged(s + 1) + row * n + unit, round_to<G>(h), lanes);
      if (a.gates != nullptr) keep(gates.at(t, row) + 2 * n + unit, n, lanes, candidate);
    });
    share.meet();
  }
}

template <class G, class S>
void gru_backward_after(const Args& a, const Team& team) {
  const Share share(a, team);
  const int64_t n = a.hidden;
  const OwnColumns<G> transposed{share, static_cast<G*>(a.packed), 3 * n};
  transposed.pack_rows(a.wh, 3 * n, 0);
  const auto gates = steps<const G>(a, a.gates, 4 * n);
  const auto dgx = steps<G>(a, a.dgx, 3 * n), dm = steps<G>(a, a.dm, n);
  const auto hs = steps<const S>(a, a.hs, n, a.h0), dhs = steps<const S>(a, a.dhs, n);
  share.clear_sums(4);
  for (int64_t s = a.length - 1; s >= 0; --s) {
    const int64_t t = share.step(s);
    float* exchanged = a.exchanged + s % 2 * a.batch * 3 * n;
    share.for_units([&](int64_t row, int64_t unit, auto lanes) {
      const G* kept = gates.at(t, row) + unit;
      const Floats r = load(kept, lanes), z = load(kept + n, lanes), candidate = load(kept + 2 * n, lanes),
                   m = load(kept + 3 * n, lanes);
      float* own = a.own_h + row * n + unit;
      const Floats dh = load(own, lanes) + load(dhs.at(t, row) + unit, lanes);
      const Floats dn = dh * (1.0f - z) * (1.0f - candidate * candidate);
      const Floats dr = dn * m * r * (1.0f - r);
      const Floats dz = dh * (load(hs.before(t, row) + unit, lanes) - candidate) * z * (1.0f - z);
      store(own, dh * z, lanes);
      keep(dgx.at(t, row) + unit, n, lanes, dr, dz, dn);
      keep(dm.at(t, row) + unit, n, lanes, dn * r);
      accumulate(a.own_bias + row * 4 * n + unit, n, lanes, dr, dz, dn, dn * r);
      keep(exchanged + row * 3 * n + unit, n, lanes, dr, dz, dn * r);
    });
    share.meet();
    transposed.multiplied_by(exchanged, [&](int64_t row, int64_t unit, auto lanes, Floats product) {
      float* own = a.own_h + row * n + unit;
      store(own, load(own, lanes) + product, lanes);
    });
  }
  share.template store_dbias<G>(4);
  share.template store_initial<S>(a.own_h, a.dh0);
}

template <class G, class S>
void gru_backward_before(const Args& a, const Team& team) {
  const Share share(a, team);
  const int64_t n = a.hidden;
  const OwnColumns<G> of_gates{share, static_cast<G*>(a.packed), 2 * n};
  const OwnColumns<G> of_candidate{share, of_gates.at(share.blocks), n};
  of_gates.pack_rows(a.wh, 3 * n, 0);
  of_candidate.pack_rows(a.wh, 3 * n, 2 * n);
  const auto gates = steps<const G>(a, a.gates, 3 * n);
  const auto dgx = steps<G>(a, a.dgx, 3 * n);
  const auto hs = steps<const S>(a, a.hs, n, a.h0), dhs = steps<const S>(a, a.dhs, n);
  share.clear_sums(3);
  for (int64_t s = a.length - 1; s >= 0; --s) {
    const int64_t t = share.step(s);
    float* dns = a.exchanged + s % 2 * a.batch * 3 * n;
    float* drzs = dns + a.batch * n;
    share.for_units([&](int64_t row, int64_t unit, auto lanes) {
      const G* kept = gates.at(t, row) + unit;
      const Floats z = load(kept + n, lanes), candidate = load(kept + 2 * n, lanes);
      float* own = a.own_h + row * n + unit;
      const Floats dh = load(own, lanes) + load(dhs.at(t, row) + unit, lanes);
      const Floats dn = dh * (1.0f - z) * (1.0f - candidate * candidate);
      const Floats dz = dh * (load(hs.before(t, row) + unit, lanes) - candidate) * z * (1.0f - z);
      store(own, dh * z, lanes);
      keep(dgx.at(t, row) + n + unit, n, lanes, dz, dn);
      accumulate(a.own_bias + (row * 3 + 1) * n + unit, n, lanes, dz, dn);
      store(dns + row * n + unit, dn, lanes);
      store(drzs + row * 2 * n + n + unit, dz, lanes);
    });
    share.meet();
    of_candidate.multiplied_by(dns, [&](int64_t row, int64_t unit, auto lanes, Floats of_reset) {
      const Floats r = load(gates.at(t, row) + unit, lanes);
      const Floats dr = of_reset * load(hs.before(t, row) + unit, lanes) * r * (1.0f - r);
      float* own = a.own_h + row * n + unit;
      store(own, load(own, lanes) + of_reset * r, lanes);
      keep(dgx.at(t, row) + unit, n, lanes, dr);
      accumulate(a.own_bias + row * 3 * n + unit, n, lanes, dr);
      store(drzs + row * 2 * n + unit, dr, lanes);
    });
    share.meet();
    of_gates.multiplied_by(drzs, [&](int64_t row, int64_t unit, auto lanes, Floats product) {
      float* own = a.own_h + row * n + unit;
      store(own, load(own, lanes) + product, lanes);
    });
  }
  share.template store_dbias<G>(3);
  share.template store_initial<S>(a.own_h, a.dh0);
}

}  // namespace
}  // namespace jaxfuse::recurrent
