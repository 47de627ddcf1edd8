"""lstm: a sequence of LSTM steps as one op, and its gradients. One step is a cell."""

import dataclasses
import functools
from itertools import compress

import jax
import jax.numpy as jnp

from jaxfuse.ops.arrays import wide
from jaxfuse.ops.batch_axes import BatchAxes
from jaxfuse.ops.errors import Arguments, Array, checked_names
from jaxfuse.ops.op import FusedOp, Linear
from jaxfuse.ops.recurrent import (
    complete, initial_state, input_product, input_tangent, ordered, previous_states, refuse, scan_steps, types_of, weight_gradient)
from jaxfuse.ops.stage import Kernel
from jaxfuse.runtime import ffi
from jaxfuse.runtime.settings import ours

GATES = "ifgo"


@dataclasses.dataclass(frozen=True)
class LSTMConfig:
    """Everything static about a sequence."""

    reverse: bool = False  # the last step comes first
    with_residuals: bool = False  # also return the gates, which the gradient needs

    @property
    def residual_outs(self) -> int:
        return int(self.with_residuals)


@checked_names
@ours
def lstm(
    x: Array, w_x: Array, w_h: Array, bias: Array | None = None, h0: Array | None = None, c0: Array | None = None, *,
    gate_order: str = GATES, forget_bias: float = 0.0, reverse: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """i, f, g, o = x·w_x + h·w_h + bias;  c' = σ(f + forget_bias)·c + σ(i)·tanh(g),  h' = σ(o)·tanh(c') (Hochreiter and
    Schmidhuber 1997, with Gers' forget gate).

    Args:
      x: `[length, batch, inputs]`, float, at least one step.
      w_x, w_h: `[inputs, 4·hidden]` and `[hidden, 4·hidden]`, x's dtype.
      bias: `[4·hidden]`, x's dtype.
      h0, c0: `[batch, hidden]`, x's dtype or float32, both alike; zeros in x's dtype by default.
      gate_order: how the columns of w_x, w_h and bias are ordered: the letters i, f, g (the candidate) and o.
      forget_bias: a number.
      reverse: whether the last step comes first.

    Returns: `(hs, h, c)` in h0's dtype: h after every step, `[length, batch, hidden]`, at the place of its x; h and c after
    all of them. Inside, sums and gates are float32. Autodiff keeps x, the weights, h and c of every step, and the gates.
    Raises: OpError (a ValueError), at trace time, for shapes, dtypes or options that do not fit.
    """
    arguments = Arguments("lstm")
    hidden = arguments.recurrent(4, x, w_x, w_h, bias)
    states = dict(h0=h0, c0=c0)
    h0, c0 = (initial_state(arguments, name, state, states, x, hidden) for name, state in states.items())
    arguments.check(sorted(gate_order) == sorted(GATES), "gate_order", repr(gate_order),
                    "the letters i, f, g and o, each once", "say where each gate's columns are")
    bias = jnp.zeros(4 * hidden, x.dtype) if bias is None else bias
    w_x, w_h, bias = (ordered(a, gate_order, GATES) for a in (w_x, w_h, bias))
    bias = jnp.asarray(bias).at[hidden : 2 * hidden].add(arguments.number("forget_bias", forget_bias))
    bias = jnp.broadcast_to(bias, (x.shape[1], 4 * hidden))
    hs, cs = OP(LSTMConfig(bool(reverse)), input_product(x, w_x), w_h, bias, h0, c0)
    last = 0 if reverse else -1
    return hs, hs[last], cs[last]


def _reference(config: LSTMConfig, gx, wh, bias, h0, c0):
    """gx `[length, batch, 4·hidden]`, bias `[batch, 4·hidden]`; gives h and c of every step."""

    def step(state, gx):
        h, c = map(wide, state)
        z = wide(gx) + wide(bias) + wide(jnp.dot(h.astype(wh.dtype), wh, preferred_element_type=wide(gx).dtype))
        i, f, g, o = jnp.split(z, 4, -1)
        i, f, g, o = gates = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        c = (f * c + i * g).astype(c0.dtype)
        h = (o * jnp.tanh(wide(c))).astype(h0.dtype)
        saved = [jnp.concatenate(gates, -1).astype(gx.dtype)] if config.with_residuals else []
        return (h, c), (h, c, *saved)

    return scan_steps(step, (h0, c0), gx, config.reverse)


def _tangent(config: LSTMConfig, residuals, tangents):
    wh, h0, c0, hs, cs, gates = map(wide, residuals)
    dgx, dwh, dbias, dh0, dc0 = tangents
    of_inputs = input_tangent((dgx, dbias), dwh, previous_states(h0, hs, config.reverse), gates)

    def step(state, steps):
        (dh, dc), (of_input, gates, c_before, c) = state, steps
        i, f, g, o = jnp.split(gates, 4, -1)
        di, df, dg, do = jnp.split(of_input + dh @ wh, 4, -1)
        tanh_c = jnp.tanh(c)
        dc = f * dc + i * (1 - i) * g * di + i * (1 - g * g) * dg + c_before * f * (1 - f) * df
        dh = o * (1 - o) * tanh_c * do + o * (1 - tanh_c * tanh_c) * dc
        return (dh, dc), (dh, dc)

    initial = tuple(jnp.zeros_like(wide(h0)) if d is None else wide(d) for d in (dh0, dc0))
    dhs, dcs = scan_steps(step, initial, (of_inputs, gates, previous_states(c0, cs, config.reverse), cs), config.reverse)
    return dhs.astype(residuals[3].dtype), dcs.astype(residuals[4].dtype)


def _forward_axes(config: LSTMConfig, ranks) -> BatchAxes:
    return BatchAxes((1, None, 0, 0, 0), (1,) * (2 + config.residual_outs))


def _backward_axes(linear: Linear, ranks) -> BatchAxes:
    outputs = _forward_axes(linear.config, None).inputs
    return BatchAxes((None, 0, 0, 1, 1, 1, 1, 1), tuple(compress(outputs, linear.active)))


# --- CPU kernel: our own -----------------------------------------------------------------------------------------


def _refuse_forward(config: LSTMConfig, args) -> str | None:
    return refuse("jaxfuse_lstm_fwd", args[:3], args[3:])


def _run_forward(config: LSTMConfig, args, mesh_axes):
    types = types_of(functools.partial(_reference, config), *args)
    return ffi.call("jaxfuse_lstm_fwd", types, *args, reverse=config.reverse, save_gates=config.with_residuals)


def _refuse_backward(linear: Linear, args) -> str | None:
    wh, h0, c0, hs, cs, gates, dhs, dcs = args
    return refuse("jaxfuse_lstm_bwd", (wh, gates), (h0, c0, hs, cs, dhs, dcs))


def _run_backward(linear: Linear, args, mesh_axes):
    wh, h0, c0, hs, cs, gates, dhs, dcs = args
    reverse = linear.config.reverse
    types = [jax.ShapeDtypeStruct(shape, a.dtype)
             for a, shape in ((gates, gates.shape), (gates, gates.shape[1:]), (h0, h0.shape), (c0, c0.shape))]
    dgx, dbias, dh0, dc0 = ffi.call("jaxfuse_lstm_bwd", types, wh, c0, cs, gates, dhs, dcs, reverse=reverse)
    dwh = weight_gradient(previous_states(h0, hs, reverse), dgx, wh.dtype) if linear.active[1] else None
    return complete(linear, (dgx, dwh, dbias, dh0, dc0), OP.forward.batch_axes, mesh_axes)


OP = FusedOp(
    "lstm",
    reference=_reference,
    residuals=lambda config, args, outs: (args[1], *args[3:], *outs),
    tangent=_tangent,
    for_autodiff=lambda config: dataclasses.replace(config, with_residuals=True),
    forward_kernels=(Kernel(None, _refuse_forward, _run_forward),),
    backward_kernels=(Kernel(None, _refuse_backward, _run_backward),),
    forward_axes=_forward_axes,
    backward_axes=_backward_axes,
)
