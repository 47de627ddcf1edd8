"""dense: y = act(dot_general(x, w) + bias + residual) as one op, and its gradients."""

import dataclasses
import functools
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfuse.ops.activations import NO_ACTIVATION, Activation
from jaxfuse.ops.batch_axes import BatchAxes, completed
from jaxfuse.ops.errors import Arguments, Array, checked_names
from jaxfuse.ops.matrices import matrices
from jaxfuse.ops.naming import ActivationArgument, activation_of
from jaxfuse.ops.op import FusedOp, Linear
from jaxfuse.ops.stage import FLOATS, Kernel
from jaxfuse.runtime import ffi
from jaxfuse.runtime.settings import ours

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """Everything static about a dense layer. Axes as in `lax.dot_general`: which are contracted, which are batch axes."""

    x_contracted: Axes
    w_contracted: Axes
    x_batch: Axes
    w_batch: Axes
    out_dtype: str
    has_bias: bool = False
    has_residual: bool = False
    activation: Activation = NO_ACTIVATION
    precision: Any = None
    with_residuals: bool = False  # also return what the activation was applied to
    along: int = 0  # which of x's free axes is that of the items, where it has no batch axes

    @classmethod
    def of(cls, params: dict, out_dtype, weight_left: bool = False) -> "DenseConfig":
        """That of a dot_general with these parameters, whose weight is the left operand or the right."""
        order = slice(None, None, -1 if weight_left else 1)
        (contracted, batch), precision = params["dimension_numbers"], params["precision"]
        (x_contracted, w_contracted), (x_batch, w_batch) = contracted[order], batch[order]
        return cls(tuple(x_contracted), tuple(w_contracted), tuple(x_batch), tuple(w_batch), str(out_dtype),
                   precision=precision[order] if isinstance(precision, tuple) else precision)

    @property
    def residual_outs(self) -> int:
        return int(self.with_residuals)

    @property
    def dimension_numbers(self):
        return (self.x_contracted, self.w_contracted), (self.x_batch, self.w_batch)

    def unpack(self, args):
        """(x, w, bias, residual) from the op's argument list, None for what is absent."""
        x, w, *rest = args
        rest = iter(rest)
        return x, w, *[next(rest) if has else None for has in (self.has_bias, self.has_residual)]

    def free_axes(self, x, w) -> tuple[Axes, Axes]:
        """The axes of x and of w that the output has, after the batch axes and in this order."""
        return (tuple(d for d in range(len(x.shape)) if d not in (*self.x_contracted, *self.x_batch)),
                tuple(d for d in range(len(w.shape)) if d not in (*self.w_contracted, *self.w_batch)))


@checked_names
@ours
def dense(
    x: Array, w: Array, bias: Array | None = None, residual: Array | None = None, *, activation: ActivationArgument = None,
    alpha: float = 0.0, dimension_numbers: Any = None, precision: Any = None, preferred_element_type: Any = None) -> jax.Array:
    """y = activation(x · w + bias + residual), one kernel where there is one.

    Args:
      x: input, float; by default its last axis is contracted: `[..., inputs]`.
      w: weight of x's dtype; by default its first axis is contracted: `[inputs, ...]`.
      bias: shaped like the axes that w gives the output (`[outputs]` by default); the output's dtype or float32.
      residual: like the output, in shape and dtype; added before the activation.
      activation: a name in `jaxfuse.ops.activations.TABLE`, a function such as `jax.nn.relu` that is one of them, or None;
        `alpha` is the parameter of the names that have one.
      dimension_numbers, precision, preferred_element_type: as in `jax.lax.dot_general`.

    Returns: y in x's dtype, or in `preferred_element_type`; batch axes first, then those of x, then those of w. Sums are
    float32 inside the kernel. Autodiff keeps x, w and y, or x, w and what the activation was applied to where y does not
    tell the derivative.
    Raises: OpError (a ValueError), at trace time, for shapes, dtypes or options that do not fit.
    """
    arguments = Arguments("dense")
    optional = {name: a for name, a in dict(bias=bias, residual=residual).items() if a is not None}
    arguments.floats(x=x, w=w, **optional)
    arguments.check(w.dtype == x.dtype, "w", str(w.dtype), f"{x.dtype}, as x is", "cast one of them")
    config = _config(arguments, x, w, dimension_numbers, preferred_element_type)
    out = jax.eval_shape(functools.partial(_product, config), x, w)
    if bias is not None:
        features = tuple(w.shape[d] for d in config.free_axes(x, w)[1])
        arguments.check(bias.shape == features, "bias", f"of shape {bias.shape}", f"{features}, as w gives the output",
                        "reshape it")
    if residual is not None:
        arguments.like(out, "the output", residual=residual)
    config = dataclasses.replace(
        config, has_bias=bias is not None, has_residual=residual is not None,
        activation=activation_of(arguments, activation, alpha), precision=tuple(precision) if isinstance(precision, list) else precision)
    return OP(config, x, w, *optional.values())[0]


