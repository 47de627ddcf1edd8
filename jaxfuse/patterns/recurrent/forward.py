"""LSTM and GRU cells by their algebra, and a `lax.scan` over some, which becomes fused sequences (scan.py).

LSTM   c' = σ(f)·c + σ(i)·tanh(g),  h' = σ(o)·tanh(c'),  f, i, g, o sums of dense layers of x and h
GRU    h' = (1-z)·n + z·h  or  n + z·(h-n),  z = σ(...),  n = tanh(... + r·(...)) or a dense layer of r·h,  r = σ(...)
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp

from jaxfuse.analysis.canonical import ADD, CAST, Region, constant, uncast
from jaxfuse.analysis.elementwise import is_elementwise
from jaxfuse.analysis.layout import RESHAPES
from jaxfuse.ops.activations import Activation
from jaxfuse.patterns.activations import name_activation
from jaxfuse.patterns.recurrent import gradient as recurrent_grad
from jaxfuse.patterns.recurrent.scan import sequences
from jaxfuse.program.autodiff import forward
from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.program.site import Match, Refusal, Unfit

REARRANGED = (*RESHAPES, CAST, "transpose", "slice", "split", "concatenate")
LARGEST_GATE = 40  # nodes between a gate and the dense layers it comes from
LONGEST_SPELLING = 10  # nodes of a gate's function that is not one primitive
ONE_STEP = "a cell outside a loop: XLA computes one step as fast"  # the figures are in benchmarks/results/kernels.md


class Differentiated(Unfit):
    """The loop is no fused sequence by itself: together with its backward loop it may be one."""

    def __init__(self):
        super().__init__("autodiff keeps values from inside the loop: fuse what is differentiated instead, as in grad(fuse(loss))")


class Gate(NamedTuple):
    """`value` is `end` rearranged, which is the function `name` of `start`, a sum of the outputs of `dots`; `nodes` are all
    nodes on the way."""

    name: str
    node: Node
    dots: tuple[Node, ...]
    nodes: tuple[Node, ...]
    value: Value | None = None
    start: Value | None = None
    end: Value | None = None


class Cell(NamedTuple):
    pattern: str
    state: Value  # the state that is carried by a sum: c of an LSTM, h of a GRU
    next_state: Value
    gates: tuple[Gate, ...]  # of an LSTM i, f, g, o; of a GRU z, n and every r
    nodes: tuple[Node, ...]
    mismatch: str = ""
    output: Value | None = None  # h' of an LSTM
    complement: bool = False  # a GRU's h' = (1-z)·h + z·n
    carried: tuple[Value, ...] = ()  # by a scan: h, c; what is carried on, and what the cell makes
    after: tuple[Value, ...] = ()
    made: tuple[Value, ...] = ()


def anchors(graph):
    """Loops; sums of two products, and of a value and a product."""
    return [n for n in forward(graph).nodes
            if n.primitive == "scan" or n.primitive in ADD and any(map(_is_product, n.inputs))]


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields a Match for a `lax.scan` over cells, or else, in its body or outside any, a Refusal for each cell."""
    if node.index in claimed:
        return
    if node.primitive == "scan":
        yield from _loops(graph, graph.nodes[node.index], unprofitable)
        return
    cell = _lstm(node) or _gru(node)
    if cell is None:
        return
    nodes = {n.index: n for n in (node, *cell.nodes, *(n for gate in cell.gates for n in gate.nodes))}
    dots = {n.index: n for gate in cell.gates for n in gate.dots}
    operands = tuple({id(v): v for n in dots.values() for v in n.inputs}.values())
    pattern, reason = _sequence(forward(graph), cell)
    if not cell.mismatch and not reason:
        reason = ONE_STEP if pattern == cell.pattern else _why_not(graph.outer[0], graph.outer[1], unprofitable)
    yield Refusal(pattern, node, (*operands, cell.state), cell.mismatch or reason, nodes=tuple(nodes.values()))


def _loops(graph, node: Node, unprofitable) -> Iterable[Match]:
    """The scan as fused sequences, and its backward scan with it where autodiff made one; its cells' rows say why there are none."""
    try:
        found = _loop(graph, node, unprofitable)
        return [found] if found else []
    except Differentiated:
        pass
    except Unfit:
        return []
    try:
        return recurrent_grad.matches(graph, node, lambda alone, loop: _loop(alone, loop, unprofitable))
    except Unfit:
        return []


def _why_not(graph, node: Node, unprofitable) -> str:
    try:
        _loop(graph, node, unprofitable)
    except Unfit as unfit:
        return unfit.reason
    return ""


