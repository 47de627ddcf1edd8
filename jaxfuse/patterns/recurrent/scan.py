"""A `lax.scan` over LSTM or GRU cells, as fused sequences: what does not depend on the state is computed for all steps at
once, then each cell's sequence, then what the loop returns besides, again for all steps at once.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfuse.ops.gru import OP as GRU, GRUConfig
from jaxfuse.ops.lstm import OP as LSTM, LSTMConfig
from jaxfuse.ops.recurrent import before
from jaxfuse.patterns.kernel import require
from jaxfuse.patterns.recurrent.cell import CarriedCell, Cell
from jaxfuse.patterns.recurrent.gates import STATE, Affine, Follower, Loop, PreProjection, each, plain, whole
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.site import Match, Unfit


def sequences(node: Node, body: Graph, cells: list[CarriedCell], unprofitable) -> Match:
    """The scan over these cells, in the order of its body, as fused sequences. Raises `Unfit` where they cannot serve it."""
    sharded = next((v for v in node.inputs if any(v.spec)), None)
    if sharded is not None:
        raise Unfit(f"{sharded!r} is sharded along an explicit axis of the mesh: the sequence takes automatic and manual ones")
    types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in node.inputs]
    calls = []

    def dry(op, config, args):
        calls.append((op, config, tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args)))
        return op.forward.reference(config, *args)

    outs = jax.eval_shape(lambda *arrays: _run(body, node.params, cells, list(arrays), dry), *types)
    for value, out in zip(node.outputs, outs):
        if (value.shape, value.dtype) != (out.shape, out.dtype):
            raise Unfit(f"the sequence would return {out.dtype}{list(out.shape)} where the loop returns {value!r}")
    for op, config, args in calls:
        require(op.forward, config, args, unprofitable, op.forward.name.removeprefix("jaxfuse_"), config, args)

    def run(read):
        return zip(node.outputs, _run(body, node.params, cells, [read(v) for v in node.inputs]))

    emission = Emission(tuple(node.inputs), tuple(node.outputs), run)
    name = "+".join(carried.cell.pattern.removesuffix("_cell") for carried in cells)  # several layers in one loop
    return Match(name, node, (node,), (emission,), tuple(node.inputs), 0)


def _call(op, config, args):
    return op(config, *args)


def _run(body: Graph, params: dict, cells: list[CarriedCell], arrays: list, call=_call) -> list:
    if params["length"] == 0:
        raise Unfit("the loop makes no step")
    loop = Loop(body, params, arrays)
    ends: dict = {}
    for cell in cells:
        ends |= _sequence(loop, cell, call)
    for value, after in zip(loop.carried, body.outputs):
        if value not in ends and value is not after:
            raise Unfit(f"the loop also carries {value!r} on, which is no state of a cell")
    n_carry = len(loop.carried)
    for value in body.outputs[n_carry:]:
        if loop.depends(value) == STATE:
            raise Unfit(f"the loop returns {value!r} of every step, which depends on more than the cell's states")
    final = [ends.get(value, array) for value, array in zip(loop.carried, loop.initial)]
    return [*final, *loop.compute(list(body.outputs[n_carry:]))]


def _sequence(loop: Loop, carried: CarriedCell, call) -> dict[Value, object]:
    """Computes the cell's states at all steps, and gives them to the loop; returns each carried value's last one."""
    cell, states = carried.cell, carried.states
    initial = [loop.initial[next(i for i, v in enumerate(loop.carried) if v is state)] for state in states]
    if any(state.ndim not in (1, 2) for state in states):
        raise Unfit(f"a state {states[0]!r}: the kernel takes [batch, hidden] or [hidden]")
    single, hidden = states[0].ndim == 1, states[0].shape[-1]
    starts = [a[None] if single else a for a in initial]
    make = _lstm if cell.pattern == "lstm_cell" else _gru
    outs = make(loop, cell, states[0], starts, hidden, call)
    outs = [a[:, 0] if single else a for a in outs]
    known: dict[Value, Any] = {}
    ends: dict[Value, Any] = {}
    for state, after, made, start, steps in zip(states, carried.after, cell.made, initial, outs):
        known |= {made: steps.astype(made.dtype), after: steps, state: before(start, steps, loop.reverse)}
        ends[state] = loop.last(steps)
    loop.learn(known)
    return ends


def _lstm(loop: Loop, cell: Cell, state: Value, starts, hidden: int, call):
    follower = Follower(loop, state, {gate.end: gate.start for gate in cell.gates})
    forms = [follower.follow(gate.value) for gate in cell.gates]
    gx, wh, bias = _joined(loop, forms, starts[0].shape[0], hidden)
    return call(LSTM, LSTMConfig(loop.reverse), (gx, wh, bias, *starts))


def _gru(loop: Loop, cell: Cell, state: Value, starts, hidden: int, call):
    update, candidate, reset, *others = cell.gates
    if any(other.value is not reset.value for other in others):
        raise Unfit(f"{candidate.node} has two reset gates")
    aliases = {gate.end: gate.start for gate in (update, reset)}
    r, z = (Follower(loop, state, aliases).follow(gate.value) for gate in (reset, update))
    n = Follower(loop, state, {candidate.end: candidate.start}, reset.value).follow(candidate.value)
    if cell.complement:  # σ(-z) = 1 - σ(z)
        z = each(z, lambda a: -a)
    if isinstance(n, PreProjection) or n.inner is None or n.weights is not None:
        raise Unfit(f"{candidate.node} is not a function of x and of the reset state alone")
    kind, inner = n.inner
    if inner.varying is not None:
        raise Unfit(f"the reset gate of {candidate.node} also multiplies what is not the state")
    n = n._replace(weights=inner.weights, inner=None)
    gx, wh, bias = _joined(loop, [r, z, n], starts[0].shape[0], hidden)
    if kind == "after":
        bias = jnp.concatenate([bias, _rows(inner, inner.constant, starts[0].shape[0], hidden, wh.dtype)], -1)
    return call(GRU, GRUConfig(kind == "after", loop.reverse), (gx, wh, bias, *starts))


def _joined(loop: Loop, forms: list[Affine], batch: int, hidden: int):
    """(gx, wh, bias) of all gates side by side."""
    for form in forms:
        if isinstance(form, PreProjection) or form.inner or form.weights is None:
            raise Unfit("a gate does not read the state through one dense layer")
        if plain(form.weights).shape != (hidden, hidden):
            raise Unfit(f"a gate's weights are of shape {plain(form.weights).shape}, expected {(hidden, hidden)}")
    dtypes = {a.dtype for form in forms for a in map(plain, form[:3]) if a is not None and a.ndim}
    if len(dtypes) > 1:
        raise Unfit(f"gates of {' and '.join(sorted(map(str, dtypes)))}: the kernel takes one dtype")
    (dtype,) = dtypes
    bias = [_rows(f, f.constant, batch, hidden, dtype) for f in forms]
    weights = [f.weights for f in forms]
    joined = whole(weights, -1)
    joined = jnp.concatenate([*map(plain, weights)], -1) if joined is None else joined
    return _all_steps(forms, (loop.length, batch, hidden), dtype), joined, jnp.concatenate(bias, -1)


def _all_steps(forms: list[Affine], shape: tuple[int, int, int], dtype):
    """What varies of all gates side by side."""
    array = whole([f.varying for f in forms], -2 if forms[0].batch == 1 else -1)
    if array is not None and len({f.batch for f in forms}) == 1:
        return _oriented(forms[0], array, (*shape[:2], len(forms) * shape[2]))
    zeros = jnp.zeros(shape, dtype)
    return jnp.concatenate([zeros if f.varying is None else _oriented(f, plain(f.varying), shape) for f in forms], -1)


def _rows(form: Affine, constant, batch: int, hidden: int, dtype):
    """A constant as (batch, hidden)."""
    if constant is None:
        return jnp.zeros((batch, hidden), dtype)
    return _oriented(form, jnp.asarray(plain(constant), dtype), (batch, hidden))


def _oriented(form: Affine, array, shape):
    if form.batch == 1:
        array = jnp.swapaxes(array, -1, -2)
    if form.batch is None:
        array = jnp.expand_dims(array, -2) if array.ndim else array
    return jnp.broadcast_to(array, shape)
