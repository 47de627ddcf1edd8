"""Layers as JAX users write them; each takes `inputs.operands` by position. Nothing here knows of jaxfuse."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax


def conv_bias(x, w, bias, *, shape):
    n = shape.dimensions
    strides, ones = (shape.stride,) * n, (1,) * n
    y = lax.conv_general_dilated(
        x,
        w,
        ones if shape.transposed else strides,
        [shape.padding] * n,
        lhs_dilation=strides if shape.transposed else ones,
        rhs_dilation=(shape.dilation,) * n,
        dimension_numbers=("NHWC", "HWIO", "NHWC") if n == 2 else ("NWC", "WIO", "NWC"),
        feature_group_count=shape.groups,
    )
    return y + bias


def depthwise_by_taps(x, w, bias, *, shape):
    """conv_bias of one feature in each group as a sum of shifted products: XLA computes a float64 filter's gradient in a naive
    loop, which takes ten minutes of a long sequence."""
    n = shape.dimensions
    padded = jnp.pad(x, [(0, 0), *[shape.padding] * n, (0, 0)])
    reach = (shape.output_size - 1) * shape.stride + 1

    def window(tap):
        return padded[:, *(slice(at * shape.dilation, at * shape.dilation + reach, shape.stride) for at in tap)]

    return sum(window(tap) * w[tap][0] for tap in np.ndindex(*w.shape[:n])) + bias


def dense_bias(x, w, bias, residual=None, *, shape):
    y = x @ w + bias
    return y if residual is None else y + residual


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _normalised(wide, axes):
    """As Flax computes it: the variance by one reading of x, the statistics in float32."""
    mean = jnp.mean(wide, axes, keepdims=True)
    var = jnp.maximum(0.0, jnp.mean(lax.square(wide), axes, keepdims=True) - lax.square(mean))
    return wide - mean, lax.rsqrt(var + 1e-5)


def batch_norm_add(x, gamma, beta, residual=None, *, shape):
    centred, scale = _normalised(_wide(x), (0, 1, 2))
    y = (centred * (scale * gamma) + beta).astype(x.dtype)
    return y if residual is None else y + residual


def norm(x, gamma, beta=None, *, shape):
    if shape.norm == "layer":
        return layer_norm(x, gamma, beta)
    wide = _wide(x)
    if shape.norm == "rms":
        return (wide * (lax.rsqrt(jnp.mean(lax.square(wide), -1, keepdims=True) + 1e-5) * gamma)).astype(x.dtype)
    grouped = wide.reshape(*x.shape[:-1], 32, x.shape[-1] // 32)
    centred, scale = _normalised(grouped, (*range(1, x.ndim - 1), x.ndim))
    return ((centred * scale).reshape(x.shape) * gamma + beta).astype(x.dtype)


def layer_norm(x, gamma, beta):
    centred, scale = _normalised(_wide(x), -1)
    return (centred * (scale * gamma) + beta).astype(x.dtype)


def recurrent(x, w_x, w_h, *biases, shape):
    cell, states = (_lstm_cell, 2) if shape.cell == "lstm" else (_gru_cell, 1)
    zeros = jnp.zeros((x.shape[1], shape.hidden), x.dtype)
    return lax.scan(lambda state, x: cell(state, x, w_x, w_h, *biases), (zeros,) * states, x)[1]


def _lstm_cell(state, x, w_x, w_h, bias):
    h, c = state
    i, f, g, o = jnp.split(x @ w_x + h @ w_h + bias, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def _gru_cell(state, x, w_x, w_h, bias, bias_n):
    (h,) = state
    x_r, x_z, x_n = jnp.split(x @ w_x + bias, 3, -1)
    h_r, h_z, h_n = jnp.split(h @ w_h, 3, -1)
    r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    h = (1 - z) * jnp.tanh(x_n + r * (h_n + bias_n)) + z * h
    return (h,), h


def attention(q, k, v, *, shape):
    """[batch, tokens, heads, features of a head]"""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


def bert_layer(x, *parameters, shape):
    (w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, w_1, b_1, w_2, b_2, *norms) = parameters
    heads = *x.shape[:2], shape.heads, shape.features // shape.heads
    q, k, v = ((x @ w + b).reshape(heads) for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
    mixed = attention(q, k, v, shape=shape).reshape(x.shape)
    x = layer_norm(mixed @ w_o + b_o + x, *norms[:2])
    return layer_norm(jax.nn.gelu(x @ w_1 + b_1, approximate=False) @ w_2 + b_2 + x, *norms[2:])


_ACTIVATIONS = {"none": lambda z: z, "relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": partial(jax.nn.gelu, approximate=False)}
_LAYERS = {"conv": conv_bias, "dense": dense_bias, "batch_norm": batch_norm_add, "norm": norm, "recurrent": recurrent}


def layer(case, exact=False):
    """(the layer before its activation, the activation); exact: for the float64 reference."""
    if case.kind == "transformer":
        linear = bert_layer if case.shape.inner else attention
    elif exact and case.kind == "conv" and case.shape.groups == case.shape.inputs == case.shape.outputs:
        linear = depthwise_by_taps
    else:
        linear = _LAYERS[case.kind]
    return partial(linear, shape=case.shape), _ACTIVATIONS[getattr(case.shape, "activation", "none")]


def optimizer(rule):
    """(init, update): update((parameters, state), gradients) -> ((parameters, state), nothing)."""
    if rule == "adamw":
        transform = optax.adamw(1e-3, weight_decay=1e-4)
    else:
        transform = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(1e-3, momentum=0.9))

    def update(state, gradients):
        parameters, state = state
        updates, state = transform.update(gradients, state, parameters)
        return (optax.apply_updates(parameters, updates), state), ()

    return transform.init, update
