"""conv in int8, as `jaxfuse.freeze` has it: products of bytes, whose sums are exact integers and the same on every processor.

    x = step·(q - zero)      q in 0..255, one step for all of x; 0 is a q, so that padding is exact
    w[n] = scale[n]·v[n]     v in -127..127, a scale for each output feature
    y = act(step·scale[n]·(Σ q·v + offset[n]) + bias + residual)
    offset[n] = -zero·Σ v - Σ (v - w/scale[n])·mean/step

The second part of the offset is what rounding the filter adds to the sum on average: inputs behind a relu are positive, and their mean is
much of them (bias correction: Nagel and others, arXiv 1906.04721).

The filter lies in the panels of packed.py, four of its input features to a step. A processor with VNNI adds their products in 32 bits.
Others add those of two features in 16 bits, and of two steps: four v, of which the positive ones, times 255, must fit, and the negative
ones. So there the filter is `narrow`: scale[n] is so large that neither are more than 128 in all (255·128 = 32640). A NaN of x counts as
0 and an infinity as the end of the range: int8 has neither.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfuse.ops.arrays import beside
from jaxfuse.ops.conv.config import ConvConfig
from jaxfuse.ops.conv.conv import OP as CONV, forward_attrs
from jaxfuse.ops.conv.packed import PANEL, PackedConfig, op_by_packed, overwritten, panels, refuse_layout, unpack
from jaxfuse.ops.stage import widened
from jaxfuse.runtime import ffi
from jaxfuse.runtime.settings import ours

LARGEST = 255  # q
MOST, MOST_OF_FOUR = 127, 128  # v; those of one sign that are added in 16 bits
MOST_PRODUCTS = 1 << 16  # of a sum: 255·127·2¹⁶ is less than 2³¹


class Range(NamedTuple):
    """Which numbers 0..255 stand for."""

    step: float
    zero: int

    @classmethod
    def of(cls, low: float, high: float) -> "Range":
        """That of numbers from `low` to `high`; 0 is among them."""
        low, high = min(low, 0.0), max(high, 0.0)
        step = float(np.float32((high - low) / LARGEST))
        if step < np.finfo(np.float32).tiny:  # all of them are 0, or flushed to it
            return cls(1.0, 0)
        return cls(step, min(LARGEST, round(-low / step)))


@dataclasses.dataclass(frozen=True)
class Int8Config:
    """`filter`: the convolution and the shape of its filter; `range`: of x; `narrow`: four products may be added in 16 bits."""

    filter: PackedConfig
    range: Range
    narrow: bool
    in_place: bool = False  # as of a packed filter
    residual_outs: int = 0

    @property
    def conv(self) -> ConvConfig:
        return self.filter.conv

    @property
    def scaled(self) -> ConvConfig:
        """The convolution of q and v."""
        return dataclasses.replace(self.conv, has_scale=True)


def config_of(config: ConvConfig, shape: tuple[int, ...], range_: Range, narrow: bool) -> Int8Config:
    """That of a convolution by a filter of this shape."""
    return Int8Config(PackedConfig(config, shape, "int8"), range_, narrow)


def refuse(config: ConvConfig, x, w) -> str | None:
    """Why a convolution of these types cannot be int8."""
    if reason := refuse_layout(config, x, w):
        return reason
    if config.has_scale or config.out_dtype:
        return "a scale that is no constant, or a result of another dtype than x's"
    asked = config.precision if isinstance(config.precision, tuple) else (config.precision,)
    if not {*asked} <= {None, lax.Precision.DEFAULT}:
        return f"precision {config.precision} is asked for"
    products = math.prod(w.shape) // w.shape[config.rhs_spec[0]]
    return f"sums of {products} products, at most {MOST_PRODUCTS} fit into 32 bits" if products > MOST_PRODUCTS else None


@ours
def pack(config: Int8Config, w, mean: Sequence[float] = (0.0,)) -> list[jax.Array]:
    """The filter in its panels, uint8 of one axis; for each feature the float32 step·scale and the int32 offset. `mean` is that of each
    input feature, or of all."""
    spec, p = config.conv.rhs_spec, panels(config.filter)
    taps = np.transpose(np.asarray(w).astype(np.float64), (*spec[2:], spec[1], spec[0])).reshape(p.taps, p.inner, p.features)
    steps = np.zeros((p.taps, p.steps * p.per_step, -(-p.features // PANEL) * PANEL))
    steps[:, : p.inner, : p.features] = taps
    with np.errstate(all="ignore"):  # what is not finite has an error that is not
        scale = _scale(config, steps)
        exact = steps / scale
        v = np.rint(exact).astype(np.int8)
        means = np.tile(mean, p.inner // len(mean))  # a step may have inputs of several taps
        added = means @ (v - exact)[:, : p.inner].sum(0) / config.range.step
        added = np.where(np.isfinite(added), added, 0)
    lines = v.reshape(p.taps, p.steps, p.per_step, -1, PANEL).transpose(3, 0, 1, 4, 2)  # panels, taps, steps, features, elements
    offset = -config.range.zero * v.sum((0, 1), dtype=np.int64) - np.rint(added).astype(np.int64)
    scale, offset = (config.range.step * scale)[: p.features], offset[: p.features]
    arrays = lines.copy().view(np.uint8).reshape(-1), scale.astype(np.float32), offset.astype(np.int32)
    return list(map(jax.device_put, arrays))


def _scale(config: Int8Config, steps: np.ndarray) -> np.ndarray:
    """That of each feature of such steps (taps, inputs, features)."""
    largest = np.abs(steps).max((0, 1))
    scale = np.where(largest > 0, largest, 1) / MOST
    if not config.narrow:
        return scale
    scale = np.maximum(scale, _most_of_four(steps) / MOST_OF_FOUR)
    while (over := _most_of_four(np.rint(steps / scale)) / MOST_OF_FOUR).max(where=np.isfinite(over), initial=0) > 1:  # rounded up
        scale *= np.maximum(over, 1)
    return scale


def _most_of_four(steps: np.ndarray) -> np.ndarray:
    """The largest sum of one sign of four that are added in 16 bits, of each feature: two neighbours in one step, and those in the next."""
    pairs = steps.reshape(len(steps), -1, 2, 2, steps.shape[-1])  # taps, steps, halves of a step, neighbours, features
    sums = [np.pad(np.maximum(sign * pairs, 0).sum(3), ((0, 0), (0, 1), (0, 0), (0, 0))) for sign in (1, -1)]
    return np.max([(one[:, :-1] + one[:, 1:]).max((0, 1, 2)) for one in sums], 0)


def centered(config: Int8Config, x):
    """q - zero, int32."""
    step, zero = config.range
    v = x.astype(jnp.float32) * (np.float32(1) / np.float32(step))
    v = jnp.clip(jnp.where(jnp.isnan(v), 0, v), -zero, LARGEST - zero)
    return lax.round(v, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)


def sums(config: ConvConfig, q, v):
    """Those of the products, int32."""
    dn = lax.ConvDimensionNumbers(config.lhs_spec, config.rhs_spec, config.out_spec)
    return lax.conv_general_dilated(q, v, config.window_strides, config.padding, rhs_dilation=config.rhs_dilation, dimension_numbers=dn)


def _correction(config: Int8Config, v, offset):
    """The offset's second part, int32."""
    return offset + config.range.zero * v.sum([d for d in range(v.ndim) if d != config.conv.rhs_spec[0]])


