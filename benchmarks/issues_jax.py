"""The reported programs as JAX users write them. Each is made by a function of `fuse`, which goes where its user would put it,
and takes `issues.arrays`."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from . import issues


def _depthwise_nnx(fuse, of):
    def forward(x, w, bias):
        channels = x.shape[-1]
        layer = nnx.Conv(channels, channels, (3, 3), padding=1, feature_group_count=channels, rngs=nnx.Rngs(0))
        layer.kernel[...], layer.bias[...] = w, bias
        return layer(x)

    return lambda x, w, bias: {"y": fuse(forward)(x, w, bias)}


def _grouped_stack(fuse, of):
    def loss(weights, x, target):
        for w in weights:
            x = lax.conv_general_dilated(
                x, w, (1,), "SAME", dimension_numbers=("NCW", "IOW", "NCW"), feature_group_count=x.shape[1])
        return jnp.mean((x - target) ** 2)

    def step(x, target, **weights):
        value, gradients = jax.value_and_grad(fuse(loss))(list(weights.values()), x, target)
        return {"loss": value, **{f"d{name}": gradient for name, gradient in zip(weights, gradients)}}

    return step


def _dilated_depthwise(fuse, of):
    @fuse
    def forward(x, w):
        return lax.conv_general_dilated(
            x, w, (1,), "SAME", rhs_dilation=(of["dilation"],), dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=x.shape[-1])

    return lambda x, w: {"y": forward(x, w)}


def _conv_in_loop(fuse, of):
    @fuse
    def forward(x, w):
        return lax.fori_loop(0, 2, lambda _, x: lax.conv(x, w, (1,), "VALID"), x)

    return lambda x, w: {"y": forward(x, w)}


def _transposed_1d(fuse, of):
    @fuse
    def forward(x, w):
        return lax.conv_transpose(x, w, (of["hop"],), "VALID", dimension_numbers=("NCW", "IOW", "NCW"))

    return lambda x, w: {"y": forward(x, w)}


def _transposed_3d(x, w, bias):
    """Equinox's ConvTranspose with stride 2, padding 1 and output padding 1, of one sample [channels, *space]."""
    names = ("NCDHW", "OIDHW", "NCDHW")
    return lax.conv_general_dilated(x[None], w, (1, 1, 1), [(1, 2)] * 3, (2, 2, 2), dimension_numbers=names)[0] + bias


def _transposed_3d_gradients(fuse, of):
    def loss(parameters, x):
        return _transposed_3d(x, *parameters).mean()

    def gradients(x, w, bias):
        dw, dbias = jax.vmap(jax.grad(fuse(loss)), (None, 0))((w, bias), x)
        return {"dw": dw, "dbias": dbias}

    return gradients


def _transposed_3d_filter_gradient(fuse, of):
    def loss(w, bias, x):
        return _transposed_3d(x, w, bias).mean()

    return lambda x, w, bias: {"dw": fuse(jax.grad(loss))(w, bias, x[0])}


def _per_sample(fuse, of):
    """The logarithm of an amplitude, averaged over a sample's symmetric images on a periodic lattice."""

    def amplitude(parameters, images):
        w, bias = parameters
        padded = jnp.pad(images, ((0, 0), (0, 0), (0, 1), (0, 1)), mode="wrap")
        return jax.nn.relu(lax.conv(padded, w, (1, 1), "VALID") + bias).sum((1, 2, 3)).mean()

    def gradients(x, w, bias):
        dw, dbias = jax.vmap(jax.grad(fuse(amplitude)), (None, 0))((w, bias), x)
        return {"dw": dw, "dbias": dbias}

    return gradients


def _lstm(fuse, of):
    def loss(x, wi, wh, bias):
        def cell(state, x):
            h, c = state
            i, f, g, o = jnp.split(x @ wi + h @ wh + bias, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((x.shape[0], wh.shape[0]), x.dtype)
        return jnp.mean(lax.scan(cell, (zero, zero), x.swapaxes(0, 1))[1] ** 2)

    def step(*arguments):
        value, gradients = jax.value_and_grad(fuse(loss), (0, 1, 2, 3))(*arguments)
        return {"loss": value, **dict(zip(("dx", "dwi", "dwh", "dbias"), gradients))}

    return lambda x, wi, wh, bias: step(x, wi, wh, bias)


_PROGRAMS = {
    "jax#23713": _depthwise_nnx,
    "jax#13800": _grouped_stack,
    "jax#26266": _dilated_depthwise,
    "jax#12868": _conv_in_loop,
    "jax#23783": _transposed_1d,
    "jax#31662": _transposed_3d_gradients,
    "xla#34273": _transposed_3d_filter_gradient,
    "jax#1606": _per_sample,
    "jax#13111": _lstm,
}


def program(case, fuse):
    """The function of `issues.arrays(case)`, by keyword, that gives the outputs by name."""
    return _PROGRAMS[case.name](fuse, issues.sizes(case.name, case.shape.small))
