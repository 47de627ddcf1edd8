"""Weight gradients by themselves: of every sample or group, which `vmap` makes of one, and where nothing computes the convolution's
value, as at the end of what `jax.checkpoint` computes again.

JAX writes one as a convolution of x with the batch for its features by the cotangent as a filter, in as many groups as there
are samples. Whatever made it, each group is the weight gradient of a convolution, and that is what runs:

    dw[k] = Σ x[o·stride + k·dilation - low]·dy[o]    strides and dilation change places, and so do batch and features
"""

import jax
import jax.numpy as jnp

from jaxfuse.ops.batch_axes import merge, split
from jaxfuse.ops.conv.config import ConvConfig, Types, with_weight_gradient
from jaxfuse.ops.conv.conv import OP
from jaxfuse.ops.op import Linear
from jaxfuse.patterns.conv.forward import is_weight_gradient
from jaxfuse.patterns.kernel import require
from jaxfuse.program.autodiff import backward
from jaxfuse.program.graph import Emission, Graph, Node
from jaxfuse.program.site import Match, Refusal, Unfit


def anchors(graph: Graph):
    """A weight gradient sums over the batch where that is first. Else the gradient of an input may look the same."""
    back = backward(graph)
    return [n for n in graph.nodes if n.primitive == "conv_general_dilated"
            and is_weight_gradient(n, n.index in back and n.params["dimension_numbers"].lhs_spec[1] == 0)]


def match(graph: Graph, node: Node, claimed: set[int], unprofitable):
    """Yields a Match or a Refusal; nothing where a mesh divides what it reads, or where no convolution has such a gradient."""
    (x, dy), dw = node.inputs, node.out
    if len({v.dtype for v in (x, dy, dw)}) > 1 or not 3 <= x.ndim <= 5 or any(any(v.spec) for v in (x, dy, dw)):
        return
    try:
        if one := with_weight_gradient(node.params, x, dy, dw):
            yield _fused(node, *one, unprofitable)
    except Unfit as unfit:
        yield Refusal(_label(node), node, tuple(node.inputs), unfit.reason, "backward", (node,))


def _label(node: Node) -> str:
    return "conv per sample" if node.params["feature_group_count"] * node.params["batch_group_count"] > 1 else "conv"


def _fused(node: Node, config: ConvConfig, types: Types, unprofitable) -> Match:
    """Raises `Unfit` where no kernel takes one of them."""
    (x, dy), dw, count = node.inputs, node.out, node.params["feature_group_count"]
    linear = Linear(config, (False, True), types[:2], 2)
    require(OP.backward, linear, types, unprofitable, OP.name, config, types[:2], "backward")
    x_axis, dy_axis, dw_axis = config.lhs_spec[0], config.out_spec[1], config.rhs_spec[0]

    def one(x, dy):
        filters = jnp.zeros(types[1].shape, types[1].dtype)  # their gradient depends on their shape only
        return OP.backward(linear, x, filters, dy)[0]

    def run(read):
        many = jax.vmap(one, (x_axis, dy_axis), axis_size=count)
        yield dw, merge(many(split(read(x), x_axis, count), split(read(dy), dy_axis, count)), 0, dw_axis, count)

    return Match(_label(node), node, (node,), (Emission((x, dy), (dw,), run),), (x, dy), 0, "backward")
