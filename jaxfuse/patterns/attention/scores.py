"""Batched matrix products: attention scores (scale, mask, softmax) and the rest. The kernel is of the product; what follows it
XLA makes one kernel of."""

import dataclasses

from jaxfuse.analysis.normal import ADD, CAST, constant
from jaxfuse.patterns.attention.form import maximum_of
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
    part, value, nodes, is_scores, reason = forward(graph), node.out, [node], False, ""
    for _ in range(LONGEST):
        if maximum_of(value) and len(value.users) > 1:
            is_scores, reason = True, read_elsewhere(part, value, [])
            break
        reason = read_elsewhere(part, value, value.users)
        if reason or not value.users:
            break
        (step,) = value.users
        if not (_is_scale(step) or _is_mask(value, step) or step.primitive in (CAST, "transpose", "reshape")):
            reason = f"{step} is not a scale, a mask or a softmax"
            break
        is_scores, value = is_scores or _is_scale(step), step.out
        nodes.append(step)
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


def _is_scale(node: Node) -> bool:
    return node.primitive in ("mul", "div") and any(v.shape == () or constant(v) is not None for v in node.inputs)


def _is_mask(scores: Value, node: Node) -> bool:
    if node.primitive in ADD:
        return node.inputs[0] is not node.inputs[1] and node.out.shape == scores.shape
    return node.primitive == "select_n" and scores in node.inputs[1:]
