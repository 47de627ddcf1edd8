"""Optimizer updates: sgd, momentum, adam, adamw, as optax writes them. They are only named, never fused: no kernel gained anything. A
report has one row for each kind of update, with the number of its tensors.

An update is a returned p + u or p - u of an input p; what tells the kinds apart is what u is computed from, elementwise:

    sgd        a gradient
    momentum   g + β·t, which is returned, the next t
    adam       m / (√v + ε), both m and v returned;  adamw: p too, but not under the root

Weight decay by an L2 loss or by `add_decayed_weights` before the moments: p is under the root.
"""

from jaxfuse.analysis.layout import RESHAPES
from jaxfuse.analysis.normal import ADD, CAST, constant, size, uncast
from jaxfuse.analysis.regions import cone, depends_on
from jaxfuse.program.autodiff import backward
from jaxfuse.program.elementwise import is_elementwise
from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.program.site import Refusal
from jaxfuse.runtime.reasons import left_to_xla

LARGEST = 64  # nodes of one tensor's update
LINEAR = (*ADD, "sub", "mul", "div", "neg", "select_n", "integer_pow", CAST, *RESHAPES)


def anchors(graph):
    """The first update of each kind."""
    return [nodes[0] for nodes in _kinds(graph).values()]


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields the row of the kind that this update is the first of, with the number of its tensors."""
    kind, nodes = next((kind, nodes) for kind, nodes in _kinds(graph).items() if nodes[0] is node)
    largest = max((n.out for n in nodes), key=size)
    yield Refusal(f"{kind} x{len(nodes)}", node, (largest,), left_to_xla())


def _kinds(graph: Graph) -> dict[str, list[Node]]:
    kinds: dict[str, list[Node]] = {}
    given = frozenset(graph.inputs)
    ends = {v.producer.index: v.producer for v in graph.outputs if v.producer is not None}
    for index in sorted(ends.keys() - graph.marks.fused_away):
        if kind := _kind(graph, given, ends[index]):
            kinds.setdefault(kind, []).append(ends[index])
    return kinds


def _kind(graph: Graph, given: frozenset[Value], node: Node) -> str:
    """ "sgd", "momentum", "adam", "adamw", or "" for what is no update that we know."""
    back = backward(graph)

    def inside(end: Value) -> tuple[list[Node], set[Value]]:
        """(what computes the value elementwise, what that reads of the same shape)."""
        nodes = cone([end], lambda value: value.shape == end.shape and value not in given and value.index not in back
                     and is_elementwise(value.node), LARGEST)
        return nodes, {v for v in (end, *[v for n in nodes for v in n.inputs]) if v.shape == end.shape}

    parameter = next((v for v in node.inputs if v in given and v.shape == node.out.shape), None)
    if parameter is None or node.primitive not in (*ADD, "sub"):
        return ""
    nodes, read = inside(node.other_input(parameter))
    roots = [n for n in nodes if n.primitive == "sqrt"]
    states = [n for n in nodes if graph.is_returned(n.out)]
    decay = "+weight_decay" if parameter in read else ""
    # a norm of adam's own step scales it, as in lamb
    is_rescaled = depends_on([v for n in nodes for v in n.inputs if v.shape == ()], [n.out for n in roots])
    if len(roots) == 1 and len(states) == 2 and not is_rescaled:
        _, under_root = inside(roots[0].inputs[0])
        return "adam+weight_decay" if parameter in under_root else "adamw" if decay else "adam"
    if roots or not all(n.primitive in LINEAR for n in nodes):
        return ""
    if len(states) == 1:
        return f"momentum{decay}"
    descends = node.primitive == "sub" or any(map(_is_negative, nodes))  # else gradients are added up
    has_gradient = any(v.index in back for v in read - given)
    return f"sgd{decay}" if has_gradient and descends and not states and read & given <= {parameter} else ""


def _is_negative(node: Node) -> bool:
    """A negation, or a product with a negative number, which may be a schedule's value times -1."""
    factors = [uncast(v, *RESHAPES) for v in node.inputs if node.primitive == "mul" and v.shape == ()]
    numbers = [constant(v) for factor in factors for v in (factor, *(factor.producer.inputs if factor.producer else ()))]
    return node.primitive == "neg" or any(number is not None and number < 0 for number in numbers)
