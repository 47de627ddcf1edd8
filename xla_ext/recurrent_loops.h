// The table of recurrent_kernels.h for the ISA that the including file is compiled for.
#pragma once

#include "recurrent_gru_loops.h"
#include "recurrent_lstm_loops.h"

namespace jaxfuse::recurrent {
namespace {

// f(value of the gates' type, value of the state's)
template <class F>
void with_dtypes(const Args& a, F f) {
  with_element(a.gate_type, [&](auto gates) { a.state_type == a.gate_type ? f(gates, gates) : f(gates, float{}); });
}

const Kernels kernels = {
    [](const Args& a, const Team& team) {
      with_dtypes(a, [&](auto g, auto s) { lstm_forward<decltype(g), decltype(s)>(a, team); });
    },
    [](const Args& a, const Team& team) {
      with_dtypes(a, [&](auto g, auto s) { lstm_backward<decltype(g), decltype(s)>(a, team); });
    },
    [](const Args& a, const Team& team) {
      with_dtypes(a, [&](auto g, auto s) {
        a.reset_after ? gru_forward_after<decltype(g), decltype(s)>(a, team)
                      : gru_forward_before<decltype(g), decltype(s)>(a, team);
      });
    },
    [](const Args& a, const Team& team) {
      with_dtypes(a, [&](auto g, auto s) {
        a.reset_after ? gru_backward_after<decltype(g), decltype(s)>(a, team)
                      : gru_backward_before<decltype(g), decltype(s)>(a, team);
      });
    },
};

}  // namespace
}  // namespace jaxfuse::recurrent
