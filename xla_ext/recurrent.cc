// LSTM and GRU sequences as four FFI targets; x·Wx (+ bias) of all steps comes in as gx:
//   jaxfuse_lstm_fwd   gx, wh, bias, h0, c0           -> hs, cs, [gates]
//   jaxfuse_lstm_bwd   wh, c0, cs, gates, dhs, dcs    -> dgx, dbias, dh0, dc0
//   jaxfuse_gru_fwd    gx, wh, bias, h0               -> hs, [gates]
//   jaxfuse_gru_bwd    wh, h0, hs, gates, dhs         -> dgx, dbias, dh0, [dm of every step]
// Gates lie in the order i, f, g, o and r, z, n, with `reset_after` also m. The gradient of wh, a product over all steps, is not computed
// here. This file checks the arguments and gives memory and threads; the arithmetic is in recurrent_*_loops.h.
#include <algorithm>

#include "cut.h"
#include "handler.h"
#include "parallel.h"
#include "recurrent_kernels.h"
#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::recurrent {
namespace {

const Kernels& kernels() { return choose(portable_kernels, avx2_kernels, avx512_kernels); }

// The sizes and dtypes of a sequence, from a tensor with steps and the recurrent weights.
struct Sequence {
  const Call& call;
  int64_t gates;
  Args args{};
  DType gate_type, state_type;

  // `width` is of `steps`, in units of hidden.
  Sequence(const Call& call, int64_t gates, const Tensor& wh, const Tensor& steps, int64_t width, const Tensor& state)
      : call(call), gates(gates), gate_type(wh.dtype), state_type(state.dtype) {
    call.expect_dtype(wh, {DType::F32, DType::BF16, DType::F16});
    call.expect_dtype(state, {DType::F32, gate_type});
    if (wh.shape.size() != 2 || wh.shape[1] != gates * wh.shape[0]) {
      call.refuse("wh has shape ", to_string(wh.shape), ", expected (hidden, ", gates, "·hidden)");
    }
    if (steps.shape.size() != 3) {
      call.refuse(steps.name, " has shape ", to_string(steps.shape), ", expected (length, batch, ", width, "·hidden)");
    }
    args.gate_type = element_of(gate_type);
    args.state_type = element_of(state_type);
    args.reverse = call.attr<bool>("reverse");
    args.length = steps.shape[0];
    args.batch = steps.shape[1];
    args.hidden = wh.shape[0];
    args.wh = wh.data;
    if (size_of({args.length, args.batch, args.hidden}) == 0) call.refuse("got an empty sequence");
  }

  void* of_steps(const Tensor& t, DType dtype, int64_t width) const {
    return call.checked(t, dtype, {args.length, args.batch, width * args.hidden}).data;
  }
  void* of_state(const Tensor& t) const { return call.checked(t, state_type, {args.batch, args.hidden}).data; }
  void* of_bias(const Tensor& t, int64_t width) const {
    return call.checked(t, gate_type, {args.batch, width * args.hidden}).data;
  }

