"""Convolutions with what follows them."""

import jax
import jax.numpy as jnp
from jax import lax

from layers import BETA, GAMMA, MEAN, VAR, B, R, W, X, conv
from spellings import Miss, hits, misses

ARGS = X, W, B, R

HITS = hits(ARGS, {
    "conv": lambda x, w, b, r: conv(x, w),
    "conv+bias": lambda x, w, b, r: conv(x, w) + b,
    "conv+bias, bias first": lambda x, w, b, r: b + conv(x, w),
    "conv+bias, [1,1,1,C]": lambda x, w, b, r: conv(x, w) + b[None, None, None],
    "conv+bias, broadcast": lambda x, w, b, r: conv(x, w) + jnp.broadcast_to(b, r.shape),
    "conv+bias, a number": lambda x, w, b, r: conv(x, w) + 0.5,
    "conv+scale": lambda x, w, b, r: conv(x, w) * 0.5,
    "conv+scale, an array of one element": lambda x, w, b, r: b[:1].reshape(1, 1, 1, 1) * conv(x, w),
    "conv+scale+add+relu, a number": lambda x, w, b, r: jax.nn.relu(r + 0.2 * conv(x, w)),
    "conv+bias+scale+add, scaled after the bias": lambda x, w, b, r: r + b[0] * (conv(x, w) + b),
    "conv+bias+add+relu, scaled residual": lambda x, w, b, r: jax.nn.relu(conv(x, w) + b + 0.2 * r),
    "conv+relu+add, residual scaled after the activation": lambda x, w, b, r: jax.nn.relu(conv(x, w)) + b[0] * r,
    "conv+bias+add, scaled residual read elsewhere": lambda x, w, b, r: (lambda s: (conv(x, w) + b + s, s))(0.2 * r),
    "conv+bias+relu": lambda x, w, b, r: jax.nn.relu(conv(x, w) + b),
    "conv+bias+relu, with its mask": lambda x, w, b, r: (lambda z: (jax.nn.relu(z), z > 0))(conv(x, w) + b),
    "conv+bias+relu, groups of the batch": lambda x, w, b, r: jax.nn.relu(conv(x, w, batch_group_count=2) + b),
    "transpose+conv+bias, groups of the batch": lambda x, w, b, r: conv(
        x.transpose(0, 3, 1, 2), w, batch_group_count=2, dimension_numbers=("NCHW", "HWIO", "NHWC")) + b,
    "conv+relu": lambda x, w, b, r: jax.nn.relu(conv(x, w)),
    "conv+bias+maximum0": lambda x, w, b, r: jnp.maximum(conv(x, w) + b, 0),
    "conv+bias+relu6": lambda x, w, b, r: jax.nn.relu6(conv(x, w) + b),
    "conv+bias+clip6": lambda x, w, b, r: jnp.minimum(jnp.maximum(conv(x, w) + b, 0), 6),
    "conv+bias+clip, relu6 with 5": lambda x, w, b, r: jnp.minimum(jnp.maximum(conv(x, w) + b, 0), 5),
    "conv+bias+leaky_relu": lambda x, w, b, r: jax.nn.leaky_relu(conv(x, w) + b),
    "conv+bias+leaky_relu, spelled": lambda x, w, b, r: (lambda z: jnp.where(z >= 0, z, 0.1 * z))(conv(x, w) + b),
    "conv+bias+elu": lambda x, w, b, r: jax.nn.elu(conv(x, w) + b),
    "conv+bias+sigmoid": lambda x, w, b, r: jax.nn.sigmoid(conv(x, w) + b),
    "conv+bias+tanh": lambda x, w, b, r: jnp.tanh(conv(x, w) + b),
    "conv+bias+silu": lambda x, w, b, r: jax.nn.silu(conv(x, w) + b),
    "conv+bias+silu, spelled": lambda x, w, b, r: (lambda z: z / (1 + jnp.exp(-z)))(conv(x, w) + b),
    "conv+bias+gelu": lambda x, w, b, r: jax.nn.gelu(conv(x, w) + b, approximate=False),
    "conv+bias+gelu_tanh": lambda x, w, b, r: jax.nn.gelu(conv(x, w) + b),
    "conv+bias+hard_swish": lambda x, w, b, r: jax.nn.hard_swish(conv(x, w) + b),
    "conv+bias+softplus": lambda x, w, b, r: jax.nn.softplus(conv(x, w) + b),
    "conv+bias+add": lambda x, w, b, r: conv(x, w) + b + r,
    "conv+bias+add+relu, residual subtracted": lambda x, w, b, r: jax.nn.relu(conv(x, w) + b - r),
    "conv+bias+add+silu, residual subtracted and scaled": lambda x, w, b, r: jax.nn.silu(conv(x, w) + b - 0.5 * r),
    "conv+bias+add, residual first": lambda x, w, b, r: r + (conv(x, w) + b),
    "conv+bias+add, bias last": lambda x, w, b, r: conv(x, w) + r + b,
    "conv+bias+relu+add": lambda x, w, b, r: jax.nn.relu(conv(x, w) + b) + r,
    "conv+bias+silu+add, residual first": lambda x, w, b, r: r + jax.nn.silu(b + conv(x, w)),
    "pad+conv+bias, transposed": lambda x, w, b, r: conv(
        jnp.pad(x, ((0, 0), (1, 0), (0, 1), (0, 0))), w, lhs_dilation=(2, 2), padding=((-1, 0), (0, 0))) + b,
    "conv+bias+add+relu": lambda x, w, b, r: jax.nn.relu(conv(x, w) + b + r),
    "conv+bn+relu": lambda x, w, b, r: jax.nn.relu((conv(x, w) - MEAN) * (lax.rsqrt(VAR + 1e-5) * GAMMA) + BETA),
    "conv+bn+add+relu": lambda x, w, b, r: jax.nn.relu(r + conv(x, w) * (GAMMA / jnp.sqrt(VAR + 1e-3)) + BETA),
    "conv+bias+relu, jitted": jax.jit(lambda x, w, b, r: jax.nn.relu(conv(x, w) + b)),
    "conv+bias+relu, in pieces": lambda x, w, b, r: jax.jit(jax.nn.relu)(jax.jit(jnp.add)(jax.jit(conv)(x, w), b)),
    "conv+bias+relu, strided and dilated": lambda x, w, b, r: jax.nn.relu(
        conv(x, w, window_strides=(2, 1), rhs_dilation=(1, 2), padding=((0, 1), (2, 0))) + b),
    "conv+bias+relu, depthwise": lambda x, w, b, r: jax.nn.relu(conv(x, w[:, :, :1], feature_group_count=4) + b),
    "conv+bias+relu, transposed": lambda x, w, b, r: jax.nn.relu(lax.conv_transpose(x, w, (2, 2), "SAME") + b),
    "conv+bias+silu, transposed, valid": lambda x, w, b, r: jax.nn.silu(lax.conv_transpose(x, w, (2, 3), "VALID") + b),
    "conv+bias, transposed, dilated": lambda x, w, b, r: lax.conv_transpose(x, w, (2, 2), "SAME", rhs_dilation=(2, 2)) + b,
    "conv+bias, transposed, of the gradient": lambda x, w, b, r: lax.conv_transpose(
        x, w.swapaxes(2, 3), (2, 2), "SAME", transpose_kernel=True) + b,
    "conv+relu, float16": lambda x, w, b, r: jax.nn.relu(conv(x.astype(jnp.float16), w.astype(jnp.float16))).astype(jnp.float32),
    "conv+relu, a reshape between": lambda x, w, b, r: jax.nn.relu(conv(x, w).reshape(2, 64, 8)),
    "transpose+conv+bias+relu, NCHW": lambda x, w, b, r: jax.nn.relu(
        conv(x.transpose(0, 3, 1, 2), w, dimension_numbers=("NCHW", "HWIO", "NCHW")) + b[:, None, None]),
})


