"""Batch norm with given statistics and no convolution to fold into (pre-activation networks), residual and activation.

All of it is elementwise: recognised, so that the report names it, and left to XLA, which makes one kernel of it.
"""

from jaxfuse.canonical import NotPerChannel, per_channel, size, varying_axes
from jaxfuse.graph import Node, Value
from jaxfuse.match import Refusal, Walk
from jaxfuse.patterns.activations import name_activation

REASON = "elementwise with given statistics: XLA makes one kernel of it"
ROOTS, REDUCTIONS = ("sqrt", "rsqrt"), ("reduce_sum", "psum")
DEEPEST = 12  # nodes from a variance to the factor made of it


def anchors(graph):
    """Where a value meets a factor per channel that comes from a square root, and not from statistics of the program."""
    return [node for node in graph.nodes if node.primitive in ("mul", "div") and _axis(node) is not None]


def match(graph, node: Node, claimed: set[int], measured):
    """Yields a Refusal, or nothing where another site has it."""
    axis, (full, _) = _axis(node), _operands(node)
    first = node
    before = full.producer
    if before is not None and before.primitive == "sub" and len(full.users) == 1:
        if not isinstance(per_channel(before.inputs[1], full, axis), NotPerChannel):
            first, full = before, before.inputs[0]
    if {node.index, first.index} & claimed:
        return
    chains, _ = Walk(graph, axis, claimed, name_activation).chains(full, first)
    label = chains[-1].label("").lstrip("+")
    if label.split("+")[0] == "bn":
        yield Refusal(label, node, (full,), REASON)


def _operands(node: Node) -> tuple[Value, Value]:
    """(value, factor)"""
    left, right = node.inputs
    return (left, right) if node.primitive == "div" or len(varying_axes(left)) > 1 else (right, left)


def _axis(node: Node) -> int | None:
    """The channel axis, if the node is such a step."""
    full, factor = _operands(node)
    axes = varying_axes(factor)
    if full.ndim < 3 or len(axes) != 1 or len(varying_axes(full)) < 2 or full.shape != node.out.shape:
        return None
    (axis,) = axes
    small = per_channel(factor, full, axis)
    return None if isinstance(small, NotPerChannel) or not _from_a_root(small) else axis


def _from_a_root(value: Value) -> bool:
    stack, seen, root = [value], 0, False
    while stack:
        node = stack.pop().producer
        if node is None:
            continue
        seen += 1
        root |= node.primitive in ROOTS
        if node.primitive in REDUCTIONS or seen > DEEPEST:
            return False
        stack += [v for v in node.inputs if size(v) <= size(value)]
    return root
