"""What autodiff has made of dense layers and batched products: the gradients of both operands and of the bias, which share a
cotangent, and the gradient of the activation that gives it.

What to look for is asked of JAX itself, as for convolutions (`conv_grad`). Contractions of the backward pass that are none
of these are recognised and reported, one row for each cotangent.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.canonical import CAST, size
from jaxfuse.ops.activations import NO_ACTIVATION, Activation
from jaxfuse.ops.dense import OP
from jaxfuse.ops.op import Linear
from jaxfuse.patterns.activation_grad import ActivationGrad, activation_grads_at
from jaxfuse.patterns.conv.gradient import applied, gradient_steps, static_key
from jaxfuse.patterns.dense.forward import batch_axes, is_product, layer_of
from jaxfuse.patterns.dense.site import config_of, types_of
from jaxfuse.patterns.kernel import require
from jaxfuse.patterns.walk import Chain, depends_on
from jaxfuse.program.autodiff import backward, forward
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.liveness import dead_after
from jaxfuse.program.site import Match, Refusal, Unfit
from jaxfuse.runtime.reasons import no_kernel

REARRANGED = (CAST, "transpose")


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Nodes that compute the gradients of one product for the cotangent `dz` of its result, and what computes that."""

    dz: Value
    dx: Node | None
    dw: Node | None
    db: Node | None = None
    through: ActivationGrad | None = None
    chain: Chain | None = None  # to the activation's value, and further where that is turned

    @property
    def activation(self) -> Activation:
        return self.chain.activation if self.chain else NO_ACTIVATION

    @property
    def wanted(self) -> list[Value]:
        return [n.out for n in (self.dx, self.dw, self.db) if n is not None]


def anchors(graph):
    """The products of the forward pass, whose gradients are looked for, then those of the backward pass that are left."""
    back = backward(graph)
    if not back:
        return []
    return [n for n in forward(graph).nodes if is_product(n)] + [graph.nodes[i] for i in sorted(back) if is_product(graph.nodes[i])]


def match(graph: Graph, node: Node, claimed: set[int], unprofitable):
    """Yields a Match or a Refusal for the gradients of this product; or the row of all contractions with this one's cotangent."""
    if node.index in claimed:
        return
    if node.index in backward(graph):
        yield _left_over(graph, node, claimed)
        return
    own = graph.nodes[node.index]
    for gradients in _gradients(graph, own, claimed):
        gradients = _with_activation(graph, node, _with_bias(own, gradients), claimed)
        try:
            yield _fused(graph, own, gradients, unprofitable)
        except Unfit as unfit:
            claims = tuple(v.producer for v in gradients.wanted)
            yield Refusal(_label(own, gradients), own, (gradients.dz, *own.inputs), unfit.reason, "backward", claims)


# --- the gradients of one product --------------------------------------------------------------------------------


def _gradients(graph: Graph, node: Node, claimed: set[int]) -> list[Gradients]:
    x, w = node.inputs
    if x.literal is not None or w.literal is not None or not all(jnp.issubdtype(v.dtype, jnp.inexact) for v in (x, w)):
        return []
    back = backward(graph)
    of_x, of_w = gradient_steps(node.eqn.primitive, static_key(node.params), *[(v.shape, v.dtype) for v in (x, w)])

    def by_cotangent(value: Value, steps) -> dict[int, Node]:
        nodes = [n for n in applied(value, steps) if n.index in back and n.index not in claimed]
        found = [(_product(n).inputs[0], n) for n in nodes]  # that of another layer with this operand may have another shape
        return {id(dz): n for dz, n in found if dz is not value and dz.shape == node.out.shape}

    dxs, dws = by_cotangent(w, of_x), by_cotangent(x, of_w)
    both = [Gradients(_product(dxs[key]).inputs[0], dxs[key], dws[key]) for key in dxs if key in dws]
    # A cotangent that makes one gradient only; of which of the layers that share the other operand makes no difference.
    dx_alone = [Gradients(_product(n).inputs[0], n, None) for n in dxs.values() if _makes_one(_product(n).inputs[0])]
    dw_alone = [Gradients(_product(n).inputs[0], None, n) for n in dws.values() if _makes_one(_product(n).inputs[0])]
    return both or dx_alone + dw_alone


def _product(node: Node) -> Node:
    """The contraction behind the transposes that end a gradient."""
    while node.primitive != "dot_general":
        node = node.inputs[0].producer
    return node


def _makes_one(cotangent: Value) -> bool:
    return sum(is_product(n) for n in cotangent.users) == 1


