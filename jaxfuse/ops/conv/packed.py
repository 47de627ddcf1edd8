"""conv by a filter that was packed beforehand, as `jaxfuse.freeze` has it: in the order in which the kernel's tiles read it.

A packed filter is bytes: panels of 16 output features, each with its taps, each with its steps, as xla_ext/contraction.h has them; the
same on every instruction set. For 3×3 filters at stride 1 there may be a second one: transformed by Winograd's F(2×2, 3×3).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfuse.ops.batch_axes import BatchAxes
from jaxfuse.ops.conv.config import ConvConfig
from jaxfuse.ops.conv.conv import OP as CONV, forward_attrs
from jaxfuse.ops.op import FusedOp
from jaxfuse.ops.stage import FLOATS, Kernel, widened
from jaxfuse.runtime import ffi
from jaxfuse.runtime.settings import ours

PANEL, STEP_BYTES = 16, 4  # features of a panel; bytes of a step: a number of float32, two neighbours of bfloat16, four of int8
FEW_CHANNELS = 16  # below it the taps of a line are packed as one, whose channels are those of all of them
WINOGRAD = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])  # G of Lavin and Gray (2015); filters become G·g·Gᵀ


@dataclasses.dataclass(frozen=True)
class PackedConfig:
    """`conv`, and what the packed filter was: its shape, and the dtype that is multiplied."""

    conv: ConvConfig
    shape: tuple[int, ...]
    dtype: str  # float32, bfloat16; int8 is int8.py's
    winograd: bool = False
    gated: bool = False  # x is multiplied by a factor of each channel of each image, (images, channels), an argument behind the filter
    in_place: bool = False  # y may take the residual's place: nothing reads that afterwards
    residual_outs: int = 0

    def plain(self, args) -> tuple:
        """The arguments of `CONV`: with the filter unpacked."""
        x, packed, *rest = args
        rest = rest[self.winograd :]
        if self.gated:
            factors, *rest = rest
            x = x * factors.astype(x.dtype).reshape(x.shape[0], *[1] * (x.ndim - 2), -1)
        return x, unpack(self, packed).astype(x.dtype), *rest


class Packed(NamedTuple):
    """How a filter lies in its panels."""

    taps: int
    inner: int
    features: int
    per_step: int

    @property
    def steps(self) -> int:
        return math.ceil(self.inner / self.per_step)

    @property
    def bytes(self) -> int:
        return math.ceil(self.features / PANEL) * self.taps * self.steps * PANEL * STEP_BYTES


def panels(config: PackedConfig) -> Packed:
    spec, shape = config.conv.rhs_spec, config.shape
    taps, inner, features = math.prod(shape[d] for d in spec[2:]), shape[spec[1]], shape[spec[0]]
    line = shape[spec[-1]]
    if _merges_lines(config):
        taps, inner = taps // line, inner * line
    return Packed(taps, inner, features, STEP_BYTES // jnp.dtype(config.dtype).itemsize)


def _merges_lines(config: PackedConfig) -> bool:
    spec, shape = config.conv.rhs_spec, config.shape
    beside = spec[-1] + 1 == spec[1]  # [..., taps, channels, ...], as conv_merged_lines.cc has it
    return beside and shape[spec[1]] < FEW_CHANNELS and shape[spec[-1]] > 1 and config.conv.rhs_dilation[-1] == 1


def config_of(config: ConvConfig, x, w, winograd: bool = False) -> PackedConfig:
    """That of a convolution whose filter is packed; `winograd`: transformed too, and the products are those of F(2×2, 3×3)."""
    return PackedConfig(config, tuple(w.shape), "bfloat16" if x.dtype == jnp.bfloat16 else "float32", winograd)


def fits_winograd(config: ConvConfig, x, w) -> bool:
    steps = {*config.window_strides, *config.rhs_dilation, *config.lhs_dilation, config.feature_group_count}
    return x.dtype != jnp.bfloat16 and not config.out_dtype and [w.shape[d] for d in config.rhs_spec[2:]] == [3, 3] and steps == {1}


@ours
def pack(config: PackedConfig, w: jax.Array) -> list[jax.Array]:
    """The packed filter, and with `winograd` the transformed one: uint8 arrays of one axis."""
    w = w.astype(config.dtype)
    found = [_packed(config, w)]
    if config.winograd:
        spec = config.conv.rhs_spec
        taps = np.transpose(np.asarray(w, np.float64), (*spec[2:], spec[1], spec[0]))
        transformed = jax.device_put(np.einsum("ai,bj,ijcf->abcf", WINOGRAD, WINOGRAD, taps).astype(np.float32))
        found.append(_packed(dataclasses.replace(config, shape=transformed.shape, conv=_of_transformed(config.conv)), transformed))
    return found


def _of_transformed(config: ConvConfig) -> ConvConfig:
    return dataclasses.replace(config, rhs_spec=(3, 2, 0, 1))


def _packed(config: PackedConfig, w) -> jax.Array:
    out = jax.ShapeDtypeStruct((panels(config).bytes,), jnp.uint8)
    return jax.jit(lambda w: ffi.call("jaxfuse_conv_pack", out, w, **config.conv.geometry_attrs()))(w)


def unpack(config: PackedConfig, packed):
    """The filter itself, in plain JAX."""
    p, spec = panels(config), config.conv.rhs_spec
    dtype = jnp.dtype(config.dtype)
    shape = (-1, p.taps, p.steps, PANEL, p.per_step)
    steps = lax.bitcast_convert_type(packed.reshape(*shape, dtype.itemsize), dtype).reshape(shape)
    lines = steps.transpose(1, 2, 4, 0, 3)  # taps, steps, elements of a step, panels, features
    w = lines.reshape(p.taps, p.steps * p.per_step, -1)[:, : p.inner, : p.features]
    in_order = w.reshape(*(config.shape[d] for d in (*spec[2:], spec[1], spec[0])))
    return in_order.transpose(np.argsort((*spec[2:], spec[1], spec[0])))


def refuse(config: ConvConfig, x, w) -> str | None:
    """Why a convolution of these types cannot have a packed filter here."""
    return refuse_layout(config, x, w) or ffi.unavailable("jaxfuse_conv_pack") or ffi.unavailable("jaxfuse_conv_packed")


def refuse_layout(config: ConvConfig, x, w) -> str | None:
    """The same of the convolution alone."""
    if config.transposed or config.feature_group_count != 1 or config.residual_outs or config.rounds_filter:
        return "a filter is not packed for a transposed or grouped convolution, for one that saves for autodiff or rounds its filter"
    if min(map(min, config.padding)) < 0:
        return f"negative padding {config.padding}"
    last = (0, len(x.shape) - 1, *range(1, len(x.shape) - 1))
    if (config.lhs_spec, config.out_spec) != (last, last):
        return f"axes {config.lhs_spec} -> {config.out_spec}: a packed filter is for channels last"
    if not {str(x.dtype), str(w.dtype)} <= set(FLOATS) or 0 in w.shape:
        return f"dtypes {x.dtype}, {w.dtype}, filter of shape {w.shape}"
    return None


def _refuse(config: PackedConfig, args: Sequence) -> str | None:
    x = args[0]
    empty = f"empty array of shape {x.shape}" if 0 in x.shape else None
    return empty or refuse(config.conv, x, jax.ShapeDtypeStruct(config.shape, config.dtype))


def _reference(config: PackedConfig, *args):
    return CONV.forward.reference(config.conv, *config.plain(args))


def _by_plain_filter(config: PackedConfig, *args):
    return tuple(CONV(config.conv, *config.plain(args)))


def _run(config: PackedConfig, args, mesh_axes):
    x, packed, *rest = widened(args)
    between = config.winograd + config.gated  # the filter and the rest
    plain = x, jax.ShapeDtypeStruct(config.shape, x.dtype), *rest[between:]
    y = jax.eval_shape(functools.partial(CONV.forward.reference, config.conv), *plain)[0]
    rest = [a.astype(jnp.float32) if config.conv.has_scale and i == between or config.gated and i == between - 1 else a
            for i, a in enumerate(rest)]
    attrs = forward_attrs(config.conv) | dict(filter_shape=config.shape, winograd=config.winograd)
    target = "jaxfuse_conv_gated" if config.gated else "jaxfuse_conv_packed"
    # By Winograd's algorithm y may be written twice: it is found to be not finite once it is there.
    over = overwritten(config.in_place and not config.winograd, (x, packed, *rest), y)
    (out,) = ffi.call(target, [jax.ShapeDtypeStruct(y.shape, y.dtype)], x, packed, *rest, overwritten=over, **attrs)
    return (out.astype(config.conv.out_dtype or args[0].dtype),)


def overwritten(in_place: bool, operands: Sequence, y) -> int | None:
    """Which operand y is written over: the residual, which is the last, where it is like y; None where it is not, or not `in_place`."""
    return len(operands) - 1 if in_place and (operands[-1].shape, operands[-1].dtype) == (y.shape, y.dtype) else None


def _never(*_: Any) -> Any:
    raise AssertionError("by a filter in another form a convolution is decomposed before it is differentiated")


def op_by_packed(name: str, reference: Callable, decomposed: Callable, refuse: Callable, run: Callable,
                 more: Callable[[Any], Sequence[int | None]]) -> FusedOp:
    """A convolution by a filter in another form: the arrays behind the one in the filter's place, of which `more(config)` are the batch
    axes, belong to it or to x. Its derivatives are those of what `decomposed` computes."""

    def axes(config, ranks) -> BatchAxes:
        plain = CONV.forward.batch_axes(config.conv, ranks)
        x, w, *rest = plain.inputs
        return BatchAxes((x, w, *more(config), *rest), plain.outputs)

    return FusedOp(
        name,
        reference=reference,
        residuals=_never,
        tangent=_never,
        for_autodiff=lambda config: config,
        decomposed=lambda config: functools.partial(decomposed, config),
        forward_kernels=(Kernel(None, refuse, run),),
        backward_kernels=(),
        forward_axes=axes,
        backward_axes=_never,
    )


def _more_axes(config: PackedConfig) -> Sequence[int | None]:
    return [*[None] * config.winograd, *[0] * config.gated]


OP = op_by_packed("conv_packed", _reference, _by_plain_filter, _refuse, _run, _more_axes)
