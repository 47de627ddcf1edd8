"""gru: a sequence of GRU steps as one op, and its gradients. One step is a cell."""

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

GATES = "rzn"


@dataclasses.dataclass(frozen=True)
class GRUConfig:
    """Everything static about a sequence."""

    reset_after: bool = True  # n = tanh(gx + r·(h·w + inner)), else tanh(gx + (r·h)·w)
    reverse: bool = False  # the last step comes first
    with_residuals: bool = False  # also return the gates, which the gradient needs

    @property
    def residual_outs(self) -> int:
        return int(self.with_residuals)


@checked_names
@ours
def gru(
    x: Array, w_x: Array, w_h: Array, bias: Array | None = None, bias_n: Array | None = None, h0: Array | None = None, *,
    gate_order: str = GATES, reset_after: bool = True, reverse: bool = False) -> tuple[jax.Array, jax.Array]:
    """r, z = σ(x·w_x + h·w_h + bias);  h' = (1 - z)·n + z·h (Cho et al. 2014), with n = tanh(x·w_x + bias + r·(h·w_h + bias_n))
    if `reset_after`, else n = tanh(x·w_x + bias + (r·h)·w_h).

    Args:
      x: `[length, batch, inputs]`, float, at least one step.
      w_x, w_h: `[inputs, 3·hidden]` and `[hidden, 3·hidden]`, x's dtype.
      bias: `[3·hidden]`, x's dtype.
      bias_n: `[hidden]`, x's dtype; only with `reset_after`.
      h0: `[batch, hidden]`, x's dtype or float32; zeros in x's dtype by default.
      gate_order: how the columns of w_x, w_h and bias are ordered: the letters r (reset), z (update) and n (candidate).
      reset_after: whether h is reset after its product with w_h.
      reverse: whether the last step comes first.

    Returns: `(hs, h)` in h0's dtype: h after every step, `[length, batch, hidden]`, at the place of its x; h after all of
    them. Inside, sums and gates are float32. Autodiff keeps x, the weights, h of every step, and the gates.
    Raises: OpError (a ValueError), at trace time, for shapes, dtypes or options that do not fit.
    """
    arguments = Arguments("gru")
    hidden = arguments.recurrent(3, x, w_x, w_h, bias)
    h0 = initial_state(arguments, "h0", h0, {}, x, hidden)
    arguments.check(sorted(gate_order) == sorted(GATES), "gate_order", repr(gate_order),
                    "the letters r, z and n, each once", "say where each gate's columns are")
    arguments.check(bias_n is None or reset_after, "bias_n", "given", "None with reset_after=False", "add it to bias")
    bias = jnp.zeros(3 * hidden, x.dtype) if bias is None else bias
    w_x, w_h, bias = (ordered(a, gate_order, GATES) for a in (w_x, w_h, bias))
    if reset_after:
        bias_n = jnp.zeros(hidden, x.dtype) if bias_n is None else bias_n
        arguments.floats(bias_n=bias_n)
        arguments.per_channel(hidden, "hidden unit", bias_n=bias_n)
        bias = jnp.concatenate([bias, bias_n.astype(x.dtype)])
    bias = jnp.broadcast_to(bias, (x.shape[1], *bias.shape))
    (hs,) = OP(GRUConfig(bool(reset_after), bool(reverse)), input_product(x, w_x), w_h, bias, h0)
    return hs, hs[0 if reverse else -1]


def _reference(config: GRUConfig, gx, wh, bias, h0):
    """gx `[length, batch, 3·hidden]`; bias `[batch, 3·hidden]`, with `reset_after` followed by that of h·w_n; gives h of
    every step."""
    n = h0.shape[-1]
    bias, of_product = wide(bias[:, : 3 * n]), wide(bias[:, 3 * n :])

    def step(state, gx):
        def times(h, columns):
            return jnp.dot(h.astype(wh.dtype), wh[:, columns], preferred_element_type=wide(gx).dtype)

        h, x = wide(state), wide(gx) + bias
        r, z = jnp.split(jax.nn.sigmoid(x[..., : 2 * n] + times(h, slice(2 * n))), 2, -1)
        if config.reset_after:
            product = times(h, slice(2 * n, None)) + of_product
            candidate = jnp.tanh(x[..., 2 * n :] + r * product)
            gates = [r, z, candidate, product]
        else:
            candidate = jnp.tanh(x[..., 2 * n :] + times(r * h, slice(2 * n, None)))
            gates = [r, z, candidate]
        h = ((1 - z) * candidate + z * h).astype(h0.dtype)
        saved = [jnp.concatenate(gates, -1).astype(gx.dtype)] if config.with_residuals else []
        return h, (h, *saved)

    return scan_steps(step, h0, gx, config.reverse)


