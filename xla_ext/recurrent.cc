// LSTM and GRU sequences as four FFI targets; x·Wx (+ bias) of all steps comes in as gx:
//   jaxfuse_lstm_fwd   gx, wh, bias, h0, c0           -> hs, cs, [gates]
//   jaxfuse_lstm_bwd   wh, c0, cs, gates, dhs, dcs    -> dgx, dbias, dh0, dc0
//   jaxfuse_gru_fwd    gx, wh, bias, h0               -> hs, [gates]
//   jaxfuse_gru_bwd    wh, h0, hs, gates, dhs         -> dgx, dbias, dh0, [dm of every step]
// Gates lie in the order i, f, g, o and r, z, n, with `reset_after` also m. The gradient of wh is a product over all steps, which is not done here.
// This file checks the arguments and gives memory and threads; the arithmetic is in recurrent_*_loops.h.
#include <algorithm>

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
    const int64_t state = args.batch * args.hidden, padded = (args.hidden + kWidestVector - 1) / kWidestVector * kWidestVector;
    const int64_t packed = gates * args.hidden * padded * int64_t(ffi::ByteWidth(gate_type));
    const Scratch packed_memory(packed), floats((2 * gates + 6) * state * sizeof(float));
    args.packed = packed_memory.data();
    args.exchanged = reinterpret_cast<float*>(floats.data());
    args.own_h = args.exchanged + 2 * gates * state;
    args.own_c = args.own_h + state;
    args.own_bias = args.own_c + state;
    // Meeting costs about what so many multiplications do.
    constexpr int64_t kWorthAThread = 1 << 16;
    const int64_t worth = std::max<int64_t>(state * gates * args.hidden / kWorthAThread, 1);
    on_each_thread(
        [&](int thread) {
          loop(args, {thread, ThreadPool::team_size(), [] { ThreadPool::instance().barrier(); }});
        },
        int(std::min<int64_t>(worth, max_threads())));
  }
};

void lstm_fwd(const Call& call) {
  const bool save = call.attr<bool>("save_gates");
  call.expect_counts(5, 2 + save);
  const Tensor h0 = call.operand(3, "h0");
  Sequence sequence(call, 4, call.operand(1, "wh"), call.operand(0, "gx"), 4, h0);
  Args& a = sequence.args;
  a.gx = sequence.of_steps(call.operand(0, "gx"), sequence.gate_type, 4);
  a.h0 = sequence.of_state(h0);
  a.bias = sequence.of_bias(call.operand(2, "bias"), 4);
  a.c0 = sequence.of_state(call.operand(4, "c0"));
  a.hs = sequence.of_steps(call.result(0, "hs"), sequence.state_type, 1);
  a.cs = sequence.of_steps(call.result(1, "cs"), sequence.state_type, 1);
  if (save) a.gates = sequence.of_steps(call.result(2, "gates"), sequence.gate_type, 4);
  sequence.run(kernels().lstm_forward);
}

void lstm_bwd(const Call& call) {
  call.expect_counts(6, 4);
  const Tensor c0 = call.operand(1, "c0");
  Sequence sequence(call, 4, call.operand(0, "wh"), call.operand(3, "gates"), 4, c0);
  Args& a = sequence.args;
  a.c0 = sequence.of_state(c0);
  a.cs = sequence.of_steps(call.operand(2, "cs"), sequence.state_type, 1);
  a.gates = sequence.of_steps(call.operand(3, "gates"), sequence.gate_type, 4);
  a.dhs = sequence.of_steps(call.operand(4, "dhs"), sequence.state_type, 1);
  a.dcs = sequence.of_steps(call.operand(5, "dcs"), sequence.state_type, 1);
  a.dgx = sequence.of_steps(call.result(0, "dgx"), sequence.gate_type, 4);
  a.dbias = sequence.of_bias(call.result(1, "dbias"), 4);
  a.dh0 = sequence.of_state(call.result(2, "dh0"));
  a.dc0 = sequence.of_state(call.result(3, "dc0"));
  sequence.run(kernels().lstm_backward);
}

void gru_fwd(const Call& call) {
  const bool save = call.attr<bool>("save_gates"), after = call.attr<bool>("reset_after");
  call.expect_counts(4, 1 + save);
  const Tensor h0 = call.operand(3, "h0");
  Sequence sequence(call, 3, call.operand(1, "wh"), call.operand(0, "gx"), 3, h0);
  Args& a = sequence.args;
  a.reset_after = after;
  a.gx = sequence.of_steps(call.operand(0, "gx"), sequence.gate_type, 3);
  a.h0 = sequence.of_state(h0);
  a.bias = sequence.of_bias(call.operand(2, "bias"), 3 + after);
  a.hs = sequence.of_steps(call.result(0, "hs"), sequence.state_type, 1);
  if (save) a.gates = sequence.of_steps(call.result(1, "gates"), sequence.gate_type, 3 + after);
  sequence.run(kernels().gru_forward);
}

void gru_bwd(const Call& call) {
  const bool after = call.attr<bool>("reset_after");
  call.expect_counts(5, 3 + after);
  const Tensor h0 = call.operand(1, "h0");
  Sequence sequence(call, 3, call.operand(0, "wh"), call.operand(3, "gates"), 3 + after, h0);
  Args& a = sequence.args;
  a.reset_after = after;
  a.h0 = sequence.of_state(h0);
  a.hs = sequence.of_steps(call.operand(2, "hs"), sequence.state_type, 1);
  a.gates = sequence.of_steps(call.operand(3, "gates"), sequence.gate_type, 3 + after);
  a.dhs = sequence.of_steps(call.operand(4, "dhs"), sequence.state_type, 1);
  a.dgx = sequence.of_steps(call.result(0, "dgx"), sequence.gate_type, 3);
  a.dbias = sequence.of_bias(call.result(1, "dbias"), 3 + after);
  a.dh0 = sequence.of_state(call.result(2, "dh0"));
  if (after) a.dm = sequence.of_steps(call.result(3, "dm"), sequence.gate_type, 1);
  sequence.run(kernels().gru_backward);
}

JAXFUSE_HANDLER(jaxfuse_lstm_fwd, lstm_fwd);
JAXFUSE_HANDLER(jaxfuse_lstm_bwd, lstm_bwd);
JAXFUSE_HANDLER(jaxfuse_gru_fwd, gru_fwd);
JAXFUSE_HANDLER(jaxfuse_gru_bwd, gru_bwd);

}  // namespace
}  // namespace jaxfuse::recurrent
