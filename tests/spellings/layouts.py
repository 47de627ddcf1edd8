"""What only moves data around a convolution: pads, transposes, reshapes, vmap; and what of it must stay."""

import jax
import jax.numpy as jnp
from jax import lax

from layers import B, R, W, X, conv
from spellings import hits, misses

ARGS = X, W, B, R
NCHW = ("NCHW", "OIHW", "NCHW")


def pad(x, *config, value=0.0):
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


def first(x):
    return x.transpose(0, 3, 1, 2)


def last(x):
    return x.transpose(0, 2, 3, 1)


def valid(x, w):
    return conv(x, w, padding="VALID")


HITS = hits(ARGS, {
    "pad+conv": lambda x, w, b, r: valid(pad(x, (0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0)), w),
    "pad+conv, asymmetric": lambda x, w, b, r: conv(
        jnp.pad(x, ((0, 0), (0, 1), (2, 0), (0, 0))), w, window_strides=(2, 2), padding=((1, 0), (0, 1))),
    "pad+pad+conv+bias+relu": lambda x, w, b, r: jax.nn.relu(
        valid(jnp.pad(jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0))), ((0, 0), (0, 0), (1, 1), (0, 0))), w) + b),
    "transpose+conv+transpose": lambda x, w, b, r: last(conv(first(x), w.transpose(3, 2, 0, 1), dimension_numbers=NCHW)),
    "transpose+conv+bias+add+relu+transpose": lambda x, w, b, r: jax.nn.relu(last(
        conv(first(x), w.transpose(3, 2, 0, 1), dimension_numbers=NCHW) + b[:, None, None]) + r),
    "transpose+conv+bias+relu+transpose, activation first": lambda x, w, b, r: last(jax.nn.relu(
        conv(first(x), w.transpose(3, 2, 0, 1), dimension_numbers=NCHW) + b[:, None, None])),
    "transpose+pad+conv": lambda x, w, b, r: conv(
        jnp.pad(first(x), ((0, 0), (0, 0), (1, 1), (1, 1))), w, padding="VALID", dimension_numbers=("NCHW", "HWIO", "NHWC")),
    "conv+bias+relu, squeezed": lambda x, w, b, r: jax.nn.relu(
        lax.conv_general_dilated(x[:, :, :1], w[:, :1], (1, 1), ((1, 1), (0, 0)), dimension_numbers=("NHWC", "HWIO", "NHWC"))
        .squeeze(2) + b),
    "conv+bias+add+relu, positions merged": lambda x, w, b, r: jax.nn.relu(
        (conv(x, w).reshape(2, 64, 8) + b + r.reshape(2, 64, 8)).reshape(2, 8, 8, 8)),
    "conv+bias+relu, vmap over images": lambda x, w, b, r: jax.vmap(
        lambda one: jax.nn.relu(conv(one[None], w)[0] + b))(x),
    "conv+bias+add+relu, vmap over batches": lambda x, w, b, r: jax.vmap(
        lambda a, s: jax.nn.relu(conv(a, w) + b + s), 1, 1)(jnp.stack([x, 2 * x], 1), jnp.stack([r, 3 * r], 1)),
    "conv+bias+relu, vmap over weights": lambda x, w, b, r: jax.vmap(
        lambda v, c: jax.nn.relu(conv(x, v) + c))(jnp.stack([w, -w]), jnp.stack([b, 2 * b])),
    "conv+bias+relu, vmap over all": lambda x, w, b, r: jax.vmap(
        lambda a, v, c: jax.nn.relu(conv(a, v) + c))(jnp.stack([x, 2 * x]), jnp.stack([w, -w]), jnp.stack([b, 2 * b])),
})

MISSES = misses(ARGS, {
    "pads with one": (lambda x, w, b, r: valid(pad(x, (0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0), value=1.0), w),
                      "pad+conv", "pads with 1.0, the kernel with 0", ["conv"]),
    "pads with a parameter": (lambda x, w, b, r: conv(lax.pad(x, b[0], ((0, 0, 0), (1, 1, 0), (0, 0, 0), (0, 0, 0))), w),
                              "pad+conv", "pads with a computed value", ["conv"]),
    "crops": (lambda x, w, b, r: conv(pad(x, (0, 0, 0), (-1, 1, 0), (0, 0, 0), (0, 0, 0)), w),
              "pad+conv", "padding (-1, 1, 0) along axis 1", ["conv"]),
    "pads in between": (lambda x, w, b, r: conv(pad(x, (0, 0, 0), (0, 0, 1), (0, 0, 0), (0, 0, 0)), w),
                        "pad+conv", "padding (0, 0, 1) along axis 1", ["conv"]),
    "pads the channels": (lambda x, w, b, r: conv(pad(x[..., :2], (0, 0, 0), (0, 0, 0), (0, 0, 0), (1, 1, 0)), w),
                          "pad+conv", "along axis 3, which is not spatial", ["conv"]),
    "bias along the squeezed axis": (lambda x, w, b, r: conv(x, w).reshape(2, 64, 8) + r.reshape(-1)[:64, None],
                                     "conv+bias", "varies along axis 1, the channel axis is 2", ["conv"]),
    "the channels are squeezed away": (lambda x, w, b, r: conv(x, w[..., :1]).squeeze(3) + b,
                                       "conv+bias", "varies along axis 2, the channel axis is squeezed away", ["conv"]),
    "addend broadcast to full size": (lambda x, w, b, r: conv(x, w) + jnp.broadcast_to(r[:1], r.shape),
                                      "conv+bias", "varies along axis 1", ["conv"]),
})