def preactivation(x, w, b, r):
    total = conv(x, w) + b + r
    return jax.nn.relu(total), total


def returned(x, w, b, r):
    y = conv(x, w)
    return y, y + b


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


# what follows is no row of its own
NO_ROW = {
    "optimization_barrier": lambda x, w, b, r: jax.nn.relu(lax.optimization_barrier(conv(x, w))),
    "custom_vjp of the user's": lambda x, w, b, r: straight_through(conv(x, w)),
    "a reshape of the channels between": lambda x, w, b, r: jax.nn.relu(conv(x, w).reshape(2, 64 * 8)),
    "twice the value": lambda x, w, b, r: (lambda y: y + y)(conv(x, w)),
}
MISSES = {name: Miss(function, ARGS, [], ["conv"]) for name, function in NO_ROW.items()} | misses(ARGS, {
    "inner value returned": (returned, "conv+bias", "returned by the program", ["conv"]),
    "sum read twice": (preactivation, "conv+bias+add+relu", "returned by the program", ["conv+bias+add"]),
    "read by another": (lambda x, w, b, r: (lambda y: jax.nn.relu(y) + jnp.cos(y))(conv(x, w) + b),
                        "conv+bias+relu", "read 2 times: by custom_jvp_call", ["conv+bias"]),
    "bias along another axis": (lambda x, w, b, r: conv(x, w) + b[:, None], "conv+bias", "varies along axis 2", ["conv"]),
    "addend broadcasts": (lambda x, w, b, r: conv(x, w) + r[:1], "conv+bias", "varies along axis 1", ["conv"]),
    "scaled after the residual": (lambda x, w, b, r: (conv(x, w) + r) * b, "conv+add+scale", "scales the sum", ["conv+add"]),
    "added before and after": (lambda x, w, b, r: jax.nn.relu(conv(x, w) + r) + r, "conv+add+relu+add",
                               "adds a second full-size value", ["conv+add+relu"]),
    "transposed and strided": (lambda x, w, b, r: conv(x, w, lhs_dilation=(2, 2), window_strides=(2, 2), padding=((1, 1), (1, 1))),
                               "conv", "window_strides (2, 2) with lhs_dilation (2, 2)", []),
    "transposed, padded beyond the filter": (lambda x, w, b, r: conv(x, w, lhs_dilation=(2, 2), padding=((3, 3), (1, 1))),
                                             "conv", "the filter reaches (2, 2) only", []),
    "negative padding": (lambda x, w, b, r: conv(x, w, padding=((-1, 0), (0, 0))), "conv", "negative padding", []),
})

