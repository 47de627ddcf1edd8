"""When a fused sequence is worth it: LSTM and GRU over a loop of steps."""

import jax
import jax.numpy as jnp

from jaxfuse.tuning.rules.rule import OpRules, SizeSweep

SMALL = 128  # hidden units


def size(config, types) -> int:
    return types[0].shape[0]


def shape_class(config, types) -> str:
    return "small" if types[1].shape[0] < SMALL else "large"


def _lstm(x, w_x, w_h, b):
    """As Flax computes it: x [steps, batch, hidden], weights [hidden, 4 hidden]."""

    def step(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ w_x + (h @ w_h + b.astype(x.dtype)), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros_like(x[0])
    return jax.lax.scan(step, (zeros, zeros), x)[1]


def _gru(x, w_x, w_h, b):
    """As Keras computes it: x [steps, batch, hidden], weights [hidden, 3 hidden]; the reset gate comes after the product."""

    def step(h, x):
        rx, zx, nx = jnp.split(x @ w_x + b.astype(x.dtype), 3, axis=-1)
        rh, zh, nh = jnp.split(h @ w_h, 3, axis=-1)
        r, z = jax.nn.sigmoid(rx + rh), jax.nn.sigmoid(zx + zh)
        h = (1 - z) * jnp.tanh(nx + r * nh) + z * h
        return h, h

    return jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1]


def _rules(program, gates: int) -> OpRules:
    def size_sweep(batch: int, hidden: int, *steps: int) -> SizeSweep:
        weights = (hidden, gates * hidden)
        return SizeSweep(program, tuple(((n, batch, hidden), weights, weights, weights[1:]) for n in steps))

    size_sweeps = {"small": size_sweep(1, 28, 2, 4, 16, 64), "large": size_sweep(4, 256, 2, 16, 32)}
    return OpRules("steps", size, size_sweeps, shape_class)


LSTM, GRU = _rules(_lstm, 4), _rules(_gru, 3)
