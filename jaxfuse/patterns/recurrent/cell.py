"""LSTM and GRU cells by their algebra.

LSTM   c' = σ(f)·c + σ(i)·tanh(g),  h' = σ(o)·tanh(c'),  f, i, g, o sums of dense layers of x and h
GRU    h' = (1-z)·n + z·h  or  n + z·(h-n),  z = σ(...),  n = tanh(... + r·(...)) or a dense layer of r·h,  r = σ(...)
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp

from jaxfuse.analysis.normal import ADD, constant, is_float_cast, uncast
from jaxfuse.analysis.regions import Region
from jaxfuse.ops.activations import Activation
from jaxfuse.patterns.activations import name_activation
from jaxfuse.patterns.dense.site import REARRANGED
from jaxfuse.program.elementwise import is_elementwise
from jaxfuse.program.graph import Node, Value

LARGEST_GATE = 40  # nodes between a gate and the dense layers it comes from
LONGEST_SPELLING = 10  # nodes of a gate's function that is not one primitive


class Gate(NamedTuple):
    """`value` is `end` rearranged, which is the function `name` of `start`, with `node` its last step. `start` is a sum of dense
    layers, or the next c of an LSTM. `nodes` are all on the way."""

    name: str
    node: Node
    nodes: tuple[Node, ...]
    value: Value
    start: Value
    end: Value


class Cell(NamedTuple):
    sequence: str  # "lstm" or "gru", what a loop over it is
    state: Value  # the state that is carried by a sum: c of an LSTM, h of a GRU
    made: tuple[Value, ...]  # the next states: h' and c' of an LSTM
    gates: tuple[Gate, ...]  # i, f, g, o of an LSTM; r, z, n of a GRU, and other reset gates
    own_nodes: tuple[Node, ...]  # beside the gates'
    mismatch: str
    complement: bool = False  # a GRU's h' = (1-z)·h + z·n

    @property
    def is_lstm(self) -> bool:
        return self.sequence == "lstm"

    @property
    def nodes(self) -> dict[int, Node]:
        return {n.index: n for nodes in (self.own_nodes, *(gate.nodes for gate in self.gates)) for n in nodes}


def cell_of(node: Node) -> Cell | None:
    """The cell whose state this sum is."""
    return _lstm(node) or _gru(node)


def _lstm(node: Node) -> Cell | None:
    found = _kept_and_written(node)
    output = _output(node.out) if found else None
    if found is None or output is None:
        return None
    forget, state, written = found
    if len({gate.start for gate in (forget, *written)}) < 3:
        return None
    input_gate, candidate = sorted(written, key=lambda gate: gate.name != "sigmoid")
    activated, output_gate = output
    mismatch = _mismatch("an LSTM", ("forget gate", forget, "sigmoid"), ("input gate", input_gate, "sigmoid"),
                         ("candidate", candidate, "tanh"), ("output", activated, "tanh"), ("output gate", output_gate, "sigmoid"))
    nodes = (node, *(v.node for v in node.inputs), *activated.nodes)
    return Cell("lstm", state, (activated.value, node.out), (input_gate, forget, candidate, output_gate), nodes, mismatch)


def _kept_and_written(node: Node) -> tuple[Gate, Value, list[Gate]] | None:
    """(forget gate, state, the two gates of what is written to it) of a sum of two products."""
    left, right = map(product, node.inputs)
    if not left or not right:
        return None
    for keep, write in ((left, right), (right, left)):
        written = [gate for v in write if (gate := _gate(v))]
        for value, state in (keep, keep[::-1]) if len(written) == 2 else ():
            forget = _gate(value)
            if forget and (forget.name == "sigmoid" or _gate(state) is None):
                return forget, state, written
    return None


def _output(state: Value) -> tuple[Gate, Gate] | None:
    """(function of the state, up to the product; output gate) of h' = σ(o)·tanh(c')."""
    for value in (state, *[n.out for n in state.users if is_float_cast(n)]):
        for node in value.users:
            if not (is_elementwise(node) and [v for v in node.inputs if constant(v) is None] == [value]):
                continue
            for user in node.out.users:
                if user.primitive == "mul" and len(set(user.inputs)) == 2 and (gate := _gate(user.other_input(node.out))):
                    return Gate(_function(value, node.out, (node,)), node, (node, user), user.out, value, node.out), gate
    return None


def _gru(node: Node) -> Cell | None:
    for update, new, old, nodes, complement in _interpolations(node):
        updates, candidate = _gate(update), _gate(new, resets=True)
        if not updates or not candidate or updates.name != "sigmoid":
            continue
        resets = {v: gate for n in candidate.nodes if n.primitive == "mul" for v in n.inputs if (gate := _gate(v))}
        if resets:
            reset, *others = resets.values()
            mismatch = _mismatch("a GRU", ("reset gate", reset, "sigmoid"), ("candidate", candidate, "tanh"))
            return Cell("gru", old, (node.out,), (reset, updates, candidate, *others), (node, *nodes), mismatch, complement)
    return None


def _interpolations(node: Node) -> Iterator[tuple[Value, Value, Value, tuple[Node, ...], bool]]:
    """(z, n, h, nodes, whether z weighs n and not h) for every reading of the sum as an interpolation of two values."""
    left, right = node.inputs
    of_left, of_right = product(left), product(right)
    if of_left and of_right:
        for (a, b), (c, d) in ((of_left, of_right), (of_right, of_left)):
            for gate, one in ((a, b), (b, a)):
                for complement, other in ((c, d), (d, c)):
                    if _is_one_minus(complement, gate):
                        nodes = (left.node, right.node, complement.node)
                        yield gate, one, other, nodes, True
                        yield gate, other, one, nodes, False
    for start, scaled, factors in ((left, right, of_right), (right, left, of_left)):
        for gate, difference in (factors, factors[::-1]) if factors else ():
            step = difference.producer
            if step is not None and step.primitive == "sub" and step.inputs[1] is start:
                way = (scaled.node, step)
                yield gate, start, step.inputs[0], way, False
                yield gate, step.inputs[0], start, way, True


def _mismatch(what: str, *roles: tuple[str, Gate, str]) -> str:
    """The first gate that is another function than it should be."""
    for role, gate, expected in roles:
        if gate.name != expected:
            return f"{gate.node} computes {gate.name}: the {role} of {what} is {expected}"
    return ""


# --- gates -------------------------------------------------------------------------------------------------------


def _gate(value: Value, resets: bool = False) -> Gate | None:
    """The function of a sum of dense layers that this value is; with `resets`, the sum may contain products too."""
    end, moves = value, []
    while end.producer is not None and end.producer.primitive in REARRANGED and len(end.producer.inputs) == 1:
        moves.append(end.producer)
        end = end.producer.inputs[0]
    start, spelling = end, tuple[Node, ...]()
    while (before := _before(start)) is not None and len(spelling) < LONGEST_SPELLING:
        start, spelling = before[0], (*before[1], *spelling)
        way = _summed(start, resets)
        if any(n.primitive == "dot_general" for n in way):
            return Gate(_function(start, end, spelling), spelling[-1], (*moves, *spelling, *way), value, start, end)
    return None


def _before(value: Value) -> tuple[Value, tuple[Node, ...]] | None:
    """(x, nodes) if the value is a function of x alone, element by element; x is the nearest such value."""
    nodes: dict[int, Node] = {}
    frontier: dict[Value, None] = {value: None}
    while frontier and len(nodes) < LONGEST_SPELLING:  # empty: it is computed from constants alone
        last = max(frontier, key=lambda v: v.index)
        node = last.producer
        if node is None or not (is_elementwise(node) or _is_unknown_function(node)):
            return None
        nodes[node.index] = node
        del frontier[last]
        frontier |= dict.fromkeys(v for v in node.inputs if constant(v) is None)
        if len(frontier) == 1:
            return next(iter(frontier)), tuple(nodes[i] for i in sorted(nodes))
    return None


def _is_unknown_function(node: Node) -> bool:
    keeps_shape = len(node.inputs) == len(node.outputs) == 1 and node.out.shape == node.inputs[0].shape
    return keeps_shape and node.primitive not in REARRANGED and jnp.issubdtype(node.out.dtype, jnp.floating)


def _function(start: Value, end: Value, nodes: tuple[Node, ...]) -> str:
    named = name_activation(Region(start, end, nodes))
    return named.name if isinstance(named, Activation) else "no known activation"


def _summed(value: Value, resets: bool) -> tuple[Node, ...]:
    """The nodes of a sum of dense layers, biases and rearrangements, as far as it is one."""
    nodes: dict[int, Node] = {}
    stack = [value]
    while stack and len(nodes) < LARGEST_GATE:
        node = stack.pop().producer
        if node is None or node.index in nodes:
            continue
        if node.primitive == "dot_general":
            nodes[node.index] = node
            stack += [v for v in node.inputs if resets and product(v)]  # a GRU may reset the state before its dense layer
        elif node.primitive in (*ADD, "sub", *REARRANGED) or resets and node.primitive == "mul":
            nodes[node.index] = node
            stack += node.inputs
    return tuple(nodes.values())


def product(value: Value) -> tuple[Value, Value] | None:
    node = uncast(value).producer
    if node is None or node.primitive != "mul" or () in [v.shape for v in node.inputs]:
        return None
    left, right = node.inputs
    return left, right


def _is_one_minus(value: Value, gate: Value) -> bool:
    node = value.producer
    return node is not None and node.primitive == "sub" and node.inputs[1] is gate and constant(node.inputs[0]) == 1
