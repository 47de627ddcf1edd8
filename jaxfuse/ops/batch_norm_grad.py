"""The two passes of batch norm's gradient, for programs in which autodiff has already run: what the per-channel
arithmetic between them is, the program itself says.

    sums    g = dy·act'(z);  Σg, Σg·(x - mean)       per channel
    dx      a·g + b·(x - mean) + c, and g            per channel a, b, c

act' is told by a mask of bits, as `batch_norm` saves them, or by z = (x - center)·scale + offset [+ residual].

An op that is differentiated by itself (`batch_norm.py`) computes the same passes inside its backward stage.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse import ffi
from jaxfuse.op import BatchAxes, Kernel, Stage
from jaxfuse.ops.activations import TABLE as ACTIVATIONS
from jaxfuse.ops.batch_norm import refuse_array


@dataclasses.dataclass(frozen=True)
class GradientConfig:
    """axis: of the channels; wants_g: `dx` also returns g. The last arguments are those of the derivative: none, the mask
    if `masked`, or else, of an activation that is not "none", center, scale, offset and, if `has_residual`, the residual."""

    axis: int
    masked: bool = False
    wants_g: bool = False
    activation: str = "none"
    alpha: float = 0.0
    has_residual: bool = False

    @property
    def attrs(self):
        recomputed = "none" if self.activation == "none" else "recompute"
        return dict(activation="relu" if self.masked else self.activation, deriv="mask" if self.masked else recomputed,
                    alpha=np.float32(self.alpha), has_residual=self.has_residual)


def _wide_g(config: GradientConfig, dy, x, told):
    """g, at least float32."""
    wide = jnp.promote_types(dy.dtype, jnp.float32)
    if config.masked and dy.size:
        bits = jnp.unpackbits(told[0], axis=-1, count=x.shape[config.axis], bitorder="little")
        channels_last = jnp.moveaxis(x, config.axis, -1).shape
        dy = jnp.where(jnp.moveaxis(bits.reshape(channels_last), -1, config.axis), dy, 0)
    elif told and not config.masked:
        center, scale, offset = (_beside(config, x, v) for v in told[:3])
        z = sum(told[3:], (x.astype(wide) - center) * scale + offset)
        return ACTIVATIONS[config.activation].slope_times(z, dy.astype(wide), config.alpha)
    return dy.astype(wide)


def _beside(config: GradientConfig, x, vector):
    return jnp.expand_dims(vector, [d for d in range(x.ndim) if d != config.axis])


def _sums_reference(config: GradientConfig, dy, x, mean, *told):
    g = _wide_g(config, dy, x, told)
    axes = [d for d in range(x.ndim) if d != config.axis]
    return g.sum(axes), (g * (x.astype(g.dtype) - _beside(config, x, mean))).sum(axes)


def _dx_reference(config: GradientConfig, dy, x, mean, a, b, c, *told):
    g = _wide_g(config, dy, x, told)
    mean, a, b, c = (_beside(config, x, v) for v in (mean, a, b, c))
    dx = a * g + b * (x.astype(g.dtype) - mean) + c
    return (dx.astype(x.dtype), *[g.astype(dy.dtype)] * config.wants_g)


def _batch_axis(config: GradientConfig) -> int:
    return 1 if config.axis == 0 else 0


def _told_axes(config: GradientConfig):
    if config.masked:
        return (0,)
    return (*[None] * (3 * (config.activation != "none")), *[_batch_axis(config)] * config.has_residual)


def _sums_axes(config: GradientConfig, ranks) -> BatchAxes:
    n = _batch_axis(config)
    return BatchAxes((n, n, None, *_told_axes(config)), (None, None))


def _dx_axes(config: GradientConfig, ranks) -> BatchAxes:
    n = _batch_axis(config)
    return BatchAxes((n, n, *[None] * 4, *_told_axes(config)), (n,) * (1 + config.wants_g))


def _refuse(target: str):
    def refuse(config: GradientConfig, args) -> str | None:
        dy, x, *_ = args
        if dy.dtype != x.dtype:
            return f"cotangent {dy.dtype} of {x.dtype} values: the kernel takes one dtype"
        return refuse_array(x, config.axis) or ffi.unavailable(target)

    return refuse


def _run_sums(config: GradientConfig, args, mesh_axes):
    vector = jax.ShapeDtypeStruct((args[1].shape[-1],), np.float32)
    sums = ffi.call("jaxfuse_batch_norm_bwd_stats", [vector] * 2, *args, **config.attrs)
    return tuple(jax.lax.psum(sums, mesh_axes)) if mesh_axes else tuple(sums)


def _run_dx(config: GradientConfig, args, mesh_axes):
    like_x = jax.ShapeDtypeStruct(args[1].shape, args[1].dtype)
    outs = [like_x] * (1 + config.wants_g)
    return tuple(ffi.call("jaxfuse_batch_norm_bwd_apply", outs, *args, want_dresidual=config.wants_g, **config.attrs))


SUMS = Stage("jaxfuse_batch_norm_gradient_sums", _sums_reference,
             (Kernel("native", _refuse("jaxfuse_batch_norm_bwd_stats"), _run_sums),), _sums_axes)
DX = Stage("jaxfuse_batch_norm_gradient_dx", _dx_reference,
           (Kernel("native", _refuse("jaxfuse_batch_norm_bwd_apply"), _run_dx),), _dx_axes)
