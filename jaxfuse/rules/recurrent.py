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


def _rules(program, gates: int, *rules: Rule) -> OpRules:
    def ladder(batch: int, hidden: int, *steps: int) -> Ladder:
        weights = (hidden, gates * hidden)
        return Ladder(program, tuple(((n, batch, hidden), weights, weights, weights[1:]) for n in steps))

    ladders = {"small": ladder(1, 28, 2, 4, 16, 64), "large": ladder(4, 256, 2, 16, 32)}
    return OpRules("steps", size, rules, ladders, shape_class)


# "large" was measured at batch 8, hidden 512.
LSTM = _rules(
    _lstm, 4,
    Rule(points(
        (2, (18.1, 10.6), (27.1, 22.5)),
        (4, (18.4, 11.3), (39.6, 28.4)),
        (16, (34.1, 16.2), (68.7, 43.9)),
        (64, (82.5, 41.9), (215.0, 110.0))), dtype="float32", shape="small"),
    Rule(points(
        (2, (728.0, 675.0), (6130, 5600)),
        (16, (3610, 3280), (29800, 14800)),
        (32, (6580, 6260), (54800, 25400)),
        (64, (12500, 11300), (107000, 47200))), dtype="float32", shape="large"),
    Rule(points(
        (2, (17.8, 10.3), (47.0, 54.8)),
        (4, (19.0, 10.6), (64.5, 62.1)),
        (16, (44.9, 21.7), (195.0, 80.6)),
        (64, (176.0, 46.8), (1380, 211.0))), dtype="bfloat16", shape="small"),
    Rule(points(
        (2, (758.0, 927.0), (4530, 8750)),
        (16, (3800, 4600), (35600, 19500)),
        (32, (7540, 6710), (69500, 29400)),
        (64, (14800, 12800), (143000, 50600))), dtype="bfloat16", shape="large"),
)  # fmt: skip
GRU = _rules(
    _gru, 3,
    Rule(points(
        (2, (13.0, 9.65), (22.4, 34.5)),
        (4, (13.3, 9.71), (31.2, 50.3)),
        (16, (20.1, 14.7), (63.4, 69.7)),
        (64, (44.9, 33.5), (191.0, 124.0))), dtype="float32", shape="small"),
    Rule(points(
        (2, (518.0, 536.0), (2710, 6030)),
        (16, (2970, 2620), (18300, 17900)),
        (32, (5070, 4440), (34100, 31100)),
        (64, (9880, 8720), (66900, 55100))), dtype="float32", shape="large"),
    Rule(points(
        (2, (14.0, 11.0), (41.2, 51.0)),
        (4, (15.1, 11.6), (50.5, 61.6)),
        (16, (29.1, 16.6), (155.0, 77.8)),
        (64, (130.0, 47.6), (1130, 295.0))), dtype="bfloat16", shape="small"),
    Rule(points(
        (2, (502.0, 629.0), (3370, 9170)),
        (16, (2860, 2640), (23000, 22300)),
        (32, (5280, 6450), (47100, 34400)),
        (64, (10600, 10300), (89900, 62200))), dtype="bfloat16", shape="large"),
)  # fmt: skip