# `r - conv(x)`, as networks have it that predict noise, is r + (-1)·conv(x): one site. Of `conv(x) - r` the sign of r would
# be a pass of its own.
SUBTRACTED = {
    "conv+scale+add": lambda x, w, b, r: r - conv(x, w),
    "conv+bias+scale+add": lambda x, w, b, r: r - (conv(x, w) + b),
    "conv+scale+bias": lambda x, w, b, r: b - conv(x, w),
    "conv+scale+add+relu": lambda x, w, b, r: jax.nn.relu(r - conv(x, w)),
    "conv+bias+scale+add+silu": lambda x, w, b, r: jax.nn.silu(r - (b + conv(x, w))),
    "conv+bias+scale+add+tanh+transpose, in NCHW": lambda x, w, b, r: jnp.tanh(
        r.transpose(0, 3, 1, 2) - (b + conv(x, w)).transpose(0, 3, 1, 2)),
}
HITS |= hits(ARGS, SUBTRACTED)
HITS |= hits(ARGS, {"conv+bias+scale+add+relu": lambda x, w, b, r: jax.nn.relu(r - (conv(x, w) + b))}, both=True)
MISSES |= misses(ARGS, {
    "from a row": (lambda x, w, b, r: r[:1] - conv(x, w), "conv+bias", "varies along axis 1", ["conv"]),
    "a sum is subtracted": (lambda x, w, b, r: R[::-1] - (conv(x, w) + r), "conv+add+scale", "scales the sum", ["conv+add"]),
    "from itself": (lambda x, w, b, r: (lambda y: y - y)(conv(x, w)), None, None, ["conv"]),
})
