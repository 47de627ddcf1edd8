"""A `lax.scan` over LSTM or GRU cells, as fused sequences: what does not depend on the state is computed for all steps at
once, then each cell's sequence, then what the loop returns besides, again for all steps at once.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfuse.analysis.normal import uncast
from jaxfuse.analysis.scan_pairs import Loop
from jaxfuse.ops.gru import OP as GRU, GRUConfig
from jaxfuse.ops.lstm import OP as LSTM, LSTMConfig
from jaxfuse.ops.recurrent import before
from jaxfuse.patterns.kernel import require
from jaxfuse.patterns.recurrent.cell import Cell
from jaxfuse.patterns.recurrent.gates import Depends, Follower, Steps, Sum, side_by_side
from jaxfuse.program.graph import Emission, Graph, Value
from jaxfuse.program.site import Match, Unfit


def sequences(loop: Loop, body: Graph, cells: list[Cell], unprofitable) -> Match:
    """The scan over these cells, in the order of its body, as fused sequences. Raises `Unfit` where they cannot serve it."""
    node = loop.node
    sharded = next((v for v in node.inputs if any(v.spec)), None)
    if sharded is not None:
        raise Unfit(f"{sharded!r} is sharded along an explicit axis of the mesh: the sequence takes automatic and manual ones")
    calls = []

    def dry(op, config, args):
        calls.append((op, config, tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args)))
        return op.forward.reference(config, *args)

    types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in node.inputs]
    outs = jax.eval_shape(lambda *arrays: _run(loop, body, cells, list(arrays), dry), *types)
    for value, out in zip(node.outputs, outs):
        if (value.shape, value.dtype) != (out.shape, out.dtype):
            raise Unfit(f"the sequence would return {out.dtype}{list(out.shape)} where the loop returns {value!r}")
    for op, config, args in calls:
        require(op.forward, config, args, unprofitable, op.forward.name.removeprefix("jaxfuse_"), config, args)

    def run(read):
        return zip(node.outputs, _run(loop, body, cells, [read(v) for v in node.inputs], _call))

    emission = Emission(tuple(node.inputs), tuple(node.outputs), run)
    return Match("+".join(cell.sequence for cell in cells), node, (node,), (emission,), tuple(node.inputs), 0)


def _call(op, config, args):
    return op(config, *args)


def _run(loop: Loop, body: Graph, cells: list[Cell], arrays: list, call) -> list:
    steps = Steps(loop, body, arrays)
    if steps.length == 0:
        raise Unfit("the loop makes no step")
    ends: dict = {}
    for cell in cells:
        ends |= _sequence(steps, cell, call)
    carried_on, returned = body.outputs[: loop.carried], body.outputs[loop.carried :]
    for value, after in zip(steps.carried, carried_on):
        if value not in ends and value is not after:
            raise Unfit(f"the loop also carries {value!r} on, which is no state of a cell")
    for value in returned:
        if steps.depends(value) is Depends.STATE:
            raise Unfit(f"the loop returns {value!r} of every step, which depends on more than the cell's states")
    return [*[ends.get(value, array) for value, array in zip(steps.carried, steps.initial)], *steps.compute(returned)]


def _sequence(steps: Steps, cell: Cell, call) -> dict[Value, object]:
    """Computes the cell's states at all steps, and gives them to the loop; returns each carried value's last one."""
    places = [_place(steps, made) for made in cell.made]
    states, initial = [steps.carried[i] for i in places], [steps.initial[i] for i in places]
    if any(state.ndim not in (1, 2) for state in states):
        raise Unfit(f"a state {states[0]!r}: the kernel takes [batch, hidden] or [hidden]")
    single = states[0].ndim == 1
    starts = [a[None] if single else a for a in initial]
    batch, hidden = starts[0].shape
    op, config, operands = (_lstm if cell.is_lstm else _gru)(steps, cell, Follower(steps, cell, states[0]), batch, hidden)
    outs = call(op, config, (*operands, *starts))
    known: dict[Value, Any] = {}
    ends: dict[Value, Any] = {}
    for i, state, made, start, array in zip(places, states, cell.made, initial, outs):
        of_steps = array[:, 0] if single else array
        known |= {made: of_steps.astype(made.dtype), steps.body.outputs[i]: of_steps, state: before(start, of_steps, steps.reverse)}
        ends[state] = of_steps[0 if steps.reverse else -1]
    steps.learn(known)
    return ends


def _place(steps: Steps, made: Value) -> int:
    """Which of the carried values the cell's state is."""
    carried_on = steps.body.outputs[: len(steps.carried)]
    place = next((i for i, v in enumerate(carried_on) if uncast(v) is uncast(made)), None)
    if place is None:
        raise Unfit(f"the loop does not carry the cell's {made!r} on")
    return place


def _lstm(steps: Steps, cell: Cell, follower: Follower, batch: int, hidden: int):
    """(op, config, its operands but for the states)."""
    return LSTM, LSTMConfig(steps.reverse), _operands(steps, list(map(follower.follow, cell.gates)), batch, hidden)


def _gru(steps: Steps, cell: Cell, follower: Follower, batch: int, hidden: int):
    """The same; the candidate's weights are what the reset gate multiplies."""
    reset, update, candidate, *others = cell.gates
    if others:
        raise Unfit(f"{candidate.node} has two reset gates")
    r, z, n = map(follower.follow, (reset, update, candidate))
    z, inner = z.negated() if cell.complement else z, n.reset  # σ(-z) = 1 - σ(z)
    if inner is None or n.weights:
        raise Unfit(f"{candidate.node} is not a function of x and of the reset state alone")
    if inner.varying or inner.reset:
        raise Unfit(f"the reset gate of {candidate.node} also multiplies what is not the state")
    gx, wh, bias = _operands(steps, [r, z, Sum(n.varying, n.constant, inner.weights)], batch, hidden)
    if not n.resets_state:
        bias = jnp.concatenate([bias, side_by_side([inner.constant], (batch,), hidden, wh.dtype)], -1)
    return GRU, GRUConfig(not n.resets_state, steps.reverse), (gx, wh, bias)


def _operands(steps: Steps, gates: list[Sum], batch: int, hidden: int):
    """(gx, wh, bias) of all gates side by side."""
    for part in (part for gate in gates for part in gate.weights):
        shape = part.array.shape[0], len(part.features or ())
        if shape != (hidden, hidden):
            raise Unfit(f"a gate's weights are of shape {shape}, expected {(hidden, hidden)}")
    if any(gate.reset or not gate.weights for gate in gates):
        raise Unfit("a gate does not read the state through one dense layer")
    dtypes = {part.dtype for gate in gates for part in (*gate.varying, *gate.constant, *gate.weights) if part.array.ndim}
    if len(dtypes) > 1:
        raise Unfit(f"gates of {' and '.join(sorted(map(str, dtypes)))}: the kernel takes one dtype")
    (dtype,) = dtypes
    return (side_by_side([gate.varying for gate in gates], (steps.length, batch), hidden, dtype),
            side_by_side([gate.weights for gate in gates], (hidden,), hidden, dtype),
            side_by_side([gate.constant for gate in gates], (batch,), hidden, dtype))
