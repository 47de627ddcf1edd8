// The loops of a GRU for the ISA that the including file is compiled for.
//
//   r = σ(gx_r + b_r + h·Wr);  z = σ(gx_z + b_z + h·Wz);  h' = (1 - z)·n + z·h
//   n = tanh(gx_n + b_n + r·m), m = h·Wn + b_m    reset after the product
//   n = tanh(gx_n + b_n + (r·h)·Wn)               reset before it
#pragma once

#include "recurrent_steps.h"

namespace jaxfuse::recurrent {
namespace {

// What makes h' of the candidate n and of z.
template <class G, class S, class Lanes>
void store_state(const Forward<G, S>& pass, int64_t s, int64_t t, int64_t row, int64_t unit, Floats candidate, Floats z, Lanes lanes) {
  pass.store_h(s, t, row, unit, (1.0f - z) * candidate + z * load(pass.hs.before(t, row) + unit, lanes), lanes);
  pass.save(t, row, unit, 2, lanes, candidate);
}

template <class G, class S>
void gru_forward_after(const Args& a, const Team& team) {
  const Forward<G, S> pass(a, team, 3, 4);
  const OwnGates<G, 3> own(pass.slice, 3 * a.hidden);
  pass.for_steps([&](int64_t s, int64_t t) {
    const auto given = [&](int64_t row, int64_t unit, int gate, auto lanes) {  // of r, z and m
      return gate == 2 ? pass.bias(row, unit, 3, lanes) : pass.given(t, row, unit, gate, lanes);
    };
    const auto squash = [&](int64_t row, int64_t unit, auto lanes, float* zs) {
      const Floats r = sigmoid(load(zs)), z = sigmoid(load(zs + kLanes)), m = load(zs + 2 * kLanes);
      store(zs, pass.given(t, row, unit, 2, lanes) + r * m);
      store(zs + kLanes, z);
      pass.save(t, row, unit, 0, lanes, r, z);
      pass.save(t, row, unit, 3, lanes, m);
    };
    const auto finish = [&](int64_t row, int64_t unit, auto lanes, const float* zs) {
      store_state(pass, s, t, row, unit, tanh(load(zs)), load(zs + kLanes), lanes);
    };
    own.multiplied_by(pass.slice.exchanged(s), given, squash, finish);
  });
}

template <class G, class S>
void gru_forward_before(const Args& a, const Team& team) {
  const Forward<G, S> pass(a, team, 3, 3);
  const ThreadSlice& slice = pass.slice;
  const int64_t n = a.hidden;
  const OwnGates<G, 2> own(slice, 3 * n);
  const OwnColumns<G> candidates{slice, static_cast<G*>(a.packed) + 2 * slice.blocks * n * kLanes, n};
  candidates.pack_columns(a.wh, 3 * n, 2 * n);
  float* reset = a.exchanged + 2 * a.batch * n;  // r·h of all threads
  pass.for_steps([&](int64_t s, int64_t t) {
    const auto given = [&](int64_t row, int64_t unit, int gate, auto lanes) { return pass.given(t, row, unit, gate, lanes); };
    const auto squash = [&](int64_t row, int64_t unit, auto lanes, const float* zs) {
      const Floats r = sigmoid(load(zs)), z = sigmoid(load(zs + kLanes));
      store(reset + row * n + unit, round_to<G>(r * load(pass.hs.before(t, row) + unit, lanes)), lanes);
      store(a.own_h + row * n + unit, z, lanes);
      pass.save(t, row, unit, 0, lanes, r, z);
    };
    own.multiplied_by(slice.exchanged(s), given, squash, [](auto...) {});
    slice.barrier();
    candidates.multiplied_by(reset, [&](int64_t row, int64_t unit, auto lanes, Floats product) {
      const Floats candidate = tanh(product + pass.given(t, row, unit, 2, lanes));
      store_state(pass, s, t, row, unit, candidate, load(a.own_h + row * n + unit, lanes), lanes);
    });
  });
}

// Gradients of z and of the candidate, before tanh; what goes through z·h is added to h's.
struct OfUpdate {
  Floats dz, dn;
};

template <class G, class S, class Lanes>
OfUpdate of_update(const Backward<G, S>& pass, const Steps<const S>& hs, int64_t t, int64_t row, int64_t unit, Lanes lanes) {
  const Floats z = pass.gate(t, row, unit, 1, lanes), candidate = pass.gate(t, row, unit, 2, lanes);
  const Floats dh = pass.dh(t, row, unit, lanes);
  store(pass.own_h(row, unit), dh * z, lanes);
  return {dh * (load(hs.before(t, row) + unit, lanes) - candidate) * z * (1.0f - z), dh * (1.0f - z) * (1.0f - candidate * candidate)};
}

template <class G, class S>
void gru_backward_after(const Args& a, const Team& team) {
  const Backward<G, S> pass(a, team, 3, 4);
  const int64_t n = a.hidden;
  const OwnColumns<G> transposed = pass.transposed(static_cast<G*>(a.packed), 3, 0, 3);
  const auto dm = steps<G>(a, a.dm, n);
  const auto hs = steps<const S>(a, a.hs, n, a.h0);
  pass.for_steps([&](int64_t s, int64_t t) {
    float* exchanged = pass.slice.exchanged(s, 3);
    pass.slice.for_units([&](int64_t row, int64_t unit, auto lanes) {
      const Floats r = pass.gate(t, row, unit, 0, lanes), m = pass.gate(t, row, unit, 3, lanes);
      const auto [dz, dn] = of_update(pass, hs, t, row, unit, lanes);
      const Floats dr = dn * m * r * (1.0f - r);
      pass.store_gates(t, row, unit, 0, lanes, dr, dz, dn);
      store_each(dm.at(t, row) + unit, n, lanes, dn * r);
      accumulate(a.own_bias + (row * 4 + 3) * n + unit, n, lanes, dn * r);
      store_each(exchanged + row * 3 * n + unit, n, lanes, dr, dz, dn * r);
    });
    pass.slice.barrier();
    transposed.multiplied_by(exchanged, [&](int64_t row, int64_t unit, auto lanes, Floats dh) { pass.add_to_h(row, unit, dh, lanes); });
  });
}

template <class G, class S>
void gru_backward_before(const Args& a, const Team& team) {
  const Backward<G, S> pass(a, team, 3, 3);
  const ThreadSlice& slice = pass.slice;
  const int64_t n = a.hidden;
  const OwnColumns<G> of_gates = pass.transposed(static_cast<G*>(a.packed), 2, 0, 3);
  const OwnColumns<G> of_candidate = pass.transposed(of_gates.at(slice.blocks), 1, 2, 3);
  const auto hs = steps<const S>(a, a.hs, n, a.h0);
  pass.for_steps([&](int64_t s, int64_t t) {
    float* dns = slice.exchanged(s, 3);
    float* drzs = dns + a.batch * n;
    slice.for_units([&](int64_t row, int64_t unit, auto lanes) {
      const auto [dz, dn] = of_update(pass, hs, t, row, unit, lanes);
      pass.store_gates(t, row, unit, 1, lanes, dz, dn);
      store(dns + row * n + unit, dn, lanes);
      store(drzs + row * 2 * n + n + unit, dz, lanes);
    });
    slice.barrier();
    of_candidate.multiplied_by(dns, [&](int64_t row, int64_t unit, auto lanes, Floats of_reset) {
      const Floats r = pass.gate(t, row, unit, 0, lanes);
      const Floats dr = of_reset * load(hs.before(t, row) + unit, lanes) * r * (1.0f - r);
      pass.add_to_h(row, unit, of_reset * r, lanes);
      pass.store_gates(t, row, unit, 0, lanes, dr);
      store(drzs + row * 2 * n + unit, dr, lanes);
    });
    slice.barrier();
    of_gates.multiplied_by(drzs, [&](int64_t row, int64_t unit, auto lanes, Floats dh) { pass.add_to_h(row, unit, dh, lanes); });
  });
}

}  // namespace
}  // namespace jaxfuse::recurrent
