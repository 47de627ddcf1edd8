"""conv: y = act(scale · conv(x, w) + bias + residual), or act(…) + residual, as one op, and its gradients."""

import dataclasses
import functools
import math
from itertools import compress

import jax
import jax.numpy as jnp
from jax import lax

from jaxfuse.ops.activations import NO_ACTIVATION
from jaxfuse.ops.arrays import beside
from jaxfuse.ops.batch_axes import BatchAxes, completed
from jaxfuse.ops.conv import (
    channels_last as conv_channels_last, cudnn as conv_cudnn, pointwise, scattered, taps)
from jaxfuse.ops.conv.config import ConvConfig, convolve
from jaxfuse.ops.op import FusedOp, Linear
from jaxfuse.ops.stage import Kernel, refused_array, widened
from jaxfuse.runtime import ffi


def _reference(config: ConvConfig, *args, convolve=convolve):
    config, args = config.rounded(args)
    x, w, *rest = config.unpack(args)
    return _epilogue(config, convolve(config, x, w), *rest)


def _epilogue(config: ConvConfig, y, scale, bias, residual):
    wide = jnp.promote_types(y.dtype, jnp.float32) if scale is not None or bias is not None else y.dtype
    z = y.astype(wide)
    if scale is not None:
        z = z * beside(z, config.out_spec[1], scale.astype(wide))
    if bias is not None:
        z = z + beside(z, config.out_spec[1], bias.astype(wide))
    if residual is not None and not config.residual_last:
        z = z + residual.astype(wide)
    value = config.activation.value(z)
    if config.residual_last:
        value = value + residual.astype(wide)
    saved = (z.astype(y.dtype),) if config.residual_outs else ()
    return (value.astype(y.dtype), *saved)


def _decomposed(config: ConvConfig, *args):
    """The same value by ops that are differentiable: scale, whose gradient needs the product, goes into w
    (scale·conv(x, w) = conv(x, w·scale)), but in float16, where that might overflow. Of another dtype than x's, the product is one
    in that dtype, as JAX differentiates it; or it is by itself, where its cotangent has x's."""
    if config.rounds_filter:
        config, args = config.rounded(args)
        return tuple(OP(config, *args))
    x, w, scale, bias, residual = config.unpack(args)
    if config.rounds or config.has_scale and w.dtype == jnp.float16:
        alone = dataclasses.replace(config, has_scale=False, has_bias=False, has_residual=False, residual_last=False,
                                    activation=NO_ACTIVATION, out_dtype=None, rounds=False)
        return _epilogue(config, OP(alone, x, w)[0].astype(config.out_dtype or x.dtype), scale, bias, residual)
    if config.out_dtype:
        x, w = x.astype(config.out_dtype), w.astype(config.out_dtype)
        return OP(dataclasses.replace(config, out_dtype=None), x, w, *args[2:])
    w = (w * beside(w, config.rhs_spec[0], scale)).astype(w.dtype)
    return OP(dataclasses.replace(config, has_scale=False), x, w, *[a for a in (bias, residual) if a is not None])


def _residuals(config: ConvConfig, args, outs):
    x, w, *_ = args
    return (x, w, *dict(none=(), y=outs[:1], z=outs[1:])[config.derivative])


def _tangent(config: ConvConfig, residuals, tangents, convolve=convolve):
    """dy = act'(z) · (conv(dx, w) + conv(x, dw) + dbias + dresidual), or dresidual outside of the product."""
    x, w, *saved_activation = residuals
    dx, dw, dscale, dbias, dresidual = config.unpack(tangents)
    assert dscale is None, "a conv with scale is decomposed before it is differentiated"
    out_type = jax.eval_shape(functools.partial(convolve, config), x, w)
    total = jnp.zeros(out_type.shape, out_type.dtype)
    if dx is not None:
        total = total + convolve(config, dx, w)
    if dw is not None:
        total = total + convolve(config, x, dw)
    if dbias is not None:
        total = total + beside(total, config.out_spec[1], dbias.astype(total.dtype))
    if dresidual is not None and not config.residual_last:
        total = total + dresidual
    if saved_activation:
        activation = config.activation
        through = activation.pullback if config.derivative == "y" else activation.jvp
        total = through(saved_activation[0], total)
    if dresidual is not None and config.residual_last:
        total = total + dresidual
    return (total,)


