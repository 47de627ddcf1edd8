"""Weight gradients of every sample by itself, or of every group: what `vmap` makes of the weight gradient of a convolution.

JAX writes it as one convolution in as many groups as there are samples, of x with the batch for its features by the cotangent
as a filter. Whatever made it, each group is the weight gradient of a convolution, and that is what runs:

    dw[k] = Σ x[o·stride + k·dilation - low]·dy[o]    strides and dilation change places, and so do batch and features
"""

import functools
from typing import NamedTuple

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

PATTERN = "conv per sample"


class Samples(NamedTuple):
    """`number` convolutions of one `config`, side by side in their weight gradients; the types are those of one. Groups of the
    batch are groups of one convolution's features: then it is one."""

    number: int
    config: ConvConfig
    x: jax.ShapeDtypeStruct
    w: jax.ShapeDtypeStruct
    dy: jax.ShapeDtypeStruct


def anchors(graph: Graph):
    back = backward(graph)
    return [node for node in graph.nodes if node.primitive == "conv_general_dilated" and _is_grouped(node)
            and is_weight_gradient(node, node.index in back and _sums_over_first(node))]


def _is_grouped(node: Node) -> bool:
    return node.params["feature_group_count"] * node.params["batch_group_count"] > 1


def _sums_over_first(node: Node) -> bool:
    """As a weight gradient does where the batch is first. Else the gradient of an input may look the same."""
    return node.params["dimension_numbers"].lhs_spec[1] == 0


def match(graph: Graph, node: Node, claimed: set[int], unprofitable):
    """Yields a Match or a Refusal."""
    samples = _samples(node)
    if samples is None:
        return
    try:
        yield _fused(node, samples, unprofitable)
    except Unfit as unfit:
        yield Refusal(PATTERN, node, tuple(node.inputs), unfit.reason, "backward", (node,))


def _samples(node: Node) -> Samples | None:
    """The convolutions that this one has the gradients of; None where there are none, or where a mesh divides what they read."""
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
    types = (_one_of(count, v, axis) for v, axis in ((x, lhs[0]), (w, rhs[0]), (dy, out[1])))
    samples = Samples(count, config, *types)
    made = jax.eval_shape(functools.partial(convolve, config), samples.x, samples.w)
    return samples if made.shape == samples.dy.shape else None


def _padding_behind(length: int, window: int, positions: int, stride: int) -> int:
    """What makes so many positions of the window: none at all, where that is among the possible ones."""
    least = (positions - 1) * stride + window - length
    return max(least, min(0, least + stride - 1))


def _one_of(count: int, value, axis: int) -> jax.ShapeDtypeStruct:
    shape = list(value.shape)
    shape[axis] //= count
    return jax.ShapeDtypeStruct(shape, value.dtype)


def _fused(node: Node, samples: Samples, unprofitable) -> Match:
    """Raises `Unfit` where no kernel takes one of them."""
    (x, dy), dw = node.inputs, node.out
    count, config = samples.number, samples.config
    linear = Linear(config, (False, True), (samples.x, samples.w), 2)
    require(OP.backward, linear, (samples.x, samples.w, samples.dy), unprofitable, "conv", config, (samples.x, samples.w), "backward")
    x_axis, dy_axis, dw_axis = config.lhs_spec[0], config.out_spec[1], config.rhs_spec[0]

    def one(x, dy):
        filters = jnp.zeros(samples.w.shape, samples.w.dtype)  # their gradient depends on their shape only
        return OP.backward(linear, x, filters, dy)[0]

    def run(read):
        many = jax.vmap(one, (x_axis, dy_axis), axis_size=count)
        yield dw, merge(many(split(read(x), x_axis, count), split(read(dy), dy_axis, count)), 0, dw_axis, count)

    emission = Emission((x, dy), (dw,), run)
    return Match(PATTERN, node, (node,), (emission,), (x, dy), 0, "backward")
