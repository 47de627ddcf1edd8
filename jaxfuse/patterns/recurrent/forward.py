"""LSTM and GRU cells, and a `lax.scan` over some, which becomes fused sequences (scan.py)."""

from collections.abc import Iterable

from jaxfuse.analysis.normal import ADD, uncast
from jaxfuse.analysis.scan_pairs import Loop
from jaxfuse.patterns.recurrent import gradient
from jaxfuse.patterns.recurrent.cell import Cell, cell_of, is_product
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
    if not cells or any(cell.mismatch or _carried(part, cell)[1] for cell in cells):
        return None
    if part is not body:
        raise Differentiated
    if any(n.eqn.effects for n in body.nodes):
        raise Unfit("the loop has side effects")
    return sequences(Loop(node), body, cells, unprofitable)


def _carried(part, cell: Cell) -> tuple[bool, str]:
    """Whether the cell's state is what a scan hands to its steps, and, if so, why the next state is not the cell's."""
    if part.outer is None or part.outer[1].primitive != "scan":
        return False, ""
    loop = Loop(part.outer[1])
    _, carried, _ = loop.split(part.inputs)
    if cell.state not in carried:
        return False, ""
    after, next_state = part.outputs[carried.index(cell.state)], cell.made[-1]
    if uncast(after) is uncast(next_state):
        return True, ""
    between = next((n for n in next_state.users if after in n.outputs), None)
    return True, f"the next step's state is not the cell's: {between or repr(after)} comes between"
