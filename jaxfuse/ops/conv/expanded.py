"""A depthwise convolution of a 1×1 convolution by a packed filter, each with a bias and an activation: the first half of an inverted
residual (Sandler et al., arXiv 1801.04381). As one op the expanded image, the largest array of such a network, is never in memory whole.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxfuse.ops.conv import packed
from jaxfuse.ops.conv.config import ConvConfig
from jaxfuse.ops.conv.conv import OP as CONV
from jaxfuse.ops.stage import FLOATS, widened
from jaxfuse.runtime import ffi


@dataclasses.dataclass(frozen=True)
class ExpandedConfig:
    """The arguments are x, the expansion's packed filter and its bias if it has one, the depthwise filter and its bias."""

    expansion: packed.PackedConfig
    conv: ConvConfig  # the depthwise one

    def parts(self, args: Sequence) -> tuple[tuple, tuple]:
        """The arguments of the expansion, and those of the depthwise convolution behind what it reads."""
        own = 2 + self.expansion.conv.has_bias
        return tuple(args[:own]), tuple(args[own:])


def refuse_configs(expansion: ConvConfig, conv: ConvConfig, w) -> str | None:
    """Why a convolution of what another gives, by a filter like w, is not computed with it."""
    steps = {*expansion.window_strides, *expansion.rhs_dilation}
    if len(conv.window_strides) != 2 or steps != {1} or any(map(any, expansion.padding)):
        return f"strides {expansion.window_strides}, padding {expansion.padding}: expected one product for each pixel of an image"
    last = (0, 3, 1, 2)
    features = w.shape[conv.rhs_spec[0]]
    if not conv.feature_group_count == features > 1 or conv.transposed or (conv.lhs_spec, conv.out_spec) != (last, last):
        return f"{conv.feature_group_count} groups of {features} features, axes {conv.lhs_spec}: expected a depthwise one, channels last"
    if min(map(min, conv.padding)) < 0:
        return f"negative padding {conv.padding}"
    for config in (expansion, conv):
        if config.has_scale or config.has_residual or config.residual_outs or config.out_dtype or config.rounds_filter:
            return "one has a scale, a residual or another dtype, or saves for autodiff: expected a bias and an activation"
    return ffi.unavailable("jaxfuse_conv_expanded")


def _refuse(config: ExpandedConfig, args: Sequence) -> str | None:
    (x, *_), (w, *_) = config.parts(args)
    if 0 in x.shape or 0 in w.shape:
        return f"empty array of shape {x.shape} or {w.shape}"
    if wrong := [a for a in args[2:] if str(a.dtype) not in FLOATS]:
        return f"operands of dtype {wrong[0].dtype}"
    return refuse_configs(config.expansion.conv, config.conv, w)


def _reference(config: ExpandedConfig, *args):
    own, rest = config.parts(args)
    (expanded,) = packed.OP.forward.reference(config.expansion, *own)
    return CONV.forward.reference(config.conv, expanded, *rest)


def _decomposed(config: ExpandedConfig, *args):
    own, rest = config.parts(args)
    (expanded,) = packed.OP(config.expansion, *own)
    return tuple(CONV(config.conv, expanded, *rest))


def _run(config: ExpandedConfig, args, mesh_axes):
    given = widened(args)
    x = given[0]
    unfused = [jax.ShapeDtypeStruct(a.shape, x.dtype if a.dtype != jnp.uint8 else a.dtype) for a in given]
    y = jax.eval_shape(functools.partial(_reference, config), *unfused)[0]
    own, expansion = config.conv, config.expansion.conv
    attrs = own.geometry_attrs() | dict(has_bias=own.has_bias, expansion_has_bias=expansion.has_bias)
    attrs |= {f"expansion_{name}": value for name, value in expansion.activation.attributes().items()}
    (out,) = ffi.call("jaxfuse_conv_expanded", [jax.ShapeDtypeStruct(y.shape, y.dtype)], *given, **attrs)
    return (out.astype(args[0].dtype),)


def _more_axes(config: ExpandedConfig) -> Sequence[int | None]:
    return [None] * (config.expansion.conv.has_bias + 1)


OP = packed.op_by_packed("conv_expanded", _reference, _decomposed, _refuse, _run, _more_axes)
