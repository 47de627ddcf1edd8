"""The depthwise convolution on CUDA: scale, bias and activation, and their gradients, in the passes of the convolution's own
kernels. XLA:GPU gives the bare convolution to cuDNN and makes passes of their own of the rest.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfuse.ops.batch_axes import completed
from jaxfuse.ops.conv.config import convolve
from jaxfuse.ops.stage import FLOATS, Kernel
from jaxfuse.runtime import cuda
from jaxfuse.runtime.reasons import no_kernel


def _refuse(config, x, w) -> str | None:
    if config.feature_group_count == 1:
        return no_kernel()
    channels, features = x.shape[config.lhs_spec[1]], w.shape[config.rhs_spec[0]]
    if not config.feature_group_count == channels == features:
        return no_kernel(f"feature_group_count {config.feature_group_count} for {channels} channels and {features} features")
    if str(x.dtype) not in FLOATS or w.dtype != x.dtype:
        return f"dtypes {x.dtype}, {w.dtype}: the kernel takes one of {', '.join(FLOATS)}"
    if 0 in x.shape or 0 in w.shape:
        return "an empty array"
    if config.transposed or len(x.shape) not in (3, 4):
        return no_kernel(f"depthwise, x of rank {len(x.shape)}, lhs_dilation {config.lhs_dilation}")
    channels_last = (0, len(x.shape) - 1, *range(1, len(x.shape) - 1))
    if (config.lhs_spec, config.out_spec) != (channels_last,) * 2:
        return f"axes {config.lhs_spec} -> {config.out_spec}: the kernel takes channels-last"
    return None


def _refuse_forward(config, args) -> str | None:
    if reason := config.refuse_out_dtype() or _refuse(config, *args[:2]):
        return reason
    return no_kernel("depthwise + residual") if config.has_residual else cuda.unavailable("jaxfuse_depthwise_fwd")


def _refuse_backward(linear, args) -> str | None:
    return _refuse(linear.config, *args[:2]) or cuda.unavailable("jaxfuse_depthwise_bwd")


def _images(array):
    """(n, height, width, channels): a sequence is an image of one line."""
    return jnp.expand_dims(array, 1) if array.ndim == 3 else array


def _filter(config, w):
    """(height, width, 1, channels)"""
    w = lax.transpose(w, _filter_axes(config))
    return jnp.expand_dims(w, 0) if w.ndim == 3 else w


def _filter_axes(config):
    features, per_group, *places = config.rhs_spec
    return *places, per_group, features


def _attributes(config):
    lows, highs = zip(*config.padding)
    of_lines = dict(window_strides=1, rhs_dilation=1, padding_low=0, padding_high=0)
    given = dict(window_strides=config.window_strides, rhs_dilation=config.rhs_dilation, padding_low=lows, padding_high=highs)
    pairs = {name: np.array((of_lines[name], *values)[-2:], np.int64) for name, values in given.items()}
    return pairs | config.activation.attributes()


def _run_forward(config, args, mesh_axes):
    x, w, scale, bias, _ = config.unpack(args)
    y = jax.eval_shape(functools.partial(convolve, config), x, w)
    images = jax.eval_shape(_images, y)
    vectors = [v.astype(jnp.float32) for v in (scale, bias) if v is not None]
    outs = cuda.call("jaxfuse_depthwise_fwd", [images] * (1 + config.residual_outs), _images(x), _filter(config, w), *vectors,
                     has_scale=config.has_scale, has_bias=config.has_bias, save_z=bool(config.residual_outs), **_attributes(config))
    return tuple(out.reshape(y.shape) for out in outs)


def _run_backward(axes, linear, args, mesh_axes):
    """All gradients, of which the wanted ones are given on. That of a residual is dy·act'(z), or dy if it was added last."""
    config = linear.config
    x, w, *saved_activation, dy = args
    images, window = _images(x), _filter(config, w)
    types = [images, jax.ShapeDtypeStruct(window.shape, jnp.float32), jax.ShapeDtypeStruct(window.shape[-1:], jnp.float32),
             *[_images(dy)] * len(saved_activation)]
    dx, dw, db, *dz = cuda.call(
        "jaxfuse_depthwise_bwd", [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types], images, window, _images(dy),
        *map(_images, saved_activation), by_value=config.derivative == "y", **_attributes(config))
    dw = lax.transpose(dw.reshape([w.shape[d] for d in _filter_axes(config)]), np.argsort(_filter_axes(config)))
    dresidual = dy if config.residual_last or not dz else dz[0]
    gradients = [dx.reshape(x.shape), dw]
    if config.has_bias:
        gradients.append(db)
    if config.has_residual:
        gradients.append(dresidual.reshape(dy.shape))
    found = [g.astype(t.dtype) for g, t, active in zip(gradients, linear.types, linear.active, strict=True) if active]
    return completed(found, axes(linear, [a.ndim for a in args]).outputs, mesh_axes)


FORWARD = Kernel("depthwise", _refuse_forward, _run_forward, platform="cuda")


def backward(axes) -> Kernel:
    """`axes`: the batch axes of the op's backward stage."""
    return Kernel("depthwise", _refuse_backward, functools.partial(_run_backward, axes), platform="cuda")
