// LSTM and GRU sequences as a table of functions for each ISA. recurrent.cc checks arguments, gives memory and threads;
// recurrent_lstm_loops.h and recurrent_gru_loops.h are the loops.
#pragma once

#include <cstdint>

#include "element.h"

namespace jaxfuse::recurrent {

// Tensors are row-major. What has steps has them first: hs (length, batch, hidden), gx (length, batch, gates·hidden).
// bias (batch, gates·hidden) is added to gx at every step. gx, wh, bias, gates and their gradients are of the gates' type; h, c
// and their gradients of the state's.
struct Args {
  Element gate_type, state_type;  // the state's is the gates' or f32
  bool reverse;      // the last step comes first
  bool reset_after;  // GRU: r·(h·Wn + m's bias), else (r·h)·Wn
  int64_t length, batch, hidden;
  const void *gx, *wh, *bias, *h0, *c0;
  void *hs, *cs, *gates;   // written forward (gates may be null), read backward
  const void *dhs, *dcs;
  void *dgx, *dm, *dbias, *dh0, *dc0;

  // memory to work in
  void* packed;       // gates · hidden · padded(hidden) weights
  float* exchanged;   // 2 · batch · gates · hidden: what threads read of one another, one half in turn with the other
  float* own_h;       // batch · hidden, each column used by one thread
  float* own_c;       // likewise
  float* own_bias;    // likewise, batch · 4 · hidden
};

// Which thread of how many; `barrier` waits for all of them.
struct Team {
  int thread, size;
  void (*barrier)();
};

using Loop = void (*)(const Args&, const Team&);

struct Kernels {
  Loop lstm_forward, lstm_backward, gru_forward, gru_backward;
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels;

}  // namespace jaxfuse::recurrent
