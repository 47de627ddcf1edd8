"""When a fused sequence is worth it: LSTM and GRU over a loop of steps."""

import jax
import jax.numpy as jnp

from jaxfuse.tuning.rules.rule import ZEN_3, ZEN_4, Ladder, OpRules, Rule, points

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
    def size_sweep(batch: int, hidden: int, *steps: int) -> Ladder:
        weights = (hidden, gates * hidden)
        return Ladder(program, tuple(((n, batch, hidden), weights, weights, weights[1:]) for n in steps))

    size_sweeps = {"small": size_sweep(1, 28, 2, 4, 16, 64), "large": size_sweep(4, 256, 2, 16, 32)}
    return OpRules("steps", size, rules, size_sweeps, shape_class, ("float32", "bfloat16", "float16"))


# "large" was measured at batch 8, hidden 512 on Zen 4.
LSTM = _rules(
    _lstm, 4,
    Rule(points(
        (2, (46.1, 22.7), (65.3, 63.5)),
        (4, (37.5, 30.8), (54.1, 62.9)),
        (16, (58.3, 39.2), (122, 81.4)),
        (64, (119, 79.1), (407, 225))), dtype="float32", shape="small", **ZEN_3),
    Rule(points(
        (2, (28.9, 28.0), (89.2, 98.5)),
        (4, (43.0, 24.1), (86.6, 97.3)),
        (16, (81.1, 49.3), (312, 155)),
        (64, (219, 91.7), (1690, 341))), dtype="bfloat16", shape="small", **ZEN_3),
    Rule(points(
        (2, (40.7, 26.6), (64.3, 56.2)),
        (4, (43.3, 32.9), (78.3, 66.9)),
        (16, (71, 44.2), (181, 86.2)),
        (64, (159, 87.4), (536, 207))), dtype="float16", shape="small", **ZEN_3),
    Rule(points(
        (2, (273, 286), (1390, 1280)),
        (16, (1420, 808), (8420, 3700)),
        (32, (2610, 1410), (17000, 7700))), dtype="float32", shape="large", **ZEN_3),
    Rule(points(
        (2, (340, 382), (1640, 3110)),
        (16, (1710, 1080), (11900, 6210)),
        (32, (3650, 2060), (23900, 9620))), dtype="bfloat16", shape="large", **ZEN_3),
    Rule(points(
        (2, (287, 309), (1240, 1250)),
        (16, (1330, 735), (7700, 3850)),
        (32, (2680, 1130), (15100, 4940))), dtype="float16", shape="large", **ZEN_3),
    Rule(points(
        (2, (18.1, 10.6), (27.1, 22.5)),
        (4, (18.4, 11.3), (39.6, 28.4)),
        (16, (34.1, 16.2), (68.7, 43.9)),
        (64, (82.5, 41.9), (215.0, 110.0))), dtype="float32", shape="small", **ZEN_4),
    Rule(points(
        (2, (728.0, 675.0), (6130, 5600)),
        (16, (3610, 3280), (29800, 14800)),
        (32, (6580, 6260), (54800, 25400)),
        (64, (12500, 11300), (107000, 47200))), dtype="float32", shape="large", **ZEN_4),
    Rule(points(
        (2, (17.8, 10.3), (47.0, 54.8)),
        (4, (19.0, 10.6), (64.5, 62.1)),
        (16, (44.9, 21.7), (195.0, 80.6)),
        (64, (176.0, 46.8), (1380, 211.0))), dtype="bfloat16", shape="small", **ZEN_4),
    Rule(points(
        (2, (758.0, 927.0), (4530, 8750)),
        (16, (3800, 4600), (35600, 19500)),
        (32, (7540, 6710), (69500, 29400)),
        (64, (14800, 12800), (143000, 50600))), dtype="bfloat16", shape="large", **ZEN_4),
)  # fmt: skip
GRU = _rules(
    _gru, 3,
    Rule(points(
        (2, (33.9, 26.6), (51.0, 61.1)),
        (4, (32.4, 32.7), (52.1, 85.2)),
        (16, (37.3, 42.5), (96.1, 140)),
        (64, (89.8, 79.1), (277, 194))), dtype="float32", shape="small", **ZEN_3),
    Rule(points(
        (2, (26.9, 20.7), (70.1, 101)),
        (4, (30.7, 17.8), (81.4, 96.9)),
        (16, (49.1, 35.5), (223, 142)),
        (64, (181, 96.3), (1380, 405))), dtype="bfloat16", shape="small", **ZEN_3),
    Rule(points(
        (2, (26.6, 21.9), (48.5, 68.2)),
        (4, (29.1, 23.4), (62.7, 71.1)),
        (16, (41.7, 31.1), (123, 121)),
        (64, (84, 66.9), (361, 252))), dtype="float16", shape="small", **ZEN_3),
    Rule(points(
        (2, (188, 238), (843, 1210)),
        (16, (1030, 767), (4420, 3770)),
        (32, (2530, 1410), (10300, 7960))), dtype="float32", shape="large", **ZEN_3),
    Rule(points(
        (2, (228, 289), (1100, 2210)),
        (16, (1560, 794), (7020, 7090)),
        (32, (3300, 1860), (15500, 8730))), dtype="bfloat16", shape="large", **ZEN_3),
    Rule(points(
        (2, (176, 235), (950, 1420)),
        (16, (890, 694), (5680, 4540)),
        (32, (1700, 1080), (11600, 6290))), dtype="float16", shape="large", **ZEN_3),
    Rule(points(
        (2, (13.0, 9.65), (22.4, 34.5)),
        (4, (13.3, 9.71), (31.2, 50.3)),
        (16, (20.1, 14.7), (63.4, 69.7)),
        (64, (44.9, 33.5), (191.0, 124.0))), dtype="float32", shape="small", **ZEN_4),
    Rule(points(
        (2, (518.0, 536.0), (2710, 6030)),
        (16, (2970, 2620), (18300, 17900)),
        (32, (5070, 4440), (34100, 31100)),
        (64, (9880, 8720), (66900, 55100))), dtype="float32", shape="large", **ZEN_4),
    Rule(points(
        (2, (14.0, 11.0), (41.2, 51.0)),
        (4, (15.1, 11.6), (50.5, 61.6)),
        (16, (29.1, 16.6), (155.0, 77.8)),
        (64, (130.0, 47.6), (1130, 295.0))), dtype="bfloat16", shape="small", **ZEN_4),
    Rule(points(
        (2, (502.0, 629.0), (3370, 9170)),
        (16, (2860, 2640), (23000, 22300)),
        (32, (5280, 6450), (47100, 34400)),
        (64, (10600, 10300), (89900, 62200))), dtype="bfloat16", shape="large", **ZEN_4),
)  # fmt: skip
