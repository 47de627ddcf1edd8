"""The two passes of batch norm's gradient, for programs in which autodiff has already run: what the per-channel
arithmetic between them is, the program itself says.

    sums    g = dy·act'(z);  Σg, Σg·(x - mean)       per channel
    dx      a·g + b·(x - mean) + c, and g            per channel a, b, c

act' is taken from a mask of bits, as `batch_norm` saves them, or from z = (x - center)·scale + offset [+ residual].

An op that is differentiated by itself (`batch_norm.py`) computes the same passes inside its backward stage: `by_kernels`,
or `by_xla` where there are none.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.ops.activations import NO_ACTIVATION, Activation, named
from jaxfuse.ops.arrays import beside, other_axes, wide
from jaxfuse.ops.batch_axes import BatchAxes, batch_axis
from jaxfuse.ops.stage import PLAIN, Kernel, Stage, refused_array
from jaxfuse.runtime import cuda, ffi


@dataclasses.dataclass(frozen=True)
class GradientConfig:
    """axis: of the channels; wants_g: `dx` also returns g. The last arguments are those of the derivative: none, the mask
    if `masked`, or else, of an activation, center, scale, offset and, if `has_residual`, the residual."""

    axis: int
    masked: bool = False
    wants_g: bool = False
    activation: Activation = NO_ACTIVATION
    has_residual: bool = False
    xla_fuses_neighbour: bool = False  # as in BatchNormConfig

    @property
    def attrs(self):
        recomputed = "none" if self.activation == NO_ACTIVATION else "recompute"
        activation = named("relu") if self.masked else self.activation
        return activation.attributes() | dict(deriv="mask" if self.masked else recomputed, has_residual=self.has_residual)


def through_activation(config: GradientConfig, dy, x, saved, times=Activation.cotangent):
    """dy·act'(z): in dy's dtype, or where z is computed again in at least float32."""
    if config.masked:
        if not dy.size:  # unpackbits takes no empty array
            return dy
        bits = jnp.unpackbits(saved[0], axis=-1, count=x.shape[config.axis], bitorder="little")
        channels_last = jnp.moveaxis(x, config.axis, -1).shape
        return jnp.where(jnp.moveaxis(bits.reshape(channels_last), -1, config.axis), dy, 0)
    if not saved:
        return dy
    dtype = jnp.promote_types(dy.dtype, jnp.float32)
    center, scale, offset = (beside(x, config.axis, v) for v in saved[:3])
    z = sum(saved[3:], (x.astype(dtype) - center) * scale + offset)
    return times(config.activation, z, dy.astype(dtype))


def _wide_g(config: GradientConfig, dy, x, saved):
    return wide(through_activation(config, dy, x, saved))


def _sums_reference(config: GradientConfig, dy, x, mean, *saved):
    g, axes = _wide_g(config, dy, x, saved), other_axes(x, config.axis)
    return g.sum(axes), (g * (x.astype(g.dtype) - beside(x, config.axis, mean))).sum(axes)


def _dx_reference(config: GradientConfig, dy, x, *vectors_and_saved):
    # g, of a residual, is the program's to compute where it adds to it; without the fence XLA would keep what it computes of
    # act'(z) for the sums, a byte for each element. dy and x stay outside: they may be computed here, of less than they are
    given = [_wide_g(config, dy, x, vectors_and_saved[4:]).astype(dy.dtype)] if config.wants_g else []
    mean, a, b, c, *saved = jax.lax.optimization_barrier(vectors_and_saved)
    g = _wide_g(config, dy, x, saved)
    dx = beside(x, config.axis, a) * g
    if b is not None:
        mean, b, c = (beside(x, config.axis, v) for v in (mean, b, c))
        dx = dx + b * (x.astype(g.dtype) - mean) + c
    return (dx.astype(x.dtype), *given)


def by_xla(config: GradientConfig, dy, x, mean, *saved):
    """Both passes as plain JAX: the sums, and a function of a, b, c that gives (dx, *g)."""
    mean, *saved = jax.lax.optimization_barrier((mean, *saved))  # else z of the forward pass may be kept
    return _sums_reference(config, dy, x, mean, *saved), lambda a, b, c: _dx_reference(config, dy, x, mean, a, b, c, *saved)


def by_kernels(library, mesh_axes, config: GradientConfig, dy, x, mean, *saved):
    """The same by native kernels, on a shard of the batch."""
    sums = _run_sums(library, config, (dy, x, mean, *saved), mesh_axes)
    return sums, lambda a, b, c: _run_dx(library, config, (dy, x, mean, a, b, c, *saved), mesh_axes)


def _saved_axes(config: GradientConfig) -> tuple[int | None, ...]:
    if config.masked:
        return (0,)
    coefficients = () if config.activation == NO_ACTIVATION else (None, None, None)
    residual = (batch_axis(config.axis),) if config.has_residual else ()
    return (*coefficients, *residual)


def _sums_axes(config: GradientConfig, ranks) -> BatchAxes:
    n = batch_axis(config.axis)
    return BatchAxes((n, n, None, *_saved_axes(config)), (None, None))


def _dx_axes(config: GradientConfig, ranks) -> BatchAxes:
    n = batch_axis(config.axis)
    return BatchAxes((n, n, *[None] * 4, *_saved_axes(config)), (n,) * (1 + config.wants_g))


def refuse_array(library, config, x) -> str | None:
    """Why the library's kernels do not take x; config: this file's or batch_norm's."""
    if library is cuda and config.xla_fuses_neighbour:
        return "XLA is to compute what is beside it along with it"
    if config.axis != len(x.shape) - 1:
        return f"channel axis {config.axis} of rank {len(x.shape)}: the kernel takes channels last"
    return refused_array(x)


def _refuse(target: str):
    def refuse(library, config: GradientConfig, args) -> str | None:
        dy, x, *_ = args
        if dy.dtype != x.dtype:
            return f"cotangent {dy.dtype} of {x.dtype} values: the kernel takes one dtype"
        return refuse_array(library, config, x) or library.unavailable(target)

    return refuse


def _run_sums(library, config: GradientConfig, args, mesh_axes):
    vector = jax.ShapeDtypeStruct((args[1].shape[-1],), np.float32)
    sums = library.call("jaxfuse_batch_norm_bwd_stats", [vector] * 2, *args, **config.attrs)
    return tuple(jax.lax.psum(sums, mesh_axes)) if mesh_axes else tuple(sums)


def _run_dx(library, config: GradientConfig, args, mesh_axes):
    like_x = jax.ShapeDtypeStruct(args[1].shape, args[1].dtype)
    outs = [like_x] * (1 + config.wants_g)
    return tuple(library.call("jaxfuse_batch_norm_bwd_apply", outs, *args, want_dresidual=config.wants_g, **config.attrs))


def kernels(refuse, run) -> tuple[Kernel, ...]:
    """Those of the native module and of the CUDA library, whose targets are the same, and plain JAX where there are none.
    `refuse` and `run` as in `Kernel`, after the module that calls the library."""
    native = (Kernel(name, functools.partial(refuse, library), functools.partial(run, library), platform)
              for library, name, platform in ((ffi, None, "cpu"), (cuda, "native", "cuda")))
    return *native, PLAIN


SUMS = Stage("jaxfuse_batch_norm_gradient_sums", _sums_reference,
             kernels(_refuse("jaxfuse_batch_norm_bwd_stats"), _run_sums), _sums_axes)
DX = Stage("jaxfuse_batch_norm_gradient_dx", _dx_reference,
           kernels(_refuse("jaxfuse_batch_norm_bwd_apply"), _run_dx), _dx_axes)