def _reference(config: Int8Config, *args):
    x, packed, scale, offset, *rest = args
    v = unpack(config.filter, packed).astype(jnp.int32)

    def convolve(conv, q, v):
        found = sums(conv, q, v)
        return (found + beside(found, conv.out_spec[1], _correction(config, v, offset))).astype(jnp.float32)

    (y,) = CONV.forward.reference(config.scaled, centered(config, x), v, scale, *rest, convolve=convolve)
    return (y.astype(x.dtype),)


def _straight_through(config: Int8Config, *args):
    """The same value by ops that are differentiable. The derivative is that of the convolution by the rounded filter; rounding x
    counts as nothing done to it (Bengio and others, arXiv 1308.3432)."""
    x, packed, scale, offset, *rest = args
    v = unpack(config.filter, packed)
    w = v * beside(v, config.conv.rhs_spec[0], scale / config.range.step)
    shift = scale * _correction(config, v.astype(jnp.int32), offset)
    bias, rest = (rest[0], rest[1:]) if config.conv.has_bias else (jnp.zeros((), x.dtype), rest)
    rounded = (centered(config, x) * np.float32(config.range.step)).astype(x.dtype)
    shifted = dataclasses.replace(config.conv, has_bias=True)
    return tuple(CONV(shifted, x + lax.stop_gradient(rounded - x), w.astype(x.dtype), (bias + shift).astype(x.dtype), *rest))


def _refuse(config: Int8Config, args) -> str | None:
    x = args[0]
    empty = f"empty array of shape {x.shape}" if 0 in x.shape else None
    return empty or refuse(config.conv, x, jax.ShapeDtypeStruct(config.filter.shape, x.dtype)) or ffi.unavailable("jaxfuse_conv_int8")


def _run(config: Int8Config, args, mesh_axes):
    x, packed, scale, offset, *rest = widened(args)
    y = jax.eval_shape(functools.partial(_reference, config), *args)[0]
    made = jax.ShapeDtypeStruct(y.shape, x.dtype)
    most = MOST_OF_FOUR // 4 if config.narrow else MOST  # in the mean of four
    attrs = forward_attrs(config.scaled) | config.range._asdict() | dict(filter_shape=config.filter.shape, most=most)
    operands = (x, packed, offset, scale, *rest)
    (out,) = ffi.call("jaxfuse_conv_int8", [made], *operands, overwritten=overwritten(config.in_place, operands, made), **attrs)
    return (out.astype(y.dtype),)


OP = op_by_packed("conv_int8", _reference, _straight_through, _refuse, _run, lambda config: (None, None))