def _config(arguments: Arguments, x, w, dimension_numbers, preferred_element_type) -> DenseConfig:
    if dimension_numbers is None:
        for name, array in (("x", x), ("w", w)):
            arguments.check(array.ndim > 0, name, "of rank 0", "rank 1 or more", "add an axis to contract")
        dimension_numbers = ((x.ndim - 1,), (0,)), ((), ())
    dtype = x.dtype if preferred_element_type is None else preferred_element_type
    try:
        (x_contracted, w_contracted), (x_batch, w_batch) = (map(tuple, pair) for pair in dimension_numbers)
        config = DenseConfig(x_contracted, w_contracted, x_batch, w_batch, str(jnp.dtype(dtype)))
        jax.eval_shape(functools.partial(_product, config), x, w)
        return config
    except (TypeError, ValueError) as error:
        arguments.fail("dimension_numbers", f"{dimension_numbers!r} ({error})",
                       f"axes to contract and batch axes that fit x {x.shape} and w {w.shape}", "check the shapes")


def _product(config: DenseConfig, x, w):
    return lax.dot_general(x, w, config.dimension_numbers, config.precision, jnp.dtype(config.out_dtype))


def _reference(config: DenseConfig, *args):
    x, w, bias, residual = config.unpack(args)
    z = _product(config, x, w)
    wide = jnp.promote_types(z.dtype, jnp.float32) if bias is not None or residual is not None else z.dtype
    z = z.astype(wide)
    if bias is not None:
        z = z + bias.astype(wide)
    if residual is not None:
        z = z + residual.astype(wide)
    y = config.activation.value(z).astype(config.out_dtype)
    return (y, z.astype(config.out_dtype)) if config.with_residuals else (y,)


def _residuals(config: DenseConfig, args, outs):
    x, w, *_ = args
    return (x, w) if config.activation == NO_ACTIVATION else (x, w, outs[-1])


def _tangent(config: DenseConfig, residuals, tangents):
    """dy = act'(z) · (dx·w + x·dw + dbias + dresidual), act'(z) from y or from z."""
    x, w, *saved_activation = residuals
    dx, dw, dbias, dresidual = config.unpack(tangents)
    out = jax.eval_shape(functools.partial(_product, config), x, w)
    total = jnp.zeros(out.shape, out.dtype)
    if dx is not None:
        total = total + _product(config, dx, w)
    if dw is not None:
        total = total + _product(config, x, dw)
    for d in (dbias, dresidual):
        total = total if d is None else total + d.astype(total.dtype)
    if not saved_activation:
        return (total,)
    if not config.with_residuals:
        return (config.activation.pullback(saved_activation[0], total).astype(total.dtype),)
    return (config.activation.jvp(saved_activation[0], total),)


def _axes(config: DenseConfig, x_rank: int) -> tuple[int | None, int | None, int | None]:
    """The axis of x, of w and of the output along which the layer works item by item."""
    if config.x_batch:
        return config.x_batch[0], config.w_batch[0], 0
    free = [d for d in range(x_rank) if d not in config.x_contracted]
    return (free[config.along], None, config.along) if free else (None, None, None)


def _forward_axes(config: DenseConfig, ranks) -> BatchAxes:
    x, w, out = _axes(config, ranks[0])
    added = compress((None, out), (config.has_bias, config.has_residual))
    return BatchAxes((x, w, *added), (out,) * (1 + config.residual_outs))


def _backward_axes(linear: Linear, ranks) -> BatchAxes:
    config = linear.config
    x, w, out = _axes(config, ranks[0])
    own = _forward_axes(config, ranks).inputs
    return BatchAxes((x, w, *[out] * (len(ranks) - 2)), tuple(compress(own, linear.active)))


# --- CPU kernels: oneDNN, or our own loops ------------------------------------------------------------------------

