"""What autodiff has made of dense layers and batched products: the gradients of both operands and of the bias, also where an
activation lies between them and the cotangent.

Contractions of the backward pass that are none of these are recognised and reported, one row for each cotangent.
"""

import dataclasses

from jaxfuse.analysis.normal import CAST, uncast
from jaxfuse.ops.dense import OP
from jaxfuse.patterns.contraction import Gradients
from jaxfuse.patterns.dense.site import batch_axes, config_of, is_product, layer_of
from jaxfuse.program.autodiff import backward, forward
from jaxfuse.program.graph import Graph, Node
from jaxfuse.program.site import Refusal, Unfit
from jaxfuse.runtime.reasons import no_kernel


def anchors(graph):
    """The products of the forward pass, whose gradients are looked for, then those of the backward pass that are left."""
    back = backward(graph)
    return [n for n in (*forward(graph).nodes, *[graph.nodes[i] for i in sorted(back)]) if is_product(n)] if back else []


@dataclasses.dataclass(frozen=True)
class ProductGradients(Gradients):
    op = OP

    def label(self, with_dz: bool = False) -> str:
        steps = [f"{self.activation.name}_grad"] if self.saved else []
        steps.append("matmul_grad" if batch_axes(self.node) else "dense_grad")
        return "+".join([*steps, "bias_grad"] if self.db else steps)


def match(graph: Graph, node: Node, claimed: set[int], unprofitable):
    """Yields a Match or a Refusal for the gradients of this product; or the row of all contractions with this one's cotangent."""
    if node.index in backward(graph):
        yield _left_over(graph, node, claimed)
        return

    def may_be_alone(gradients: Gradients) -> bool:
        """Of which of the layers that share the other operand makes no difference."""
        return sum(is_product(n) for n in gradients.dz.users) == 1

    for found in ProductGradients.found(graph, graph.nodes[node.index], claimed, may_be_alone):
        chains = [] if batch_axes(node) else layer_of(graph, forward(graph), node, claimed).chains
        plain = found.with_bias(_batch(node))
        gradients = plain.through_activation(graph, chains) or plain
        try:
            yield gradients.fused(graph, config_of(node), unprofitable)
        except Unfit as unfit:
            operands, nodes = (found.dz, *found.node.inputs), gradients.nodes
            yield Refusal(gradients.label(), found.node, operands, unfit.reason, "backward", nodes, covers=nodes)


def _batch(node: Node) -> tuple[int, ...]:
    """The axes of a layer's output that the right operand does not make; none of a batched product's."""
    (_, contracted), _ = node.params["dimension_numbers"]
    return () if batch_axes(node) else tuple(range(node.out.ndim - node.inputs[1].ndim + len(contracted)))


def _left_over(graph: Graph, node: Node, claimed: set[int]) -> Refusal:
    """The row of the products, and of the sum over the batch, that read this one's cotangent: the operand that the backward pass made.
    JAX writes it first where both or neither are."""
    back, batched = backward(graph), bool(batch_axes(node))
    made = [v for v in node.inputs if v.producer is not None and v.producer.index in back]
    cotangents = [uncast((made or node.inputs)[0], "transpose")]
    for value in cotangents:
        cotangents += [n.out for n in value.users if n.primitive in (CAST, "transpose")]
    users = list(dict.fromkeys(n for v in cotangents for n in v.users if n.index in back and n.index not in claimed))
    products = [n for n in users if is_product(n) and bool(batch_axes(n)) == batched]
    sums = [n for n in users if n.primitive == "reduce_sum" and 0 in n.params["axes"]
            and n.inputs[0].ndim - 1 not in n.params["axes"] and not batched]
    name = "matmul_grad" if batched else "dense_grad+bias_grad" if sums else "dense_grad"
    operands = dict.fromkeys(v for n in products for v in sorted(n.inputs, key=lambda v: v not in cotangents))
    return Refusal(name, node, tuple(operands), no_kernel(), "backward", (*products, *sums))