def _with_bias(node: Node, gradients: Gradients) -> Gradients:
    """The sum of the cotangent over all but the axes that the right operand makes."""
    (_, contracted), _ = node.params["dimension_numbers"]
    rows = tuple(range(node.out.ndim - node.inputs[1].ndim + len(contracted)))
    sums = [n for n in gradients.dz.users if n.primitive == "reduce_sum" and tuple(sorted(n.params["axes"])) == rows]
    bias = sums and rows and not batch_axes(node)
    return dataclasses.replace(gradients, db=sums[0]) if bias else gradients


def _with_activation(graph: Graph, node: Node, gradients: Gradients, claimed: set[int]) -> Gradients:
    """Looks through the activation's derivative to its value, its argument and dy; `node` is the forward part's."""
    part = forward(graph)
    for chain in [] if batch_axes(node) else layer_of(part, node, claimed).chains[::-1]:
        if chain.activation and chain.end.dtype == node.out.dtype:  # not as a loss may read it, in float32
            slopes = activation_grads_at(graph, part.original(chain.region.start), gradients.dz)
            found = next((s for s in slopes if s.dy.shape == s.dz.shape and s.is_of(chain.activation)), None)
            if found:
                return dataclasses.replace(gradients, through=found, chain=dataclasses.replace(chain, end=part.original(chain.end)))
    return gradients


def _label(node: Node, gradients: Gradients) -> str:
    product = "matmul_grad" if batch_axes(node) else "dense_grad"
    activation = [f"{gradients.activation.name}_grad"] * (gradients.through is not None)
    return "+".join([*activation, product, *["bias_grad"] * (gradients.db is not None)])


def _fused(graph: Graph, node: Node, gradients: Gradients, unprofitable) -> Match:
    """Raises `Unfit` where no kernel takes them."""
    config = config_of(node)
    through, wanted = gradients.through, gradients.wanted
    dz_too = through is not None and _is_read_elsewhere(graph, gradients)
    made = (*wanted, *[gradients.dz] * dz_too)
    config = dataclasses.replace(config, has_bias=gradients.db is not None, has_residual=dz_too,
                                 activation=gradients.activation)
    config = OP.for_autodiff(config)
    from_y = through is not None and not config.saving
    saved_activation = [] if through is None else [gradients.chain.end if from_y else through.z]
    needs = (*node.inputs, *saved_activation, gradients.dz if through is None else through.dy)
    if len({v.dtype for v in (node.out, *needs[2:])}) > 1:
        raise Unfit(f"dtypes {', '.join(str(v.dtype) for v in needs[2:])} beside {node.out.dtype}: the kernel takes one")
    types = types_of(*node.inputs, *[n.out for n in (gradients.db,) if n], *[gradients.dz] * dz_too)
    active = (gradients.dx is not None, gradients.dw is not None, *[True] * (config.has_bias + config.has_residual))
    linear = Linear(config, active, types, len(needs) - 1)
    given = types_of(*node.inputs, *[gradients.dz] * (len(needs) - 2))
    require(OP.backward, linear, given, unprofitable, "dense", config, types, "backward")
    if depends_on(list(needs), set(map(id, made)), min(v.producer.index for v in made)):
        raise Unfit("the gradients of this product depend on each other")

    def run(read):
        x, w, *others = map(read, needs)
        if from_y:
            others[0] = gradients.chain.as_activated(others[0])
        return zip(made, OP.backward(linear, x, w, *others))

    saved = np.dtype(node.out.dtype).itemsize * size(gradients.dz) * (config.has_bias + 2 * (through is not None))
    operands = (needs[-1], *node.inputs)
    return Match(_label(node, gradients), node, (), (Emission(needs, made, run),), operands, saved, "backward")


def _is_read_elsewhere(graph: Graph, gradients: Gradients) -> bool:
    fused_away = dead_after(graph, tuple(gradients.wanted))
    return graph.is_returned(gradients.dz) or any(n.index not in fused_away for n in gradients.dz.users)


# --- what is left ------------------------------------------------------------------------------------------------


def _left_over(graph: Graph, node: Node, claimed: set[int]) -> Refusal:
    back, batched = backward(graph), bool(batch_axes(node))
    cotangents = _same_numbers(_cotangent(node, back))
    users = list(
        {n.index: n for v in cotangents for n in v.users if n.index in back and n.index not in claimed}.values()
    )
    products = [n for n in users if is_product(n) and bool(batch_axes(n)) == batched]
    sums = [] if batched else [n for n in users if _is_bias_gradient(n)]
    name = "matmul_grad" if batched else "dense_grad" + "+bias_grad" * bool(sums)
    operands = {id(v): v for n in products for v in sorted(n.inputs, key=lambda v: v not in cotangents)}
    return Refusal(name, node, tuple(operands.values()), no_kernel(), "backward", (*products, *sums))


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
