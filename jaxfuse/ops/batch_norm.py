"""batch_norm: y = act((x - center)·scale + offset + residual) with per-channel center, scale and offset that are a small
function of x's own batch statistics (training) or given outright (inference), and its gradients.

Every spelling of batch norm is this one form: `per_channel(mean, var, *parameters) -> (center, scale, offset)` is whatever
arithmetic the user wrote on `[channels]` vectors. It is tiny, stays with XLA and is differentiated by JAX; the op owns the
passes over the full-size tensors:

    forward    mean, var = moments(x);  y = act((x - center)·scale + offset + residual)          2 reads of x, 1 write
    backward   g = dy·act'(z);  Σg, Σg·(x - mean);  dx = scale·g + b·(x - mean) + c              2 reads of dy and x
               with b = 2·dvar/N, c = dmean/N and (dmean, dvar) from the vjp of per_channel (Ioffe & Szegedy 2015, sec. 3)
"""

import dataclasses
import functools
import numbers
from itertools import compress

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfuse.ops import batch_norm_grad as passes
from jaxfuse.ops.activations import Activation
from jaxfuse.ops.arrays import beside, other_axes, wide
from jaxfuse.ops.batch_axes import BatchAxes, batch_axis
from jaxfuse.ops.batch_norm_config import BatchNormConfig
from jaxfuse.ops.errors import Arguments, Array, checked_names
from jaxfuse.ops.naming import ActivationArgument, activation_of
from jaxfuse.ops.op import FusedOp, Linear
from jaxfuse.runtime.private import is_symbolic_size
from jaxfuse.runtime.settings import ours


@dataclasses.dataclass(frozen=True)
class Standard:
    """per_channel(mean, var, gamma, beta) of Ioffe & Szegedy 2015: scale = gamma / sqrt(var + epsilon)."""

    epsilon: float

    def __call__(self, mean, var, gamma, beta):
        return mean, wide(gamma) * lax.rsqrt(wide(var) + self.epsilon), beta


