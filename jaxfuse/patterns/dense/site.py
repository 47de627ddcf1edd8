"""A product of the program as the op `dense`: which side is the weight, and the config."""

import dataclasses

import jax.numpy as jnp

from jaxfuse.analysis.layout import RESHAPES
from jaxfuse.analysis.normal import ADD, CAST, uncast, varying_axes
from jaxfuse.ops.dense import OP, DenseConfig
from jaxfuse.patterns.contraction import NARROW, Axes, Contraction, require_no_sharding
from jaxfuse.patterns.walk import Chain, Walk
from jaxfuse.program.autodiff import Subgraph
from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.program.site import Unfit
from jaxfuse.runtime.reasons import no_kernel

REARRANGED = (*RESHAPES, CAST, "transpose", "slice", "split", "concatenate")


@dataclasses.dataclass(frozen=True, eq=False)
class Layer(Contraction):
    """x·w with its bias, residual and activation. A `wide` one is computed in float32: where a softmax widens scores again, XLA drops
    the cast to 16 bits that comes before, as it does with a product of its own."""

    op, claims_refused = OP, True
    weight_left: bool
    wide: bool = False

    def nodes_of(self, chain: Chain) -> tuple[Node, ...]:
        """Less casts at the end: with these the norm that follows begins."""
        nodes = [*super().nodes_of(chain)]
        while nodes[-1].primitive == CAST:
            nodes.pop()
        return tuple(nodes)

    def configured(self, chain: Chain, residual_outs: int) -> tuple[DenseConfig, Axes, tuple[Value, ...]]:
        config, order = config_of(self.node, self.weight_left), tuple(range(self.out.ndim))
        if self.weight_left:
            order = (*order[len(self.features):], *self.features)
            features = chain.layout.axes(*self.features) or ()
            if order != tuple(sorted(order)) and features[-1:] != (chain.end.ndim - 1,):
                raise Unfit(f"{self.node} has its weight on the left and makes columns: the kernel writes rows")
        if chain.has_scale:
            raise Unfit(no_kernel("a scale of a dense layer"))
        out_dtype = jnp.float32 if self.wide and chain.end.dtype in NARROW else chain.end.dtype
        return dataclasses.replace(config, with_residuals=bool(residual_outs), out_dtype=str(jnp.dtype(out_dtype))), order, ()


def layer_of(graph: Graph, part: Graph | Subgraph, node: Node, claimed: set[int]) -> Layer:
    """The layer whose product is this node of a part of the graph."""
    weight_left, left = _weight_is_left(node), _free_axes_on_the_left(node)
    features = tuple(range(left) if weight_left else range(left, node.out.ndim))
    x, w = reversed(node.inputs) if weight_left else node.inputs
    chains, stop = Walk(part, features, claimed).chains(node.out)
    return Layer(graph, part, node, x, w, node.out, features, chains, stop, (), None, weight_left)


def config_of(node: Node, weight_left: bool = False) -> DenseConfig:
    """The op's config for this contraction. Raises `Unfit` if the op does not cover it."""
    require_no_sharding(node)
    return DenseConfig.of(node.params, node.out.dtype, weight_left)


def is_product(node: Node) -> bool:
    """A dot_general that contracts something; einsum writes elementwise products as one that does not."""
    return node.primitive == "dot_general" and bool(node.params["dimension_numbers"][0][0])


def batch_axes(node: Node) -> Axes:
    return tuple(node.params["dimension_numbers"][1][0])


def is_parameter(value: Value) -> bool:
    """Whether the value is an input or a constant of the program, rearranged."""
    return uncast(value, *REARRANGED).producer is None


def _weight_is_left(node: Node) -> bool:
    """w·x instead of x·w: what comes from the left operand is made the last axis, or has a bias, or is the only parameter."""
    left = _free_axes_on_the_left(node)
    if batch_axes(node):
        return False
    if left in (0, node.out.ndim):
        return left != 0
    value, order = node.out, tuple(range(node.out.ndim))
    while len(value.users) == 1 and value.users[0].primitive == "transpose":
        order = tuple(order[d] for d in value.users[0].params["permutation"])
        value = value.users[0].out
    if order != tuple(sorted(order)):
        return order[-1] < left
    for user in node.out.users:
        if user.primitive in ADD:
            along = [axes for v in user.inputs if v is not node.out and len(axes := varying_axes(v)) == 1]
            if along:
                return left == 1 and along[0] == {0}
    lhs, rhs = node.inputs
    return lhs.ndim == 2 and is_parameter(lhs) and not is_parameter(rhs)


def _free_axes_on_the_left(node: Node) -> int:
    (contracted, _), _ = node.params["dimension_numbers"]
    return node.inputs[0].ndim - len(contracted)