def _forward_axes(config: ConvConfig, ranks) -> BatchAxes:
    n = config.out_spec[0]
    added = compress((None, None, n), (config.has_scale, config.has_bias, config.has_residual))
    return BatchAxes((config.lhs_spec[0], None, *added), (n,) * (1 + config.residual_outs))


def _backward_axes(linear: Linear, ranks) -> BatchAxes:
    config, n = linear.config, linear.config.out_spec[0]
    inputs = (config.lhs_spec[0], None, *[n] * (len(ranks) - 2))
    outputs = _forward_axes(config, None).inputs
    return BatchAxes(inputs, tuple(compress(outputs, linear.active)))


# --- CPU kernel: oneDNN, or our own loops --------------------------------------------------------------------------


def _refuse_geometry(config: ConvConfig, w, *arrays) -> str | None:
    if refused := next(filter(None, map(refused_array, (w, *arrays))), None):
        return refused
    if config.transposed:
        return _refuse_transposed(config, w)
    if min(min(pair) for pair in config.padding) < 0:
        return f"negative padding {config.padding}"
    return None


def _refuse_transposed(config: ConvConfig, w) -> str | None:
    """It must be the gradient of a strided convolution, whose padding is the reach of the filter less this padding."""
    if any(s != 1 for s in config.window_strides):
        return f"window_strides {config.window_strides} with lhs_dilation {config.lhs_dilation}: the kernel takes one of them"
    reaches = [(w.shape[d] - 1) * r for d, r in zip(config.rhs_spec[2:], config.rhs_dilation)]
    for (low, high), reach, dilation in zip(config.padding, reaches, config.lhs_dilation):
        if low > reach or high >= reach + dilation:
            return f"padding {config.padding} with lhs_dilation {config.lhs_dilation}: the filter reaches {tuple(reaches)} only"
    return None


def _flipped(config: ConvConfig, w):
    """The filter as the kernels of a transposed convolution take it: that of the strided one whose gradient it is."""
    return lax.rev(w, config.rhs_spec[2:]) if config.transposed else w


SMALL_FILTER = 16  # taps, and pixels that it reaches over: of 19,000 random calls with such oneDNN 3.2 had fast code for each


def _refuse_library(config: ConvConfig, args, run) -> str | None:
    """The native module is asked only where the answer is open: that takes a millisecond."""
    taps = [args[1].shape[d] for d in config.rhs_spec[2:]]
    reach = max((n - 1) * dilation + 1 for n, dilation in zip(taps, config.rhs_dilation))
    if not ffi.no_onednn() and math.prod(taps) <= SMALL_FILTER and reach <= SMALL_FILTER:
        return None
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    return ffi.refused_without_fast_code(lambda *arrays: run(arrays, ()), *types)


def _refuse_forward(config: ConvConfig, args) -> str | None:
    x, w, scale, bias, residual = config.unpack(args)
    if bias is not None and bias.dtype not in (x.dtype, jnp.float32):
        return f"bias of dtype {bias.dtype} with {x.dtype} input"
    refused = ffi.unavailable("jaxfuse_conv_fwd") or _refuse_geometry(config, w, x)
    return refused or _refuse_library(config, args, functools.partial(_run_forward, config))


def forward_attrs(config: ConvConfig):
    return config.geometry_attrs() | dict(
        has_scale=config.has_scale, has_bias=config.has_bias, has_residual=config.has_residual,
        residual_last=config.residual_last, save_z=bool(config.residual_outs))


def _run_forward(config: ConvConfig, args, mesh_axes):
    x, w, scale, bias, residual = config.unpack(widened(args))
    y = jax.eval_shape(functools.partial(convolve, config), x, jax.ShapeDtypeStruct(w.shape, x.dtype))
    if scale is not None:
        scale = scale.astype(jnp.float32)
    operands = [a for a in (x, _flipped(config, w), scale, bias, residual) if a is not None]
    results = [jax.ShapeDtypeStruct(y.shape, y.dtype)] * (1 + config.residual_outs)
    outs = ffi.call("jaxfuse_conv_fwd", results, *operands, **forward_attrs(config))
    return tuple(out.astype(config.out_dtype or args[0].dtype) for out in outs)


def _refuse_backward(linear: Linear, args) -> str | None:
    x, w, *others = args
    refused = ffi.unavailable("jaxfuse_conv_bwd") or _refuse_geometry(linear.config, w, x, *others)
    return refused or _refuse_library(linear.config, args, functools.partial(_run_backward, linear))


