"""norm: y = act((s - mean)·rstd·gamma + beta), s = x + residual, with mean and rstd of groups of s, and its gradients.

Layer, RMS, group and instance norm are this one op: `norm_config.py` says how each is seen as (outer, spatial, groups, length).

With n = spatial·length, var = Σ(s - mean)²/n, rstd = 1/sqrt(var + epsilon), x̂ = (s - mean)·rstd, g = dy·act'(z):

    dgamma = Σ g·x̂,  dbeta = Σ g,  ds = rstd·(g·gamma - mean(g·gamma) - x̂·mean(g·gamma·x̂))           (Ba et al. 2016)

`spatial` = 1 takes one pass over memory in each direction: a row is in the cache when it is read again.
"""

import dataclasses
import functools
import math
from itertools import compress

import jax
import jax.numpy as jnp
from jax import lax

from jaxfuse.ops.activations import NO_ACTIVATION
from jaxfuse.ops.arrays import wide
from jaxfuse.ops.batch_axes import BatchAxes, reshaped
from jaxfuse.ops.norm_config import NormConfig
from jaxfuse.ops.op import FusedOp, Linear
from jaxfuse.ops.stage import PLAIN, Kernel, refused_array
from jaxfuse.runtime import cuda, ffi


def normalised(config: NormConfig, x, *rest):
    """The op on x with or without a batch, gamma and beta in any shape: y, or all outputs if there are more. y and the sum are
    like x, what is saved as the op gives it."""
    *residual, gamma, beta = rest
    batch = x.shape[: x.ndim - config.inner_rank] or (1,)
    shape = (*batch, *x.shape[x.ndim - config.inner_rank :])
    full = [reshaped(v, shape) for v in (x, *residual)]
    outs = OP(config, *full, *(v.reshape(config.parameter_shape) for v in (gamma, beta)))
    like_x = 1 + config.gives_sum
    return (*[reshaped(out, x.shape) for out in outs[:like_x]], *outs[like_x:]) if len(outs) > 1 else reshaped(outs[0], x.shape)


def _summed(config: NormConfig, args):
    x, residual, *_ = config.unpack(args)
    return x if residual is None else x + residual


def _statistics(config: NormConfig, grouped):
    """mean and rstd over spatial and length of (*batch, spatial, groups, length)."""
    over, epsilon = (-3, -1), config.epsilon
    mean = jnp.zeros_like(grouped[..., :1, :, :1])
    if not config.centered:
        var = jnp.square(grouped).mean(over, keepdims=True)
    elif config.with_residuals and config.inner[0] == 1 and grouped.size:
        # XLA makes no single kernel of it if they are kept. Then one pass for both: of what is left of the first number.
        shift = lax.stop_gradient(grouped[..., :1])
        shift = jnp.where(jnp.isfinite(shift), shift, 0)
        mean, square = (v.mean(over, keepdims=True) for v in (grouped - shift, jnp.square(grouped - shift)))
        var, mean = square - jnp.square(mean), mean + shift
        var = jnp.where(var < 0, 0, var)
    else:
        mean = grouped.mean(over, keepdims=True)
        var = jnp.square(grouped - mean).mean(over, keepdims=True)
    return mean, 1 / (jnp.sqrt(var) + epsilon) if config.epsilon_outside else lax.rsqrt(var + epsilon)


def _repeated(config: NormConfig, parameter):
    """[groups, length]"""
    return parameter if config.repeats == 1 else jnp.repeat(parameter, config.repeats, axis=1)


def _value(config: NormConfig, s, gamma, beta):
    """(y, mean, rstd)"""
    grouped = reshaped(wide(s), (*config.batch(s), *config.inner))
    mean, rstd = _statistics(config, grouped)
    gamma, beta = (_repeated(config, wide(v)) for v in (gamma, beta))
    z = (grouped - mean) * rstd * gamma + beta
    y = config.activation.value(z).astype(s.dtype)
    statistic = (*config.batch(s), config.inner[1])
    return reshaped(y, s.shape), *(reshaped(v, statistic) for v in (mean, rstd))