_PRECISIONS = (None, lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST)
_ALGORITHMS = {lax.DotAlgorithmPreset.F32_F32_F32: "float32", lax.DotAlgorithmPreset.BF16_BF16_F32: "bfloat16",
               lax.DotAlgorithmPreset.F16_F16_F32: "float16"}  # what the kernel does with operands of that dtype


def _refuse_products(config: DenseConfig, x, w) -> str | None:
    if x.dtype != w.dtype or str(x.dtype) not in FLOATS or config.out_dtype not in (str(x.dtype), "float32"):
        return f"dtypes {x.dtype}, {w.dtype} -> {config.out_dtype}: the kernel takes {' and '.join(FLOATS)} and gives them or float32"
    found = _matrices(config, x, w)
    return refused_precision(config.precision, x.dtype) or (found if isinstance(found, str) else None)


def refused_precision(precision, dtype) -> str | None:
    """Why products of this dtype with this `precision` of `lax.dot_general` are not what the kernels compute."""
    asked = precision if isinstance(precision, tuple) else (precision,)
    if any(p not in _PRECISIONS and _ALGORITHMS.get(p) != str(dtype) for p in asked):
        return f"precision {precision}: the kernel computes in its operands' dtype"
    return None


def _matrices(config: DenseConfig, x, w):
    return matrices(tuple(x.shape), tuple(w.shape), config.dimension_numbers)


def _refuse_forward(config: DenseConfig, args) -> str | None:
    x, w, bias, residual = config.unpack(args)
    if bias is not None and str(bias.dtype) not in (config.out_dtype, "float32"):
        return f"bias of dtype {bias.dtype} with {config.out_dtype} output"
    if residual is not None and str(residual.dtype) != config.out_dtype:
        return f"residual of dtype {residual.dtype} with {config.out_dtype} output"
    return ffi.unavailable("jaxfuse_dense_fwd") or _refuse_products(config, x, w)


def _attributes(config: DenseConfig, x, w):
    return _matrices(config, x, w).attributes() | config.activation.attributes()


def _run_forward(config: DenseConfig, args, mesh_axes):
    x, w, bias, _ = config.unpack(args)
    if bias is not None and bias.dtype == jnp.float16:
        args = [*args[:2], bias.astype(jnp.float32), *args[3:]]
    y = jax.eval_shape(functools.partial(_product, config), x, w)
    attrs = _attributes(config, x, w) | dict(has_bias=config.has_bias, has_residual=config.has_residual)
    return ffi.call("jaxfuse_dense_fwd", [jax.ShapeDtypeStruct(y.shape, y.dtype)] * (1 + config.residual_outs), *args, **attrs)


def _refuse_backward(linear: Linear, args) -> str | None:
    return ffi.unavailable("jaxfuse_dense_bwd") or _refuse_products(linear.config, *args[:2])


def _run_backward(linear: Linear, args, mesh_axes):
    config = linear.config
    x, w, *saved_activation, dy = args
    types = OP.types_here(linear, args)
    want_dx, want_dw, want_db, want_dresidual = [bool(want) for want in config.unpack(linear.active)]
    operands = [*compress((x, w), (want_dw, want_dx)), dy, *saved_activation]
    wanted = [(t, i == 2 and config.has_bias) for i, (t, active) in enumerate(zip(types, linear.active)) if active]
    results = [jax.ShapeDtypeStruct(t.shape, jnp.float32 if is_bias else t.dtype) for t, is_bias in wanted]
    attrs = _attributes(config, x, w) | dict(
        by_value=not config.with_residuals, want_dx=want_dx, want_dw=want_dw, want_db=want_db, want_dresidual=want_dresidual)
    found = ffi.call("jaxfuse_dense_bwd", results, *operands, **attrs)
    found = completed(found, _backward_axes(linear, [a.ndim for a in args]).outputs, mesh_axes)
    return tuple(value.astype(t.dtype) for value, (t, _) in zip(found, wanted))


OP = FusedOp(
    "dense",
    reference=_reference,
    residuals=_residuals,
    tangent=_tangent,
    for_autodiff=lambda config: dataclasses.replace(config, with_residuals=not config.activation.derivative_from_y),
    forward_kernels=(Kernel(None, _refuse_forward, _run_forward),),
    backward_kernels=(Kernel(None, _refuse_backward, _run_backward),),
    forward_axes=_forward_axes,
    backward_axes=_backward_axes,
)
