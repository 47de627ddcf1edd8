"""Gradients of dense layers and batched products: the contractions that read one cotangent, and its sum.

No kernel yet: recognised and reported, one row for each layer.
"""

from jaxfuse.canonical import CAST
from jaxfuse.graph import Node, Value
from jaxfuse.match import Refusal
from jaxfuse.patterns.autodiff import backward, no_kernel
from jaxfuse.patterns.dense import batch_axes, is_product

REARRANGED = (CAST, "transpose")


def anchors(graph):
    return [graph.nodes[i] for i in sorted(backward(graph)) if is_product(graph.nodes[i])]


def match(graph, node: Node, claimed: set[int], measured):
    """Yields the row of all contractions with this one's cotangent."""
    if node.index in claimed:
        return
    back, batched = backward(graph), bool(batch_axes(node))
    cotangents = _same_numbers(_cotangent(node, back))
    users = list(
        {n.index: n for v in cotangents for n in v.users if n.index in back and n.index not in claimed}.values()
    )
    products = [n for n in users if is_product(n) and bool(batch_axes(n)) == batched]
    sums = [] if batched else [n for n in users if _is_bias_gradient(n)]
    name = "matmul_grad" if batched else "dense_grad" + "+bias_grad" * bool(sums)
    operands = {id(v): v for n in products for v in sorted(n.inputs, key=lambda v: v not in cotangents)}
    yield Refusal(name, node, tuple(operands.values()), no_kernel(), "backward", (*products, *sums))


def _cotangent(node: Node, back: frozenset[int]) -> Value:
    """The operand that the backward pass made; JAX writes it first where both or neither are."""
    made = [v for v in node.inputs if v.producer is not None and v.producer.index in back]
    return (made or node.inputs)[0]


def _same_numbers(value: Value) -> list[Value]:
    """The value before it was cast and transposed, and all casts and transposes of that."""
    while value.producer is not None and value.producer.primitive in REARRANGED:
        value = value.producer.inputs[0]
    values = [value]
    for value in values:
        values += [n.out for n in value.users if n.primitive in REARRANGED]
    return values


def _is_bias_gradient(node: Node) -> bool:
    """A sum over the batch, not over the features."""
    return (
        node.primitive == "reduce_sum"
        and 0 in node.params["axes"]
        and node.inputs[0].ndim - 1 not in node.params["axes"]
    )