def _reference(config: NormConfig, *args):
    *_, gamma, beta = config.unpack(args)
    s = _summed(config, args)
    y, mean, rstd = _value(config, s, gamma, beta)
    sums, statistics = (s,) if config.gives_sum else (), (mean, rstd) if config.with_residuals else ()
    return (y, *sums, *statistics)


def _residuals(config: NormConfig, args, outs):
    *_, gamma, beta = config.unpack(args)
    return (outs[1] if config.has_residual else args[0], gamma, beta, *outs[-2:])


def _tangent(config: NormConfig, residuals, tangents):
    s, gamma, beta, *_ = residuals
    dx, dresidual, *dparameters = config.unpack(tangents)
    moved = [t for t in (dx, dresidual) if t is not None]
    ds = sum(moved[1:], moved[0]) if moved else jnp.zeros_like(s)
    dparameters = [jnp.zeros_like(p) if d is None else d for p, d in zip((gamma, beta), dparameters)]
    _, dy = jax.jvp(lambda *args: _value(config, *args)[0], (s, gamma, beta), (ds, *dparameters))
    return (dy, ds) if config.wants_sum else (dy,)


def _pullback(linear: Linear, *args):
    """Of rows XLA makes one kernel for ds, and one for dgamma and dbeta. Over spatial positions it moves no less than of JAX's own."""
    config = linear.config
    if config.inner[0] > 1:
        return OP.transposed(linear, args, _tangent)
    s, gamma, beta, mean, rstd, dy, *ds = lax.optimization_barrier(args)  # else x̂ of the forward pass may be kept
    shape = (*config.batch(s), *config.inner[1:])
    gamma, beta = (_repeated(config, wide(v)) for v in (gamma, beta))
    centered = reshaped(wide(s), shape) - mean[..., None]
    normalised = centered * rstd[..., None]
    g = config.activation.cotangent(normalised * gamma + beta, reshaped(wide(dy), shape))
    mean_g, mean_gx = ((v * gamma).mean(-1, keepdims=True) for v in (g, g * normalised))
    if config.epsilon_outside:  # drstd/dvar = -rstd²/(2·sqrt(var)); sqrt(var) as 1/rstd - epsilon would cancel
        mean_gx = mean_gx / (rstd[..., None] * jnp.sqrt(jnp.square(centered).mean(-1, keepdims=True)))
    dx = rstd[..., None] * (g * gamma - (mean_g if config.centered else 0) - normalised * mean_gx)
    dx = sum((wide(v) for v in ds), reshaped(dx, s.shape)).astype(s.dtype)
    sums = [v.sum(tuple(range(v.ndim - 2))) for v in (g * normalised, g)]
    dparameters = [v.reshape(p.shape + (config.repeats,)).sum(-1).astype(p.dtype) for v, p in zip(sums, args[1:3])]
    full = (dx, dx) if config.has_residual else (dx,)
    return tuple(compress((*full, *dparameters), linear.active))


def _forward_axes(config: NormConfig, ranks) -> BatchAxes:
    full = (0,) * (1 + config.has_residual)
    return BatchAxes((*full, None, None), (0,) * (1 + config.gives_sum + 2 * config.with_residuals))


def _backward_axes(linear: Linear, ranks) -> BatchAxes:
    full = (0,) * (1 + linear.config.has_residual)
    cotangents = (0, 0) if linear.config.wants_sum else (0,)
    return BatchAxes((0, None, None, 0, 0, *cotangents), tuple(compress((*full, None, None), linear.active)))


# --- Kernels: our own --------------------------------------------------------------------------------------------

_LONGEST_ROW = 8192


def _refuse(config: NormConfig, args) -> str | None:
    return refused_array(args[0]) or ffi.unavailable("jaxfuse_norm_fwd")


def refuse_on_cuda(config: NormConfig, args) -> str | None:
    spatial, groups, length = config.inner
    if spatial > 1 or groups > 65535 or length > _LONGEST_ROW or config.activation != NO_ACTIVATION:
        return f"{config.inner}, activation {config.activation.name}: the CUDA kernel takes (1, n, m <= {_LONGEST_ROW}), none"
    return refused_array(args[0]) or cuda.unavailable("jaxfuse_norm_fwd")


