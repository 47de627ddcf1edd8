"""LSTM and GRU cells, and loops over them."""

import jax
import jax.numpy as jnp
from jax import lax

from compare import jit, same
from jaxfuse.runtime import ffi
from layers import randn
from recognition import differentiated, fuse, narrowest, same_as_unfused

X, XS, H, C = randn(2, 4), randn(2, 6, 4), randn(2, 3), randn(2, 3, seed=1)
W, U = randn(4, 12), randn(3, 12)
NATIVE = ffi.unavailable("jaxfuse_lstm_fwd") is None
SEQUENCE = "fused" if NATIVE else ffi.unavailable("jaxfuse_lstm_fwd")


def lstm(x, h, c, w, u, sigmoid=jax.nn.sigmoid, tanh=jnp.tanh, squash=jnp.tanh):
    i, f, g, o = jnp.split(x @ w + h @ u, 4, -1)
    c = sigmoid(f) * c + jax.nn.sigmoid(i) * tanh(g)
    return jax.nn.sigmoid(o) * squash(c), c


def gru(x, h, w, u, tanh=jnp.tanh, reset=jax.nn.sigmoid):
    n = 3 * h.shape[-1]
    (rx, zx, nx), (rh, zh, nh) = jnp.split(x @ w[:, :n], 3, -1), jnp.split(h @ u[:, :n], 3, -1)
    z = jax.nn.sigmoid(zx + zh)
    return (1 - z) * tanh(nx + reset(rx + rh) * nh) + z * h


def gru_resets_first(x, h, w, u):
    z, r = jax.nn.sigmoid(x @ w[:, :3] + h @ u[:, :3]), jax.nn.sigmoid(x @ w[:, 3:6] + h @ u[:, 3:6])
    n = jnp.tanh(x @ w[:, 6:9] + (r * h) @ u[:, 6:9])
    return n + z * (h - n)


def sequence(cell, carry_on=lambda state: state):
    def fn(xs, h, c, w, u):
        return lax.scan(lambda state, x: (carry_on(cell(x, *state, w, u)), None), (h, c), xs.swapaxes(0, 1))

    return fn


# Roundings that add up over the steps: of values, and of gradients.
OVER_STEPS = dict(float32=(0.5, 2.5), bfloat16=(5, 12.5))


def same_with_gradients(fn, *args):
    """The fused program gives what the program gives, and so do the gradients through it."""
    values, gradients = OVER_STEPS[narrowest(fn, *args)]
    same_as_unfused(fn, *args, times=values)
    made, known = (jit(differentiated(f, *args))(*args)[1] for f in (fuse(fn), fn))
    same(made, known, narrowest=narrowest(fn, *args), times=gradients)