  void run(Loop loop) {
    const int64_t state = args.batch * args.hidden, units = padded(args.hidden, kWidestVector);
    const int64_t packed = gates * args.hidden * units * int64_t(ffi::ByteWidth(gate_type));
    const Scratch packed_memory(packed), floats((2 * gates + 6) * state * sizeof(float));
    args.packed = packed_memory.data();
    args.exchanged = floats.as<float>();
    args.own_h = args.exchanged + 2 * gates * state;
    args.own_c = args.own_h + state;
    args.own_bias = args.own_c + state;
    // A barrier costs about what so many multiplications do.
    constexpr int64_t kWorthAThread = 1 << 16;
    const int64_t worth = std::max<int64_t>(state * gates * args.hidden / kWorthAThread, 1);
    on_each_thread(
        [&](int thread) {
          loop(args, {thread, ThreadPool::team_size(), [] { ThreadPool::instance().barrier(); }});
        },
        int(std::min<int64_t>(worth, max_threads())));
  }
};

// What a cell has: gates of wh, gates that are saved for the gradient (and have a bias), and whether there is c beside h.
struct Cell {
  int64_t gates, saved;
  bool has_c;
};

constexpr Cell kLstm{4, 4, true};
Cell gru(bool reset_after) { return {3, 3 + reset_after, false}; }

void forward(const Call& call, const Cell& cell, Loop loop) {
  const bool save = call.attr<bool>("save_gates");
  call.expect_counts(4 + cell.has_c, 1 + cell.has_c + save);
  const Tensor gx = call.operand(0, "gx"), h0 = call.operand(3, "h0");
  Sequence sequence(call, cell.gates, call.operand(1, "wh"), gx, cell.gates, h0);
  Args& a = sequence.args;
  a.reset_after = cell.saved > cell.gates;
  a.gx = sequence.of_steps(gx, sequence.gate_type, cell.gates);
  a.h0 = sequence.of_state(h0);
  a.bias = sequence.of_bias(call.operand(2, "bias"), cell.saved);
  if (cell.has_c) a.c0 = sequence.of_state(call.operand(4, "c0"));
  a.hs = sequence.of_steps(call.result(0, "hs"), sequence.state_type, 1);
  if (cell.has_c) a.cs = sequence.of_steps(call.result(1, "cs"), sequence.state_type, 1);
  if (save) a.gates = sequence.of_steps(call.result(1 + cell.has_c, "gates"), sequence.gate_type, cell.saved);
  sequence.run(loop);
}

// Of the state that the gradient reads, c or h, come its first value and its values after each step.
void backward(const Call& call, const Cell& cell, Loop loop) {
  const bool after = cell.saved > cell.gates;
  call.expect_counts(5 + cell.has_c, 3 + cell.has_c + after);
  const Tensor initial = call.operand(1, cell.has_c ? "c0" : "h0"), gates = call.operand(3, "gates");
  Sequence sequence(call, cell.gates, call.operand(0, "wh"), gates, cell.saved, initial);
  Args& a = sequence.args;
  a.reset_after = after;
  (cell.has_c ? a.c0 : a.h0) = sequence.of_state(initial);
  (cell.has_c ? a.cs : a.hs) = sequence.of_steps(call.operand(2, cell.has_c ? "cs" : "hs"), sequence.state_type, 1);
  a.gates = sequence.of_steps(gates, sequence.gate_type, cell.saved);
  a.dhs = sequence.of_steps(call.operand(4, "dhs"), sequence.state_type, 1);
  if (cell.has_c) a.dcs = sequence.of_steps(call.operand(5, "dcs"), sequence.state_type, 1);
  a.dgx = sequence.of_steps(call.result(0, "dgx"), sequence.gate_type, cell.gates);
  a.dbias = sequence.of_bias(call.result(1, "dbias"), cell.saved);
  a.dh0 = sequence.of_state(call.result(2, "dh0"));
  if (cell.has_c) a.dc0 = sequence.of_state(call.result(3, "dc0"));
  if (after) a.dm = sequence.of_steps(call.result(3, "dm"), sequence.gate_type, 1);
  sequence.run(loop);
}

void lstm_fwd(const Call& call) { forward(call, kLstm, kernels().lstm_forward); }
void lstm_bwd(const Call& call) { backward(call, kLstm, kernels().lstm_backward); }
void gru_fwd(const Call& call) { forward(call, gru(call.attr<bool>("reset_after")), kernels().gru_forward); }
void gru_bwd(const Call& call) { backward(call, gru(call.attr<bool>("reset_after")), kernels().gru_backward); }

JAXFUSE_HANDLER(jaxfuse_lstm_fwd, lstm_fwd);
JAXFUSE_HANDLER(jaxfuse_lstm_bwd, lstm_bwd);
JAXFUSE_HANDLER(jaxfuse_gru_fwd, gru_fwd);
JAXFUSE_HANDLER(jaxfuse_gru_bwd, gru_bwd);

}  // namespace
}  // namespace jaxfuse::recurrent