def _loop(graph, node: Node, unprofitable) -> Match | None:
    """A scan as fused sequences; None if there is no cell in it. Raises `Unfit` where they cannot serve it."""
    body = Graph(node.params["jaxpr"], (graph, node))
    part = forward(body)
    cells = [cell for n in anchors(body) if n.primitive != "scan" and (cell := _lstm(n) or _gru(n))]
    if not cells or any(cell.mismatch or _sequence(part, cell)[1] for cell in cells):
        return None
    if part is not body:
        raise Differentiated
    if any(n.eqn.effects for n in body.nodes):
        raise Unfit("the loop has side effects")
    return sequences(node, body, [_carried(body, node.params, cell) for cell in cells], unprofitable)


def _carried(body: Graph, params: dict, cell: Cell) -> Cell:
    """The cell with its states. Raises `Unfit` if the loop does not carry one of them on."""
    carried = body.inputs[params["num_consts"] :][: params["num_carry"]]
    made = (cell.output, cell.next_state) if cell.output is not None else (cell.next_state,)
    found = [next((i for i, v in enumerate(body.outputs[: len(carried)]) if uncast(v) is uncast(m)), None) for m in made]
    if None in found:
        raise Unfit(f"the loop does not carry the cell's {made[found.index(None)]!r} on")
    return cell._replace(
        carried=tuple(carried[i] for i in found), after=tuple(body.outputs[i] for i in found), made=made)


def _sequence(part, cell: Cell) -> tuple[str, str]:
    """("lstm", "") if the cell is what a scan carries on; the cell's own name where it is not inside a scan."""
    if part.outer is None or part.outer[1].primitive != "scan":
        return cell.pattern, ""
    params = part.outer[1].params
    carried = part.inputs[params["num_consts"] :][: params["num_carry"]]
    position = next((i for i, v in enumerate(carried) if v is cell.state), None)
    if position is None:
        return cell.pattern, ""
    name = cell.pattern.removesuffix("_cell")
    if uncast(part.outputs[position]) is uncast(cell.next_state):
        return name, ""
    between = next((n for n in cell.next_state.users if part.outputs[position] in n.outputs), None)
    return name, f"the next step's state is not the cell's: {between or repr(part.outputs[position])} comes between"


# --- the two cells -----------------------------------------------------------------------------------------------


def _lstm(node: Node) -> Cell | None:
    left, right = (_product(v) for v in node.inputs)
    if not left or not right:
        return None
    for keep, write in ((left, right), (right, left)):
        for forget, state in (keep, keep[::-1]):
            gates = [_gate(v) for v in (forget, *write)]
            if all(gates) and (_gate(state) is None or gates[0].name == "sigmoid"):
                break
        else:
            continue
        output = _output(node.out)
        if output is None or len({gate.node.inputs[0] for gate in gates}) < 3:
            return None
        forgets, *written = gates
        admits, candidate = sorted(written, key=lambda gate: gate.name != "sigmoid")
        squash, gate = output
        roles = [
            ("forget gate", forgets, "sigmoid"),
            ("input gate", admits, "sigmoid"),
            ("candidate", candidate, "tanh"),
            ("output", squash, "tanh"),
            ("output gate", gate, "sigmoid"),
        ]
        nodes = (node, *(v.producer for v in node.inputs), *squash.nodes)
        gates = [admits, forgets, candidate, gate]
        return Cell("lstm_cell", state, node.out, tuple(gates), nodes, _misfit("an LSTM", roles), squash.nodes[-1].out)
    return None


def _output(state: Value) -> tuple[Gate, Gate] | None:
    """(function of the state, output gate) of h' = σ(o)·tanh(c'), the product included in the first one's nodes."""
    for value in (state, *[n.out for n in state.users if n.primitive == CAST]):
        for node in value.users:
            if not (is_elementwise(node) and [v for v in node.inputs if constant(v) is None] == [value]):
                continue
            for product in node.out.users:
                if product.primitive == "mul" and len(set(product.inputs)) == 2:
                    other = product.inputs[1] if product.inputs[0] is node.out else product.inputs[0]
                    gate = _gate(other)
                    if gate:
                        return Gate(_function(value, node.out, (node,)), node, (), (node, product)), gate
    return None


def _gru(node: Node) -> Cell | None:
    for update, new, old, nodes, complement in _interpolations(node):
        update, candidate = _gate(update), _gate(new, resets=True)
        if not update or not candidate or update.name != "sigmoid":
            continue
        resets = [gate for n in candidate.nodes if n.primitive == "mul" for v in n.inputs if (gate := _gate(v))]
        if resets:
            roles = [("reset gate", resets[0], "sigmoid"), ("candidate", candidate, "tanh")]
            return Cell("gru_cell", old, node.out, (update, candidate, *resets), nodes, _misfit("a GRU", roles),
                        complement=complement)
    return None


