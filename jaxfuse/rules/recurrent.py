"""When a fused sequence is worth it: LSTM and GRU over a loop of steps."""

import jax
import jax.numpy as jnp

from jaxfuse.rules.rule import Ladder, OpRules, Rule, points

SMALL = 128  # hidden units


def size(config, types) -> int:
    return types[0].shape[0]


def shape_class(config, types) -> str:
    return "small" if types[1].shape[0] < SMALL else "large"


def _lstm(x, w_x, w_h, b):
    """As Flax computes it: x [steps, batch, hidden], weights [hidden, 4 hidden]."""

    def step(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ w_x + (h @ w_h + b), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros_like(x[0])
    return jax.lax.scan(step, (zeros, zeros), x)[1]


def _gru(x, w_x, w_h, b):
    """As Keras computes it: x [steps, batch, hidden], weights [hidden, 3 hidden]; the reset gate comes after the product."""

    def step(h, x):
        rx, zx, nx = jnp.split(x @ w_x + b, 3, axis=-1)
        rh, zh, nh = jnp.split(h @ w_h, 3, axis=-1)
        r, z = jax.nn.sigmoid(rx + rh), jax.nn.sigmoid(zx + zh)
        h = (1 - z) * jnp.tanh(nx + r * nh) + z * h
        return h, h

    return jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1]


def _rules(program, gates: int, *rules: Rule) -> OpRules:
    def ladder(batch: int, hidden: int, *steps: int) -> Ladder:
        weights = (hidden, gates * hidden)
        return Ladder(program, tuple(((n, batch, hidden), weights, weights, weights[1:]) for n in steps))

    ladders = {"small": ladder(1, 28, 2, 4, 16, 64), "large": ladder(8, 512, 2, 16, 32, 64)}
    return OpRules("steps", size, rules, ladders, shape_class)


LSTM = _rules(
    _lstm, 4,
    Rule(points((1, (8, 9), (18, 25)), (16, (31, 24), (105, 72)), (64, (76, 59), (220, 140))), shape="small"),
    Rule(points(
        (2, (430, 700), (4100, 3100)),
        (16, (3300, 3700), (28800, 10400)),
        (32, (6500, 6300), (54600, 18700)),
        (64, (12500, 12100), (107000, 36000))), shape="large"),
)  # fmt: skip
GRU = _rules(
    _gru, 3,
    Rule(points((64, (57, 55), (230, 120))), shape="small"),
    Rule(points((16, (2500, 3100), (19800, 9100)), (32, (5600, 5100), (71000, 14800)), (64, (9800, 8600), (73000, 29000))),
         shape="large"),
)  # fmt: skip
