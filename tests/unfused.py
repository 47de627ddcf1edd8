"""The ops as anybody would write them, in the precision of their arguments: what the fused ones are compared with."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxfuse.ops.activations import named


def _conv(x, w, bias=None, residual=None, *, scale=None, activation=None, alpha=0.0, residual_last=False,
          window_strides=None, padding="SAME", lhs_dilation=None, rhs_dilation=None, feature_group_count=1,
          dimension_numbers=None):
    spatial = x.ndim - 2
    letters = "DHW"[3 - spatial :]
    names = dimension_numbers or (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    y = lax.conv_general_dilated(
        x, w, window_strides or (1,) * spatial, padding, lhs_dilation, rhs_dilation, dimension_numbers=names,
        feature_group_count=feature_group_count)
    per_channel = [-1 if letter == "C" else 1 for letter in names[2]]
    if scale is not None:
        y = y * scale.reshape(per_channel).astype(y.dtype)
    if bias is not None:
        y = y + bias.reshape(per_channel).astype(y.dtype)
    if residual is not None and not residual_last:
        y = y + residual
    y = named(activation or "none", alpha).value(y)
    return (y + residual if residual_last and residual is not None else y,)


def _batch_norm(x, gamma, beta, residual=None, *, activation=None, alpha=0.0, epsilon=1e-5, axis=-1, mean=None, var=None):
    """As Flax does it: statistics and arithmetic in at least float32, add and activation in x's dtype."""
    others = [d for d in range(x.ndim) if d != axis % x.ndim]
    wide, statistics = x.astype(jnp.promote_types(x.dtype, jnp.float32)), ()
    if mean is None:
        mean, var = wide.mean(others), wide.var(others)
        statistics = mean, var
    mean, scale, beta = [jnp.expand_dims(v, others) for v in (mean, gamma * lax.rsqrt(var + epsilon), beta)]
    y = ((wide - mean) * scale + beta).astype(x.dtype)
    if residual is not None:
        y = y + residual
    return named(activation or "none", alpha).value(y), *statistics


def _max_pool(x, *, window_shape, strides=None, padding="VALID"):
    whole = lambda sizes: (1, *sizes, 1)
    if not isinstance(padding, str):
        padding = ((0, 0), *padding, (0, 0))
    strides = strides or (1,) * len(window_shape)
    return (lax.reduce_window(x, -jnp.inf, lax.max, whole(window_shape), whole(strides), padding),)


def _global_average_pool(x):
    return (x.mean(tuple(range(1, x.ndim - 1))),)


def _dense(x, w, bias=None, residual=None, *, activation=None, alpha=0.0, dimension_numbers=None,
           preferred_element_type=None):
    numbers = dimension_numbers or (((x.ndim - 1,), (0,)), ((), ()))
    if x.dtype == jnp.float64:  # what every other dtype is compared with
        preferred_element_type = None
    y = lax.dot_general(x, w, numbers, preferred_element_type=preferred_element_type)
    for term in (bias, residual):
        y = y if term is None else y + term.astype(y.dtype)
    return (named(activation or "none", alpha).value(y),)


def _layer_norm(x, gamma, beta=None, residual=None, *, activation=None, epsilon=1e-6, return_sum=False, centered=True):
    """As Flax does it: statistics and arithmetic in at least float32, add and activation in x's dtype."""
    s = x if residual is None else x + residual
    wide = s.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = wide.mean(-1, keepdims=True) if centered else 0
    y = (wide - mean) * lax.rsqrt(jnp.square(wide - mean).mean(-1, keepdims=True) + epsilon) * gamma
    y = named(activation or "none").value((y if beta is None else y + beta).astype(x.dtype))
    return (y, s) if return_sum else (y,)


def _group_norm(x, gamma, beta, *, groups, activation=None, epsilon=1e-6, axis=-1):
    last = jnp.moveaxis(x, axis, -1)
    grouped = last.reshape(*last.shape[:-1], groups, last.shape[-1] // groups).astype(jnp.promote_types(x.dtype, jnp.float32))
    over = (*range(1, last.ndim - 1), last.ndim)
    mean, var = grouped.mean(over, keepdims=True), grouped.var(over, keepdims=True)
    y = ((grouped - mean) * lax.rsqrt(var + epsilon)).reshape(last.shape) * gamma + beta
    return (named(activation or "none").value(jnp.moveaxis(y, -1, axis).astype(x.dtype)),)


def _gates(x, h, w_x, w_h, bias, order, forget_bias=0.0):
    z = dict(zip(order, jnp.split(x @ w_x + (0 if h is None else h @ w_h) + (0 if bias is None else bias), len(order), -1)))
    return z | ({"f": z["f"] + jnp.asarray(forget_bias, x.dtype)} if "f" in z else {})


def _lstm(x, w_x, w_h, bias=None, h0=None, c0=None, *, gate_order="ifgo", forget_bias=0.0, reverse=False):
    def step(state, x):
        h, c = state
        z = _gates(x, h.astype(x.dtype), w_x, w_h, bias, gate_order, forget_bias)
        c = (jax.nn.sigmoid(z["f"]) * c + jax.nn.sigmoid(z["i"]) * jnp.tanh(z["g"])).astype(c.dtype)
        h = (jax.nn.sigmoid(z["o"]) * jnp.tanh(c)).astype(h.dtype)
        return (h, c), h

    zeros = jnp.zeros((x.shape[1], w_h.shape[0]), x.dtype)
    (h, c), hs = lax.scan(step, (zeros if h0 is None else h0, zeros if c0 is None else c0), x, reverse=reverse)
    return hs, h, c


def _gru(x, w_x, w_h, bias=None, bias_n=None, h0=None, *, gate_order="rzn", reset_after=True, reverse=False):
    def step(h, x):
        low = h.astype(x.dtype)
        given = _gates(x, None, w_x, w_h, bias, gate_order)
        w = dict(zip(gate_order, jnp.split(w_h, 3, -1)))
        r, z = (jax.nn.sigmoid(given[gate] + low @ w[gate]) for gate in "rz")
        inner = low @ w["n"] + (0 if bias_n is None else bias_n)
        n = jnp.tanh(given["n"] + (r * inner if reset_after else (r * h).astype(x.dtype) @ w["n"]))
        h = ((1 - z) * n + z * h).astype(h.dtype)
        return h, h

    h0 = jnp.zeros((x.shape[1], w_h.shape[0]), x.dtype) if h0 is None else h0
    h, hs = lax.scan(step, h0, x, reverse=reverse)
    return hs, h


def _attention(q, k, v, bias=None, mask=None, factor=1, *, scale=None):
    """As `jax.nn.dot_product_attention` does it: scores and softmax in at least float32."""
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], 2) for a in (k, v))
    scores = jnp.einsum("btnd,bsnd->bnts", q, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else jnp.where(mask, scores, -1e30)
    return (jnp.einsum("bnts,bsnd->btnd", (jax.nn.softmax(scores) * factor).astype(q.dtype), v),)


UNFUSED = dict(attention=_attention, conv=_conv, batch_norm=_batch_norm, dense=_dense, global_average_pool=_global_average_pool,
               gru=_gru, group_norm=_group_norm, layer_norm=_layer_norm, lstm=_lstm, max_pool=_max_pool,
               rms_norm=functools.partial(_layer_norm, centered=False))
