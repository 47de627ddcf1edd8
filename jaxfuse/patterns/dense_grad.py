"""Gradients of dense layers and batched products: the contractions that read one cotangent, and its sum, the bias gradient.

No kernel yet: recognised and reported, one row for each layer.
"""

from jaxfuse.canonical import CAST
from jaxfuse.graph import Node, Value
from jaxfuse.match import Refusal
from jaxfuse.patterns.autodiff import backward, no_kernel
from jaxfuse.patterns.dense import batch_axes, is_product


def anchors(graph):
    return [graph.nodes[i] for i in sorted(backward(graph)) if is_product(graph.nodes[i])]


def match(graph, node: Node, claimed: set[int], measured):
    """Yields the row of all contractions with this one's cotangent."""
    if node.index in claimed:
        return
    back = backward(graph)
    cotangent = _cotangent(node, back)
    users = [n for n in cotangent.users if n.index in back and n.index not in claimed]
    batched = bool(batch_axes(node))
    products = [n for n in users if is_product(n) and bool(batch_axes(n)) == batched]
    casts = [n for n in users if n.primitive == CAST]
    sums = [] if batched else [n for n in (*users, *[n for c in casts for n in c.out.users]) if _is_bias_gradient(n, claimed)]
    name = "matmul_grad" if batched else "dense_grad" + "+bias_grad" * bool(sums)
    operands = {id(v): v for n in products for v in (cotangent, *n.inputs)}
    yield Refusal(name, node, tuple(operands.values()), no_kernel(), "backward", (*products, *sums))


def _cotangent(node: Node, back: frozenset[int]) -> Value:
    """The operand that the backward pass made; JAX writes it first where both or neither are."""
    made = [v for v in node.inputs if v.producer is not None and v.producer.index in back]
    return (made or node.inputs)[0]


def _is_bias_gradient(node: Node, claimed: set[int]) -> bool:
    return node.primitive == "reduce_sum" and node.index not in claimed and 0 < node.out.ndim < node.inputs[0].ndim
