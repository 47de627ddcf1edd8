"""Batched matrix products: attention scores (scale, mask, softmax) and the rest. The kernel is of the product; what follows it
XLA makes one kernel of."""

import dataclasses

from jaxfuse.analysis.canonical import ADD, CAST, constant
from jaxfuse.patterns.dense.site import batch_axes, is_product, layer_of
from jaxfuse.patterns.walk import read_elsewhere
from jaxfuse.program.autodiff import forward
from jaxfuse.program.graph import Node, Value
from jaxfuse.program.site import Match, Refusal, Unfit

LONGEST = 8  # steps between the product and the softmax: casts, scale, masks


def anchors(graph):
    return [n for n in forward(graph).nodes if is_product(n) and batch_axes(n)]


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields one row for the product: "attention scores" if it is scaled or goes to a softmax, else "matmul"."""
    if node.index in claimed:
        return
    part, value, nodes, steps, reason = forward(graph), node.out, [node], set(), ""
    for _ in range(LONGEST):
        if _reaches_softmax(value):
            steps.add("softmax")
            reason = read_elsewhere(part, value, [])
            break
        reason = read_elsewhere(part, value, value.users)
        if reason or not value.users:
            break
        kind = _step(value, value.users[0])
        if not kind:
            reason = f"{value.users[0]} is not a scale, a mask or a softmax"
            break
        steps.add(kind)
        nodes.append(value.users[0])
        value = value.users[0].out
    is_scores = bool(steps & {"scale", "softmax"})
    name, own = ("attention scores", tuple(nodes)) if is_scores else ("matmul", (node,))
    reason = reason if value.users and is_scores else ""  # nothing is missed where nothing follows
    try:
        product = dataclasses.replace(layer_of(graph, part, node, claimed), wide=is_scores and not reason)
        emission = product.fused(product.chains[0], unprofitable)
        yield Match("matmul" if reason else name, node, own, (emission,), emission.needs, 0)
    except Unfit as unfit:
        reason = reason or unfit.reason
    if reason:
        yield Refusal(name, node, tuple(node.inputs), reason, nodes=own)


def _step(value: Value, node: Node) -> str:
    """What the node does to scores: "scale", "mask", "rearranged", or ""."""
    if node.primitive in (CAST, "transpose", "reshape"):
        return "rearranged"
    if node.primitive in ("mul", "div") and any(v.shape == () or constant(v) is not None for v in node.inputs):
        return "scale"
    if node.primitive in ADD and node.inputs[0] is not node.inputs[1] and node.out.shape == value.shape:
        return "mask"
    if node.primitive == "select_n" and value in node.inputs[1:]:
        return "mask"
    return ""


def _reaches_softmax(value: Value) -> bool:
    """Its maximum along one axis is taken, and something else is done to it."""
    return any(n.primitive == "reduce_max" and len(n.params["axes"]) == 1 for n in value.users) and len(value.users) > 1
