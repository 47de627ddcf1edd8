"""Optimizer updates: sgd, momentum, adam, adamw, as optax writes them. No kernel: one row for each kind of update.

An update is a returned p + u or p - u of an input p; what tells the kinds apart is what u is computed from, elementwise:

    sgd        a gradient
    momentum   g + β·t, which is returned, the next t
    adam       m / (√v + ε), both m and v returned;  adamw: p too, but not under the root

Weight decay by an L2 loss or by `add_decayed_weights` before the moments: p is under the root.
"""

from typing import NamedTuple

from jaxfuse.analysis.canonical import ADD, CAST, constant, size, uncast
from jaxfuse.analysis.elementwise import is_elementwise
from jaxfuse.analysis.layout import RESHAPES
from jaxfuse.program.autodiff import backward
from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.program.site import Refusal
from jaxfuse.runtime.reasons import left_to_xla

LARGEST = 64  # nodes of one tensor's update
LINEAR = (*ADD, "sub", "mul", "div", "neg", "select_n", "integer_pow", CAST, *RESHAPES)


class Update(NamedTuple):
    """What the update of one tensor is computed from, back to where it is not elementwise any more."""

    nodes: tuple[Node, ...]
    inputs: frozenset[Value]  # the program's inputs among it
    has_gradient: bool


def anchors(graph):
    """The first update of each kind."""
    return [nodes[0] for nodes in _kinds(graph).values()]


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields the row of the kind that this update is the first of, with the number of its tensors."""
    kind, nodes = next((kind, nodes) for kind, nodes in _kinds(graph).items() if nodes[0] is node)
    largest = max((n.out for n in nodes), key=size)
    yield Refusal(f"{kind} x{len(nodes)}", node, (largest,), left_to_xla())


def _kinds(graph: Graph) -> dict[str, list[Node]]:
    given = set(graph.inputs)
    kinds: dict[str, list[Node]] = {}
    ends = {v.producer.index: v.producer for v in graph.outputs if v.producer is not None}
    for index in sorted(ends):
        node = ends[index]
        parameter = next((v for v in node.inputs if v in given and v.shape == node.out.shape), None)
        if parameter is not None and node.primitive in (*ADD, "sub") and index not in graph.fused_away:
            kind = _kind(graph, node, parameter, given)
            if kind:
                kinds.setdefault(kind, []).append(node)
    return kinds


def _kind(graph: Graph, node: Node, parameter: Value, given: set[Value]) -> str:
    """ "sgd", "momentum", "adam", "adamw", or "" for what is no update that we know."""
    other = next((v for v in node.inputs if v is not parameter), parameter)
    update = _update(graph, other, given)
    roots = [n for n in update.nodes if n.primitive == "sqrt"]
    states = [n for n in update.nodes if graph.is_returned(n.out)]
    decayed = parameter in update.inputs
    if len(roots) == 1 and len(states) == 2 and not _rescaled(update, roots[0]):
        if parameter in _update(graph, roots[0].inputs[0], given).inputs:
            return "adam+weight_decay"
        return "adamw" if decayed else "adam"
    if roots or not all(n.primitive in LINEAR for n in update.nodes) or not update.has_gradient and len(states) != 1:
        return ""
    if len(states) == 1:
        return "momentum+weight_decay" if decayed else "momentum"
    if (
        states
        or update.inputs - {parameter}
        or not (node.primitive == "sub" or any(map(_is_negative, update.nodes)))
    ):
        return ""  # not a descent: gradients that are added up
    return "sgd+weight_decay" if decayed else "sgd"


def _is_negative(node: Node) -> bool:
    """A negation, or a product with a negative number, which may be a schedule's value times -1."""
    factors = [uncast(v, *RESHAPES) for v in node.inputs if node.primitive == "mul" and v.shape == ()]
    numbers = [
        constant(v) for factor in factors for v in (factor, *(factor.producer.inputs if factor.producer else ()))
    ]
    return node.primitive == "neg" or any(number is not None and number < 0 for number in numbers)


def _rescaled(update: Update, root: Node) -> bool:
    """Whether a norm of adam's own step scales it, as in lamb."""
    stack = [
        v for n in update.nodes if n.index > root.index for v in n.inputs if v.shape == () and v.producer is not None
    ]
    seen: set[int] = set()
    while stack and len(seen) < LARGEST:
        node = stack.pop().producer
        if node is not None and node.index > root.index and node.index not in seen:
            if node.primitive == "reduce_sum":
                return True
            seen.add(node.index)
            stack += node.inputs
    return False


def _update(graph: Graph, end: Value, given: set[Value]) -> Update:
    back, inputs, has_gradient = backward(graph), set(), False
    nodes: dict[int, Node] = {}
    stack = [end]
    while stack and len(nodes) < LARGEST:
        value = stack.pop()
        node = value.producer
        if value.shape != end.shape:
            continue
        if value in given:
            inputs.add(value)
        elif node is not None and node.index in back:
            has_gradient = True
        elif node is not None and is_elementwise(node) and node.index not in nodes:
            nodes[node.index] = node
            stack += node.inputs
    return Update(tuple(nodes.values()), frozenset(inputs), has_gradient)