def _run_backward(linear: Linear, args, mesh_axes):
    config = linear.config
    x, w, *saved_activation, dy = widened(args)
    wanted = list(compress(OP.types_here(linear, args), linear.active))
    types = [jax.ShapeDtypeStruct(t.shape, jnp.promote_types(t.dtype, x.dtype)) for t in wanted]
    wants = config.unpack(linear.active)
    want_dx, want_dw, _, want_db, want_dresidual = [bool(want) for want in wants]
    is_dy = config.residual_last and want_dresidual  # the residual's gradient
    results = types[: len(types) - is_dy]
    operands = [*compress((x, _flipped(config, w)), (want_dw, want_dx)), dy, *saved_activation]
    attrs = config.geometry_attrs() | dict(
        want_dx=want_dx, want_dw=want_dw, want_db=want_db, want_dresidual=want_dresidual and not is_dy,
        by_value=config.derivative == "y")
    found = tuple(ffi.call("jaxfuse_conv_bwd", results, *operands, **attrs)) if results else ()
    if is_dy:
        found = (*found, dy)
    if want_dw:
        found = (*found[:want_dx], _flipped(config, found[want_dx]), *found[want_dx + 1 :])
    found = tuple(f.astype(t.dtype) for f, t in zip(found, wanted))
    return completed(found, _backward_axes(linear, [a.ndim for a in args]).outputs, mesh_axes)


# --- CPU kernels in plain JAX: the convolution written another way ---------------------------------------------------------


def _plain(name: str, refuse, convolve, refuse_backward=None) -> tuple[Kernel, Kernel]:
    """(forward, backward): everything as in the reference, but for the convolution itself."""

    def refused(config, args, refuse):
        return config.refuse_out_dtype() or refuse(config, *args[:2]) or _refuse_geometry(config, args[1], args[0])

    def run(config, args, mesh_axes):
        return _reference(config, *args, convolve=convolve)

    def run_backward(linear, args, mesh_axes):
        """In float32, where sums of bfloat16 would be rounded at every step."""
        types = compress(OP.types_here(linear, args), linear.active)
        wide = dataclasses.replace(linear, types=tuple(  # of one shard, which is whole here
            t.update(dtype=jnp.promote_types(t.dtype, jnp.float32), sharding=None) for t in linear.types))
        args = [a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in args]
        found = OP.transposed(wide, args, functools.partial(_tangent, convolve=convolve))
        found = [f.astype(t.dtype) for f, t in zip(found, types)]
        return completed(found, _backward_axes(linear, [a.ndim for a in args]).outputs, mesh_axes)

    forward = Kernel(name, functools.partial(refused, refuse=refuse), run, is_plain=True)
    backward = Kernel(name, lambda linear, args: refused(linear.config, args, refuse_backward or refuse), run_backward, is_plain=True)
    return forward, backward


_PLAIN = (
    _plain("scattered", scattered.refuse, scattered.convolve),
    _plain("pointwise", pointwise.refuse, pointwise.convolve),
    _plain("taps", taps.refuse, taps.convolve, taps.refuse_backward),
)


def _of_rounded(kernel: Kernel) -> Kernel:
    """A kernel that takes no filter of another dtype than x's."""
    run = kernel.run
    assert run is not None

    def refuse(config, args):
        config, args = config.rounded(args)
        return kernel.refuse(config, args)

    def run_rounded(config, args, mesh_axes):
        config, args = config.rounded(args)
        return run(config, args, mesh_axes)

    return kernel._replace(refuse=refuse, run=run_rounded)


OP = FusedOp(
    "conv",
    reference=_reference,
    residuals=_residuals,
    tangent=_tangent,
    decomposed=lambda config: functools.partial(_decomposed, config) if config.is_decomposed else None,
    for_autodiff=lambda config: dataclasses.replace(config, residual_outs=int(config.derivative == "z")),
    forward_kernels=(
        *(kernels[0] for kernels in _PLAIN),
        conv_channels_last.forward(_refuse_forward, _run_forward),
        Kernel(None, _refuse_forward, _run_forward),
        _of_rounded(conv_cudnn.KERNEL),
    ),
    backward_kernels=(
        *(kernels[1] for kernels in _PLAIN),
        conv_channels_last.backward(_refuse_backward, _run_backward),
        Kernel(None, _refuse_backward, _run_backward),
    ),
    forward_axes=_forward_axes,
    backward_axes=_backward_axes,
)