def _interpolations(node: Node):
    """(z, n, h, nodes, whether z weighs n and not h) for every reading of the sum as an interpolation of two values."""
    left, right = node.inputs
    pairs = _product(left), _product(right)
    if all(pairs):
        products = left.producer, right.producer
        for (a, b), (c, d) in (pairs, pairs[::-1]):
            for gate, one in ((a, b), (b, a)):
                for complement, other in ((c, d), (d, c)):
                    if _is_one_minus(complement, gate):
                        nodes = (*products, complement.producer)
                        yield from ((gate, one, other, nodes, True), (gate, other, one, nodes, False))
    for start, product in ((left, right), (right, left)):
        for gate, difference in _product(product) and (_product(product), _product(product)[::-1]) or ():
            step = difference.producer
            if step is not None and step.primitive == "sub" and step.inputs[1] is start:
                way = (product.producer, step)
                yield from ((gate, start, step.inputs[0], way, False), (gate, step.inputs[0], start, way, True))


def _misfit(what: str, roles) -> str:
    """The first gate that is another function than it should be."""
    for role, gate, expected in roles:
        if gate.name != expected:
            return f"{gate.node} computes {gate.name}: the {role} of {what} is {expected}"
    return ""


# --- gates -------------------------------------------------------------------------------------------------------


def _gate(value: Value, resets: bool = False) -> Gate | None:
    """The function of a sum of dense layers that this value is; with `resets`, the sum may contain products too."""
    end, nodes = _rearranged(value)
    start = end
    spelling: tuple[Node, ...] = ()
    while (before := _before(start)) is not None and len(spelling) < LONGEST_SPELLING:
        start, spelling = before[0], (*before[1], *spelling)
        dots, way = _summed(start, resets)
        if dots:
            name = _function(start, end, spelling)
            return Gate(name, spelling[-1], dots, (*nodes, *spelling, *way), value, start, end)
    return None


def _before(value: Value) -> tuple[Value, tuple[Node, ...]] | None:
    """(x, nodes) if the value is a function of x alone, element by element; x is the nearest such value."""
    nodes: dict[int, Node] = {}
    frontier = {id(value): value}
    while frontier and len(nodes) < LONGEST_SPELLING:  # empty: it is computed from constants alone
        last = max(frontier.values(), key=lambda v: v.producer.index if v.producer else -1)
        node = last.producer
        if node is None or not (is_elementwise(node) or _is_unknown_function(node)):
            return None
        nodes[node.index] = node
        del frontier[id(last)]
        frontier |= {id(v): v for v in node.inputs if constant(v) is None}
        if len(frontier) == 1:
            return next(iter(frontier.values())), tuple(nodes[i] for i in sorted(nodes))
    return None


def _is_unknown_function(node: Node) -> bool:
    return (
        len(node.inputs) == len(node.outputs) == 1
        and node.out.shape == node.inputs[0].shape
        and node.primitive not in REARRANGED
        and jnp.issubdtype(node.out.dtype, jnp.floating)
    )


def _function(start: Value, end: Value, nodes: tuple[Node, ...]) -> str:
    primitive = {"logistic": "sigmoid", "tanh": "tanh"}.get(nodes[-1].primitive) if len(nodes) == 1 else None
    if primitive:
        return primitive
    named = name_activation(Region(start, end, nodes))
    return named.name if isinstance(named, Activation) else "no known activation"


def _summed(value: Value, resets: bool) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """(dense layers, all nodes) of a sum of dense layers, biases and rearrangements; none if it is anything else."""
    dots: dict[int, Node] = {}
    nodes: dict[int, Node] = {}
    stack = [value]
    while stack and len(nodes) < LARGEST_GATE:
        node = stack.pop().producer
        if node is None or node.index in nodes:
            continue
        if node.primitive == "dot_general":
            dots[node.index] = nodes[node.index] = node
            if resets:  # a GRU may reset the state before its dense layer
                stack += [v for v in node.inputs if _is_product(v)]
        elif node.primitive in (*ADD, "sub", *REARRANGED) or resets and node.primitive == "mul":
            nodes[node.index] = node
            stack += node.inputs
    return tuple(dots.values()), tuple(nodes.values())


def _rearranged(value: Value) -> tuple[Value, list[Node]]:
    """Back over reshapes, casts and splits."""
    nodes = []
    while value.producer is not None and value.producer.primitive in REARRANGED and len(value.producer.inputs) == 1:
        nodes.append(value.producer)
        value = value.producer.inputs[0]
    return value, nodes


def _is_product(value: Value) -> bool:
    return _product(value) is not None


def _product(value: Value) -> tuple[Value, Value] | None:
    node = uncast(value).producer
    if node is None or node.primitive != "mul" or () in [v.shape for v in node.inputs]:
        return None
    left, right = node.inputs
    return left, right


def _is_one_minus(value: Value, gate: Value) -> bool:
    node = value.producer
    return node is not None and node.primitive == "sub" and node.inputs[1] is gate and constant(node.inputs[0]) == 1
