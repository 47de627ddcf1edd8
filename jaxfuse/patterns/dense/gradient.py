"""What autodiff has made of dense layers and batched products: the gradients of both operands and of the bias, also where an
activation lies between them and the cotangent.

Contractions of the backward pass that are none of these are recognised and reported, one row for each cotangent.
"""

import dataclasses

from jaxfuse.analysis.canonical import CAST
from jaxfuse.ops.dense import OP
from jaxfuse.patterns import contraction_gradients as contractions
from jaxfuse.patterns.contraction_gradients import Gradients
from jaxfuse.patterns.dense.forward import batch_axes, is_product, layer_of
from jaxfuse.patterns.dense.site import config_of
from jaxfuse.patterns.kernel import types_of
from jaxfuse.patterns.walk import Chain
from jaxfuse.program.autodiff import Subgraph, backward, forward
from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.program.site import Match, Refusal, Unfit
from jaxfuse.runtime.reasons import no_kernel

REARRANGED = (CAST, "transpose")


def anchors(graph):
    """The products of the forward pass, whose gradients are looked for, then those of the backward pass that are left."""
    back = backward(graph)
    if not back:
        return []
    return [n for n in forward(graph).nodes if is_product(n)] + [graph.nodes[i] for i in sorted(back) if is_product(graph.nodes[i])]


def match(graph: Graph, node: Node, claimed: set[int], unprofitable):
    """Yields a Match or a Refusal for the gradients of this product; or the row of all contractions with this one's cotangent."""
    if node.index in backward(graph):
        yield _left_over(graph, node, claimed)
        return
    for found in contractions.found(graph, graph.nodes[node.index], claimed, _may_be_alone):
        through = contractions.through_activation(
            graph, found.dz, _activated(forward(graph), node, claimed), lambda chain: chain.end, lambda dy: dy.shape == found.dz.shape)
        gradients = dataclasses.replace(found.with_bias(_batch(node)), through=through)
        try:
            yield _fused(graph, gradients, unprofitable)
        except Unfit as unfit:
            operands, nodes = (found.dz, *found.node.inputs), gradients.nodes
            yield Refusal(_label(gradients), found.node, operands, unfit.reason, "backward", nodes, covers=nodes)


# --- the gradients of one product --------------------------------------------------------------------------------


def _may_be_alone(gradients: Gradients) -> bool:
    """A cotangent that makes one gradient only; of which of the layers that share the other operand makes no difference."""
    return sum(is_product(n) for n in gradients.dz.users) == 1


def _batch(node: Node) -> tuple[int, ...]:
    """The axes of a layer's output that the right operand does not make; none of a batched product's."""
    (_, contracted), _ = node.params["dimension_numbers"]
    return () if batch_axes(node) else tuple(range(node.out.ndim - node.inputs[1].ndim + len(contracted)))


def _activated(part: Graph | Subgraph, node: Node, claimed: set[int]) -> list[Chain]:
    """The layer with its activation, as far as its dtype is kept: not as a loss may read it, in float32."""
    chains = [] if batch_axes(node) else layer_of(part, node, claimed).chains
    return [chain for chain in chains if chain.activation and chain.end.dtype == node.out.dtype]


def _label(gradients: Gradients) -> str:
    steps = [f"{gradients.activation.name}_grad"] if gradients.through else []
    steps.append("matmul_grad" if batch_axes(gradients.node) else "dense_grad")
    if gradients.has_bias:
        steps.append("bias_grad")
    return "+".join(steps)


def _fused(graph: Graph, gradients: Gradients, unprofitable) -> Match:
    """Raises `Unfit` where no kernel takes them."""
    node, dz, through = gradients.node, gradients.dz, gradients.through
    with_dz = through is not None and contractions.is_read_elsewhere(graph, dz, gradients.wanted)
    beside = tuple(v for v in (gradients.db, dz if with_dz else None) if v)
    made = (*gradients.wanted, dz) if with_dz else gradients.wanted
    config = OP.for_autodiff(dataclasses.replace(
        config_of(node), has_bias=gradients.has_bias, has_residual=with_dz, activation=gradients.activation))
    like_y = (*gradients.saved, gradients.dy)
    if len({v.dtype for v in (node.out, *like_y)}) > 1:
        raise Unfit(f"dtypes {', '.join(str(v.dtype) for v in like_y)} beside {node.out.dtype}: the kernel takes one")
    types, read = types_of(*node.inputs, *beside), types_of(*node.inputs, *[dz for _ in like_y])
    linear = contractions.backward_call(OP, gradients, config, types, read, unprofitable)
    needs = (*node.inputs, *like_y)

    def run(reading):
        x, w, *others = map(reading, needs)
        if through and through.placed:
            others[0] = through.placed(others[0])
        return zip(made, OP.backward(linear, x, w, *others))

    return contractions.match(gradients, _label(gradients), needs, made, run)


# --- what is left ------------------------------------------------------------------------------------------------


def _left_over(graph: Graph, node: Node, claimed: set[int]) -> Refusal:
    back, batched = backward(graph), bool(batch_axes(node))
    cotangents = _same_numbers(_cotangent(node, back))
    users = list(dict.fromkeys(n for v in cotangents for n in v.users if n.index in back and n.index not in claimed))
    products = [n for n in users if is_product(n) and bool(batch_axes(n)) == batched]
    sums = [] if batched else [n for n in users if _is_bias_gradient(n)]
    name = "matmul_grad" if batched else "dense_grad+bias_grad" if sums else "dense_grad"
    operands = dict.fromkeys(v for n in products for v in sorted(n.inputs, key=lambda v: v not in cotangents))
    return Refusal(name, node, tuple(operands), no_kernel(), "backward", (*products, *sums))


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
    return node.primitive == "reduce_sum" and 0 in node.params["axes"] and node.inputs[0].ndim - 1 not in node.params["axes"]
