"""Weight gradients by themselves: of every sample or group, which `vmap` makes of one, and where nothing computes the convolution's
value, as at the end of what `jax.checkpoint` computes again.

JAX writes one as a convolution of x with the batch for its features by the cotangent as a filter, in as many groups as there
are samples. Whatever made it, each group is the weight gradient of a convolution, and that is what runs:

    dw[k] = Σ x[o·stride + k·dilation - low]·dy[o]    strides and dilation change places, and so do batch and features
"""

import functools

import jax
import jax.numpy as jnp

from jaxfuse.ops.batch_axes import merge, split
from jaxfuse.ops.conv.config import convolve
from jaxfuse.ops.conv.conv import OP, ConvConfig
from jaxfuse.ops.op import Linear
from jaxfuse.patterns.conv.forward import is_weight_gradient
from jaxfuse.patterns.kernel import require
from jaxfuse.program.autodiff import backward
from jaxfuse.program.graph import Emission, Graph, Node
from jaxfuse.program.site import Match, Refusal, Unfit

Types = tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]


def anchors(graph: Graph):
    back = backward(graph)

    def is_one(node: Node) -> bool:
        """A weight gradient sums over the batch where that is first. Else the gradient of an input may look the same."""
        sums_over_first = node.params["dimension_numbers"].lhs_spec[1] == 0
        return is_weight_gradient(node, node.index in back and sums_over_first)

    return [node for node in graph.nodes if node.primitive == "conv_general_dilated" and is_one(node)]


def match(graph: Graph, node: Node, claimed: set[int], unprofitable):
    """Yields a Match or a Refusal; nothing where a mesh divides what it reads, or where no convolution has such a gradient."""
    one = _one(node)
    try:
        if one:
            yield _fused(node, *one, unprofitable)
    except Unfit as unfit:
        yield Refusal(_label(node), node, tuple(node.inputs), unfit.reason, "backward", (node,))


def _label(node: Node) -> str:
    return "conv per sample" if node.params["feature_group_count"] * node.params["batch_group_count"] > 1 else "conv"


def _one(node: Node) -> tuple[ConvConfig, Types] | None:
    """The config of one of the convolutions that stand side by side in their weight gradients, and the types of its x, its w and its
    cotangent. There are as many as groups of features; groups of the batch are groups of one convolution's features."""
    params, count = node.params, node.params["feature_group_count"]
    dn, (x, dy), w = params["dimension_numbers"], node.inputs, node.out
    if len({v.dtype for v in (x, dy, w)}) > 1 or not 3 <= x.ndim <= 5 or any(any(v.spec) for v in (x, dy, w)):
        return None
    lhs, rhs, out = ((spec[1], spec[0], *spec[2:]) for spec in (dn.lhs_spec, dn.out_spec, dn.rhs_spec))
    strides, dilation = tuple(params["rhs_dilation"]), tuple(params["window_strides"])
    lhs_dilation = tuple(params["lhs_dilation"])
    lengths = zip([x.shape[d] for d in lhs[2:]], [w.shape[d] for d in rhs[2:]], [dy.shape[d] for d in out[2:]])
    padding = tuple(
        (low, _padding_behind((in_ - 1) * apart + 1 + low, (k - 1) * r + 1, o, stride))
        for (low, _), apart, r, stride, (in_, k, o) in zip(params["padding"], lhs_dilation, dilation, strides, lengths))
    config = ConvConfig(strides, padding, dilation, params["batch_group_count"], lhs, rhs, out, lhs_dilation, precision=params["precision"])
    types = _one_of(count, x, lhs[0]), _one_of(count, w, rhs[0]), _one_of(count, dy, out[1])
    made = jax.eval_shape(functools.partial(convolve, config), *types[:2])
    return (config, types) if made.shape == types[2].shape else None


def _padding_behind(length: int, window: int, positions: int, stride: int) -> int:
    """What makes so many positions of the window: none at all, where that is among the possible ones."""
    least = (positions - 1) * stride + window - length
    return max(least, min(0, least + stride - 1))


def _one_of(count: int, value, axis: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct([n // count if d == axis else n for d, n in enumerate(value.shape)], value.dtype)


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