def _attrs(config: NormConfig):
    return dict(inner=config.inner, centered=config.centered, epsilon=config.epsilon,
                epsilon_outside=config.epsilon_outside, **config.activation.attributes())


def _operands(library, config: NormConfig, full, parameters):
    """(how many items there are, tensors as the library takes them, parameters as [groups, length] in float32). The CPU's takes
    tensors of any shape: XLA on the CPU would copy a bfloat16 one whose reshape makes axes of length 1. CUDA's takes
    (outer, spatial, groups, length)."""
    outer = math.prod(config.batch(full[0]))
    tensors = full if library is ffi else [reshaped(v, (outer, *config.inner)) for v in full]
    return outer, tensors, [_repeated(config, p.astype(jnp.float32)) for p in parameters]


def _run_forward(library, config: NormConfig, args, mesh_axes):
    x, residual, *parameters = config.unpack(args)
    outer, full, parameters = _operands(library, config, (x,) if residual is None else (x, residual), parameters)
    types = [jax.ShapeDtypeStruct(full[0].shape, x.dtype)] * (1 + config.gives_sum)
    statistics = [jax.ShapeDtypeStruct((outer, config.inner[1]), jnp.float32)] * 2 if config.with_residuals else []
    outs = library.call(
        "jaxfuse_norm_fwd", [*types, *statistics], full[0], *parameters, *full[1:],
        has_residual=config.has_residual, wants_sum=config.gives_sum, saving=config.with_residuals, **_attrs(config))
    shapes = [x.shape] * len(types) + [(*config.batch(x), config.inner[1])] * len(statistics)
    return tuple(map(reshaped, outs, shapes))


def _run_backward(library, linear: Linear, args, mesh_axes):
    config = linear.config
    s, gamma, beta, mean, rstd, dy, *ds = args
    *of_full, want_gamma, want_beta = linear.active
    outer, (s_in, dy_in, *ds_in), parameters = _operands(library, config, (s, dy, *ds), (gamma, beta))
    statistics = [reshaped(v, (outer, config.inner[1])) for v in (mean, rstd)]
    wants_parameters = want_gamma or want_beta
    vectors = [jax.ShapeDtypeStruct(config.inner[1:], jnp.float32)] * 2 if wants_parameters else []
    dx, *dparameters = library.call(
        "jaxfuse_norm_bwd", [jax.ShapeDtypeStruct(s_in.shape, s.dtype), *vectors],
        dy_in, s_in, *parameters, *statistics, *ds_in, has_ds=bool(ds), wants_parameters=wants_parameters, **_attrs(config))
    if mesh_axes and wants_parameters:
        dparameters = lax.psum(dparameters, mesh_axes)
    dparameters = [d.reshape(*config.parameter_shape, config.repeats).sum(-1).astype(p.dtype)
                   for d, p in zip(dparameters, (gamma, beta))] or [None, None]
    return tuple(compress((*[reshaped(dx, s.shape)] * len(of_full), *dparameters), linear.active))


def _kernels(run, config_of) -> tuple[Kernel, ...]:
    native = ((ffi, _refuse, None, "cpu"), (cuda, refuse_on_cuda, "native", "cuda"))
    refused_by = lambda refuse: lambda config, args: refuse(config_of(config), args)
    kernels = (Kernel(name, refused_by(refuse), functools.partial(run, library), platform) for library, refuse, name, platform in native)
    return *kernels, PLAIN


OP = FusedOp(
    "norm",
    reference=_reference,
    residuals=_residuals,
    tangent=_tangent,
    for_autodiff=lambda config: dataclasses.replace(config, with_residuals=True),
    pullback=_pullback,
    forward_kernels=_kernels(_run_forward, lambda config: config),
    backward_kernels=_kernels(_run_backward, lambda linear: linear.config),
    forward_axes=_forward_axes,
    backward_axes=_backward_axes,
)
