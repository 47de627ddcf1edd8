"""LSTM and GRU cells, and a `lax.scan` over some, which becomes fused sequences: what does not depend on the state is computed for
all steps at once, then each cell's sequence, then what the loop returns besides, again for all steps at once."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfuse.analysis.normal import ADD, uncast
from jaxfuse.ops.columns import side_by_side
from jaxfuse.ops.gru import OP as GRU
from jaxfuse.ops.gru import GRUConfig
from jaxfuse.ops.lstm import OP as LSTM
from jaxfuse.ops.lstm import LSTMConfig
from jaxfuse.ops.recurrent import previous_states
from jaxfuse.patterns.kernel import require
from jaxfuse.patterns.recurrent import gradient
from jaxfuse.patterns.recurrent.cell import Cell, cell_of, product
from jaxfuse.patterns.recurrent.gates import Depends, Follower, Steps, Sum
from jaxfuse.program.autodiff import forward
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.site import Match, Refusal, Unfit
from jaxfuse.runtime.reasons import LeftOut
from jaxfuse.scan_pairs import Loop

ONE_STEP = "a cell outside a loop: XLA computes one step as fast"  # the figures are in benchmarks/results/kernels.md


class Differentiated(Unfit):
    """The loop is no fused sequence by itself: together with its backward loop it may be one."""

    def __init__(self):
        super().__init__("autodiff keeps values from inside the loop: fuse what is differentiated instead, as in grad(fuse(loss))")


def anchors(graph):
    """Loops; sums of two products, and of a value and a product."""
    return [n for n in forward(graph).nodes
            if n.primitive == "scan" or n.primitive in ADD and any(map(product, n.inputs))]


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields a Match for a `lax.scan` over cells, or else, in its body or outside any, a Refusal for each cell."""
    if node.primitive == "scan":
        yield from _loops(graph, graph.nodes[node.index], unprofitable)
        return
    cell = cell_of(node)
    if cell is None:
        return
    carried, reason = _carried(forward(graph), cell)
    if not cell.mismatch and not reason:
        reason = _why_not(graph.outer[0], graph.outer[1], unprofitable) if carried else ONE_STEP
    operands = dict.fromkeys(v for n in cell.nodes.values() if n.primitive == "dot_general" for v in n.inputs)
    yield Refusal(cell.sequence if carried else f"{cell.sequence}_cell", node, (*operands, cell.state), cell.mismatch or reason,
                  nodes=tuple(cell.nodes.values()))


def _loops(graph, node: Node, unprofitable) -> Iterable[Match]:
    """The scan as fused sequences, and its backward scan with it where autodiff made one; its cells' rows say why there are none."""
    try:
        try:
            found = _loop(graph, node, unprofitable)
            return [found] if found else []
        except Differentiated:
            return gradient.matches(graph, node, lambda alone, loop: _loop(alone, loop, unprofitable))
    except Unfit:
        return []


def _why_not(graph, node: Node, unprofitable) -> str:
    """Why the loop around a cell that fits is no fused sequence."""
    try:
        if _loop(graph, node, unprofitable) is None:
            return "another cell of its loop does not fit"
    except Differentiated as unfit:
        if not list(_loops(graph, node, unprofitable)):
            return unfit.reason
    except Unfit as unfit:
        return unfit.reason
    return LeftOut("its loop is left out")


def _loop(graph, node: Node, unprofitable) -> Match | None:
    """A scan as fused sequences; None if there is no cell in it. Raises `Unfit` where they cannot serve it."""
    body = Graph(node.params["jaxpr"], (graph, node))
    part = forward(body)
    cells = [cell for n in anchors(body) if n.primitive != "scan" and (cell := cell_of(n))]
    if not cells or any(cell.mismatch or _carried(part, cell)[1] for cell in cells):
        return None
    if part is not body:
        raise Differentiated
    if any(n.eqn.effects for n in body.nodes):
        raise Unfit("the loop has side effects")
    return _sequences(Loop(node), body, cells, unprofitable)


def _carried(part, cell: Cell) -> tuple[bool, str]:
    """Whether the cell is in a scan, and, if so, why its state is not what the scan hands to its steps, or not the next one."""
    if part.outer is None or part.outer[1].primitive != "scan":
        return False, ""
    loop, state = Loop(part.outer[1]), uncast(cell.state)
    _, carried, _ = loop.split(part.inputs)
    if state not in carried:
        return True, f"its state is not one that the loop carries: {state.producer or repr(state)} comes between"
    after, next_state = part.outputs[carried.index(state)], cell.made[-1]
    if uncast(after) is uncast(next_state):
        return True, ""
    between = next((n for n in next_state.users if after in n.outputs), None)
    return True, f"the next step's state is not the cell's: {between or repr(after)} comes between"


# --- sequences ---------------------------------------------------------------------------------------------------


def _sequences(loop: Loop, body: Graph, cells: list[Cell], unprofitable) -> Match:
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
    def run(*arrays):
        return _run(loop, body, cells, list(arrays), lambda op, config, args: op(config, *args))

    emission = Emission.of(node.inputs, node.outputs, run)
    return Match("+".join(cell.sequence for cell in cells), node, (node,), (emission,), tuple(node.inputs), 0)


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
        known |= {made: of_steps.astype(made.dtype), steps.body.outputs[i]: of_steps,
                  state: previous_states(start, of_steps, steps.reverse)}
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