@checked_names
@ours
def batch_norm(
    x: Array, gamma: Array, beta: Array, residual: Array | None = None, *, activation: ActivationArgument = None, alpha: float = 0.0,
    epsilon: float = 1e-5, axis: int = -1, mean: Array | None = None, var: Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Batch normalisation, residual add and activation in one op.

    y = activation((x - mean) · gamma / sqrt(var + epsilon) + beta + residual)      (Ioffe & Szegedy 2015)

    Args:
      x: float array of rank 2 or more; `axis` is its channel axis.
      gamma, beta: `[channels]`, float.
      residual: of x's shape and dtype; added before the activation.
      activation: a name in `jaxfuse.ops.activations.TABLE`, a function such as `jax.nn.relu` that is one of them, or None;
        `alpha` is the parameter of the names that have one.
      epsilon: added to the variance.
      mean, var: `[channels]`, float, statistics to use (inference); by default those of x over every other axis, the variance
        biased, in float32 and without E[x²]-E[x]².

    Returns: (y, mean, var); y in x's dtype, the statistics float32 as used.
    Raises: OpError (a ValueError), at trace time, for shapes, dtypes or options that do not fit.
    """
    arguments = Arguments("batch_norm")
    given = {name: v for name, v in dict(mean=mean, var=var).items() if v is not None}
    added = {} if residual is None else dict(residual=residual)
    arguments.floats(x=x, gamma=gamma, beta=beta, **given, **added)
    arguments.check(x.ndim >= 2, "x", f"of rank {x.ndim}", "rank 2 or more", "add a batch axis")
    arguments.check(isinstance(axis, numbers.Integral) and -x.ndim <= axis < x.ndim, "axis", repr(axis),
                    f"an axis of x, whose rank is {x.ndim}", "give the channel axis")
    arguments.per_channel(x.shape[axis], "channel of x", gamma=gamma, beta=beta, **given)
    arguments.check(len(given) != 1, "mean and var", f"{next(iter(given), '')} alone", "both or neither",
                    "give both to use running statistics, neither to use those of x")
    arguments.like(x, "x", **added)
    config = BatchNormConfig(
        int(axis) % x.ndim, Standard(arguments.number("epsilon", epsilon, at_least=0)), not given, bool(added),
        activation_of(arguments, activation, alpha))
    outs = OP(config, x, *added.values(), *given.values(), gamma, beta)
    return (outs[0], mean, var) if given else tuple(outs)


def _mean_over_batch(config: BatchNormConfig, x):
    return x.mean(other_axes(x, config.axis))


def _rows(config: BatchNormConfig, x):
    """x as [rows, channels]."""
    channels = x.shape[config.axis]
    return jnp.moveaxis(x, config.axis, -1).reshape(x.size // max(1, channels), channels)


def _coefficients(config: BatchNormConfig, *statistics_and_parameters):
    """center, scale, offset: [channels], at least float32."""
    return tuple(wide(v) for v in config.per_channel(*statistics_and_parameters))


def _batch_statistics(config: BatchNormConfig, x):
    """mean and var in one pass: those of x - shift, where shift, the mean of every example's middle, is near the mean."""
    shift = jnp.zeros((x.shape[config.axis],), wide(x).dtype)
    if x.size:
        n = batch_axis(config.axis)
        places = [slice(None) if d in (n, config.axis) else 0 if is_symbolic_size(x.shape[d]) else x.shape[d] // 2 for d in range(x.ndim)]
        sample = lax.stop_gradient(wide(x[tuple(places)])).mean(n)
        shift = jnp.where(jnp.isfinite(sample), sample, 0)
    centered = wide(x) - beside(x, config.axis, shift)
    mean, square = _mean_over_batch(config, centered), _mean_over_batch(config, jnp.square(centered))
    var = square - jnp.square(mean)
    return mean + shift, jnp.where(var < 0, 0, var)


def _reference(config: BatchNormConfig, *args):
    x, residual, parameters = config.unpack(args)
    statistics: tuple = _batch_statistics(config, x) if config.batch_statistics else ()
    coefficients = _coefficients(config, *statistics, *parameters)
    center, scale, offset = (beside(x, config.axis, v) for v in coefficients)
    z = (wide(x) - center) * scale + offset
    if residual is not None:
        z = z + residual
    y = config.activation.value(z).astype(x.dtype)
    saved = coefficients if config.with_residuals else ()
    if config.with_residuals and config.derivative == "mask":
        rows = _rows(config, z.astype(x.dtype))
        slope = config.activation.jvp(rows, jnp.ones_like(rows))
        mask = jnp.packbits(slope > 0, axis=-1, bitorder="little")
        y, mask = lax.optimization_barrier((y, mask))  # else the next block may compute y again as its residual
        saved = *saved, mask
    return (y, *statistics, *saved)


def _residuals(config: BatchNormConfig, args, outs):
    x, residual, parameters = config.unpack(args)
    skip = (residual,) if config.saves_residual else ()
    return (x, *skip, *parameters, *outs[1:])


def _derivative(config: BatchNormConfig, residuals, wants_g: bool = False):
    """What tells act'(z), as the two passes of the gradient have it: their config, and the last of their arguments."""
    _, residual, _, _, coefficients, mask = config.unpack_residuals(residuals)
    saved = dict(none=(), mask=mask, recompute=(*coefficients, *residual))[config.derivative]
    gradient = passes.GradientConfig(
        config.axis, config.derivative == "mask", wants_g, config.activation, config.saves_residual, config.xla_fuses_neighbour)
    return gradient, saved


def _tangent(config: BatchNormConfig, residuals, tangents):
    x, _, parameters, statistics, coefficients, _ = config.unpack_residuals(residuals)
    dx, dresidual, dparameters = config.unpack(tangents)
    values = wide(x)
    dvalues = jnp.zeros_like(values) if dx is None else wide(dx)
    dstatistics: tuple = ()
    if config.batch_statistics:
        centered = values - beside(x, config.axis, statistics[0])
        dstatistics = _mean_over_batch(config, dvalues), 2 * _mean_over_batch(config, centered * dvalues)
    dparameters = [_zero_tangent(p) if d is None else d for p, d in zip(parameters, dparameters)]
    per_channel = functools.partial(_coefficients, config)
    _, dcoefficients = jax.jvp(per_channel, (*statistics, *parameters), (*dstatistics, *dparameters))
    center, scale, _, dcenter, dscale, doffset = (beside(x, config.axis, v) for v in (*coefficients, *dcoefficients))
    dz = (dvalues - dcenter) * scale + (values - center) * dscale + doffset
    if dresidual is not None:
        dz = dz + dresidual
    gradient, saved = _derivative(config, residuals)
    return (passes.through_activation(gradient, dz, x, saved, Activation.jvp).astype(x.dtype), *dstatistics)


def _zero_tangent(parameter):
    """A flag or a counter among the parameters has a tangent of its own type."""
    floating = jnp.issubdtype(parameter.dtype, jnp.floating)
    return jnp.zeros_like(parameter) if floating else np.zeros(parameter.shape, jax.dtypes.float0)


def _parts(cotangent, dtype):
    """Numbers of x's dtype whose sum is the cotangent: `per_channel` may be written in it, and the mean of few elements must
    cancel what each of them gets on its own."""
    if jnp.finfo(dtype).bits >= jnp.finfo(cotangent.dtype).bits:
        return [cotangent]
    parts = []
    for _ in range(-(-jnp.finfo(cotangent.dtype).nmant // jnp.finfo(dtype).nmant)):
        parts.append(lax.reduce_precision(cotangent, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant))
        rest = cotangent - parts[-1]
        cotangent = jnp.where(jnp.isfinite(rest), rest, 0)
    return parts


def _gradients(two_passes, shards, linear: Linear, *args):
    """By `two_passes`, as `batch_norm_grad.by_xla`, over one of `shards` equal parts of the batch."""
    config = linear.config
    residuals, (dy, *dstatistics) = args[: linear.n_residuals], args[linear.n_residuals :]
    x, _, parameters, statistics, (center, scale, _), _ = config.unpack_residuals(residuals)
    want_dx, *rest = linear.active
    want_dresidual = bool(config.has_residual and rest[0])
    gradient, saved = _derivative(config, residuals, wants_g=want_dresidual)
    mean = statistics[0] if statistics else center
    (sum_g, sum_gx), finish = two_passes(gradient, dy, x, mean, *saved)
    # z = (x - center)·scale + offset: dcenter = -scale·Σg, dscale = Σg·(x - center), doffset = Σg
    dcoefficients = -scale * sum_g, sum_gx + (mean - center) * sum_g, sum_g
    coefficient_types, vjp = jax.vjp(functools.partial(_coefficients, config), *statistics, *parameters)
    dcoefficients = tuple(d.astype(t.dtype) for d, t in zip(dcoefficients, coefficient_types))
    dsmall = vjp(dcoefficients)
    full: list = [None, None]  # dx, dresidual
    if want_dx or want_dresidual:
        b = c = None  # of given statistics: x has no other part in z, and its NaN or Inf must not come into dx
        if statistics:
            count = float(x.size // max(1, x.shape[config.axis])) * shards
            pulled = [vjp(part)[:2] for part in zip(*(_parts(d, x.dtype) for d in dcoefficients))]
            dmean, dvar = [sum(parts) + ct for parts, ct in zip(zip(*pulled), dstatistics)]
            b, c = 2 * dvar / count, dmean / count
        full[: 1 + want_dresidual] = finish(scale, b, c)
    return tuple(compress((*full[: 1 + config.has_residual], *dsmall[len(statistics) :]), linear.active))


def _forward_axes(config: BatchNormConfig, ranks) -> BatchAxes:
    n = batch_axis(config.axis)
    full = 1 + config.has_residual
    coefficients = (None, None, None) if config.with_residuals else ()
    mask = (0,) if config.with_residuals and config.derivative == "mask" else ()
    return BatchAxes((*[n] * full, *[None] * (len(ranks) - full)), (n, *_statistics_axes(config), *coefficients, *mask))


def _statistics_axes(config: BatchNormConfig) -> tuple[None, ...]:
    return (None, None) if config.batch_statistics else ()


def _backward_axes(linear: Linear, ranks) -> BatchAxes:
    config, n = linear.config, batch_axis(linear.config.axis)
    mask = (0,) if config.derivative == "mask" else ()
    full = 1 + config.saves_residual
    inputs = (*[n] * full, *[None] * (linear.n_residuals - full - len(mask)), *mask, n, *_statistics_axes(config))
    own = (*[n] * (1 + config.has_residual), *[None] * len(linear.active))
    return BatchAxes(inputs, tuple(compress(own, linear.active)))


# --- Kernels: our own, channels-last -----------------------------------------------------------------------------

def _refuse(library, config: BatchNormConfig, args) -> str | None:
    return passes.refuse_array(library, config, args[0]) or library.unavailable("jaxfuse_batch_norm_stats")


def _refuse_backward(library, linear: Linear, args) -> str | None:
    if not linear.config.batch_statistics:  # dx = scale·g has no term in x, whose NaN or Inf must not reach it
        return "given statistics: the kernel computes the gradient through batch statistics"
    return _refuse(library, linear.config, args)


def _vector(channels):
    return jax.ShapeDtypeStruct((channels,), jnp.float32)


def _mask_type(x):
    channels = x.shape[-1]
    return jax.ShapeDtypeStruct((x.size // channels, -(-channels // 8)), jnp.uint8)


def _run_forward(library, config: BatchNormConfig, args, mesh_axes):
    x, residual, parameters = config.unpack(args)
    channels = x.shape[-1]
    statistics: tuple = ()
    if config.batch_statistics:
        mean, var = library.call("jaxfuse_batch_norm_stats", [_vector(channels)] * 2, x)
        if mesh_axes:  # of equally large shards: Var = E[var] + Var[mean]
            whole = lax.pmean(mean, mesh_axes)
            mean, var = whole, lax.pmean(var + jnp.square(mean - whole), mesh_axes)
        statistics = mean, var
    coefficients = tuple(v.astype(jnp.float32) for v in _coefficients(config, *statistics, *parameters))
    save_mask = config.with_residuals and config.derivative == "mask"
    y_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    y, *mask = library.call(
        "jaxfuse_batch_norm_apply", [y_type, _mask_type(x)] if save_mask else [y_type],
        x, *coefficients, *(() if residual is None else (residual,)),
        **config.activation.attributes(), has_residual=config.has_residual, save_mask=save_mask,
    )
    return (y, *statistics, *(coefficients if config.with_residuals else ()), *mask)


def _run_backward(library, linear: Linear, args, mesh_axes):
    shards = lax.psum(1, mesh_axes) if mesh_axes else 1
    return _gradients(functools.partial(passes.by_kernels, library, mesh_axes), shards, linear, *args)


OP = FusedOp(
    "batch_norm",
    reference=_reference,
    residuals=_residuals,
    tangent=_tangent,
    for_autodiff=lambda config: dataclasses.replace(config, with_residuals=True),
    pullback=functools.partial(_gradients, passes.by_xla, 1),
    forward_kernels=passes.kernels(_refuse, _run_forward),
    backward_kernels=passes.kernels(_refuse_backward, _run_backward),
    forward_axes=_forward_axes,
    backward_axes=_backward_axes,
)