def _tangent(config: GRUConfig, residuals, tangents):
    wh, h0, hs, gates = map(wide, residuals)
    dgx, dwh, dbias, dh0 = tangents
    n = h0.shape[-1]
    hs = previous_states(h0, hs, config.reverse)
    resets = gates[..., :n]
    dwh = jnp.zeros_like(wh) if dwh is None else dwh
    dbias = jnp.zeros((hs.shape[1], (3 + config.reset_after) * n), hs.dtype) if dbias is None else wide(dbias)
    of_inputs = input_tangent((dgx, dbias[:, : 3 * n]), None, hs, jnp.concatenate([gates[..., : 2 * n], hs], -1))
    of_gates = input_tangent((), dwh[:, : 2 * n], hs, gates[..., : 2 * n])
    of_candidate = input_tangent((), dwh[:, 2 * n :], hs if config.reset_after else resets * hs, hs)
    if config.reset_after:
        of_candidate = of_candidate + dbias[:, 3 * n :]

    def step(dh, steps):
        dx, of_gates, of_candidate, gates, h = steps
        r, z, candidate, *product = jnp.split(gates, gates.shape[-1] // n, -1)
        dr, dz = jnp.split(dx[..., : 2 * n] + of_gates + dh @ wh[:, : 2 * n], 2, -1)
        dr, dz, dn = r * (1 - r) * dr, z * (1 - z) * dz, dx[..., 2 * n :]
        if config.reset_after:
            dn = dn + dr * product[0] + r * (of_candidate + dh @ wh[:, 2 * n :])
        else:
            dn = dn + of_candidate + (dr * h + r * dh) @ wh[:, 2 * n :]
        dh = (1 - z) * (1 - candidate * candidate) * dn + dz * (h - candidate) + z * dh
        return dh, (dh,)

    initial = jnp.zeros_like(h0) if dh0 is None else wide(dh0)
    (dhs,) = scan_steps(step, initial, (of_inputs, of_gates, of_candidate, gates, hs), config.reverse)
    return (dhs.astype(residuals[2].dtype),)


def _forward_axes(config: GRUConfig, ranks) -> BatchAxes:
    return BatchAxes((1, None, 0, 0), (1,) * (1 + config.residual_outs))


def _backward_axes(linear: Linear, ranks) -> BatchAxes:
    outputs = _forward_axes(linear.config, None).inputs
    return BatchAxes((None, 0, 1, 1, 1), tuple(compress(outputs, linear.active)))


# --- CPU kernel: our own -----------------------------------------------------------------------------------------


def _refuse_forward(config: GRUConfig, args) -> str | None:
    return refuse("jaxfuse_gru_fwd", args[:3], args[3:])


def _run_forward(config: GRUConfig, args, mesh_axes):
    types = types_of(functools.partial(_reference, config), *args)
    return ffi.call("jaxfuse_gru_fwd", types, *args, reverse=config.reverse, save_gates=config.with_residuals,
                    reset_after=config.reset_after)


def _refuse_backward(linear: Linear, args) -> str | None:
    wh, h0, hs, gates, dhs = args
    return refuse("jaxfuse_gru_bwd", (wh, gates), (h0, hs, dhs))


def _run_backward(linear: Linear, args, mesh_axes):
    wh, h0, hs, gates, dhs = args
    config, n = linear.config, h0.shape[-1]
    shapes = [(*hs.shape[:-1], 3 * n), gates.shape[1:]]
    types = [*[jax.ShapeDtypeStruct(shape, gates.dtype) for shape in shapes], jax.ShapeDtypeStruct(h0.shape, h0.dtype)]
    if config.reset_after:
        types.append(jax.ShapeDtypeStruct(hs.shape, gates.dtype))
    dgx, dbias, dh0, *of_product = ffi.call("jaxfuse_gru_bwd", types, wh, h0, hs, gates, dhs, reverse=config.reverse,
                                            reset_after=config.reset_after)
    dwh = None
    if linear.active[1]:
        h = previous_states(h0, hs, config.reverse)
        of_candidate = (h, of_product[0]) if config.reset_after else (gates[..., :n] * h.astype(gates.dtype), dgx[..., 2 * n :])
        dwh = jnp.concatenate([weight_gradient(h, dgx[..., : 2 * n], wh.dtype), weight_gradient(*of_candidate, wh.dtype)], -1)
    return complete(linear, (dgx, dwh, dbias, dh0), OP.forward.batch_axes, mesh_axes)


OP = FusedOp(
    "gru",
    reference=_reference,
    residuals=lambda config, args, outs: (args[1], args[3], *outs),
    tangent=_tangent,
    for_autodiff=lambda config: dataclasses.replace(config, with_residuals=True),
    forward_kernels=(Kernel(None, _refuse_forward, _run_forward),),
    backward_kernels=(Kernel(None, _refuse_backward, _run_backward),),
    forward_axes=_forward_axes,
    backward_axes=_backward_axes,
)
