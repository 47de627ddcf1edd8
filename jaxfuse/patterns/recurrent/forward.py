"""LSTM and GRU cells, and a `lax.scan` over some, which becomes fused sequences (scan.py)."""

from collections.abc import Iterable

from jaxfuse.analysis.canonical import ADD, uncast
from jaxfuse.patterns.recurrent import gradient as recurrent_grad
from jaxfuse.patterns.recurrent.cell import CarriedCell, Cell, cell_of, is_product
from jaxfuse.patterns.recurrent.scan import sequences
from jaxfuse.program.autodiff import forward
from jaxfuse.program.graph import Graph, Node
from jaxfuse.program.site import Match, Refusal, Unfit

ONE_STEP = "a cell outside a loop: XLA computes one step as fast"  # the figures are in benchmarks/results/kernels.md


class Differentiated(Unfit):
    """The loop is no fused sequence by itself: together with its backward loop it may be one."""

    def __init__(self):
        super().__init__("autodiff keeps values from inside the loop: fuse what is differentiated instead, as in grad(fuse(loss))")


def anchors(graph):
    """Loops; sums of two products, and of a value and a product."""
    return [n for n in forward(graph).nodes
            if n.primitive == "scan" or n.primitive in ADD and any(map(is_product, n.inputs))]


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields a Match for a `lax.scan` over cells, or else, in its body or outside any, a Refusal for each cell."""
    if node.index in claimed:
        return
    if node.primitive == "scan":
        yield from _loops(graph, graph.nodes[node.index], unprofitable)
        return
    cell = cell_of(node)
    if cell is None:
        return
    nodes = {n.index: n for n in (node, *cell.nodes, *(n for gate in cell.gates for n in gate.nodes))}
    dots = {n.index: n for gate in cell.gates for n in gate.dots}
    operands = tuple(dict.fromkeys(v for n in dots.values() for v in n.inputs))
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
    cells = [cell for n in anchors(body) if n.primitive != "scan" and (cell := cell_of(n))]
    if not cells or any(cell.mismatch or _sequence(part, cell)[1] for cell in cells):
        return None
    if part is not body:
        raise Differentiated
    if any(n.eqn.effects for n in body.nodes):
        raise Unfit("the loop has side effects")
    return sequences(node, body, [_carried(body, node.params, cell) for cell in cells], unprofitable)


def _carried(body: Graph, params: dict, cell: Cell) -> CarriedCell:
    """The cell with its states. Raises `Unfit` if the loop does not carry one of them on."""
    carried = body.inputs[params["num_consts"] :][: params["num_carry"]]
    places = []
    for made in cell.made:
        place = next((i for i, v in enumerate(body.outputs[: len(carried)]) if uncast(v) is uncast(made)), None)
        if place is None:
            raise Unfit(f"the loop does not carry the cell's {made!r} on")
        places.append(place)
    return CarriedCell(cell, tuple(carried[i] for i in places), tuple(body.outputs[i] for i in places))


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
