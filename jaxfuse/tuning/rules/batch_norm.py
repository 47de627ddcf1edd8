"""When a fused batch norm is worth it."""

import math

import jax
import jax.numpy as jnp

from jaxfuse.tuning.rules.rule import ZEN_3, ZEN_4, Ladder, OpRules, Rule, points


def size(config, types) -> int:
    return math.prod(types[0].shape)


def _training(x, gamma, beta):
    """As Flax computes it."""
    wide = x.astype(jnp.float32)
    mean = wide.mean((0, 1, 2))
    var = (wide * wide).mean((0, 1, 2)) - mean * mean
    y = (wide - mean) * (jax.lax.rsqrt(var + 1e-5) * gamma) + beta
    return jax.nn.relu(y.astype(x.dtype))


def _shapes(*rows):
    """(batch, image size, channels)"""
    return tuple(((n, s, s, c), (c,), (c,)) for n, s, c in rows)


RULES = OpRules(
    "elements", size, size_sweeps={"any": Ladder(_training, _shapes((2, 4, 4), (8, 4, 16), (8, 14, 64)))},
    rules=(
        Rule(points(
            (128, (5.29, 6.81), (24.2, 33.3)),
            (2_048, (32.9, 9.07), (84.2, 39.8)),
            (100_352, (87.3, 35.1), (254, 127))), dtype="float32", **ZEN_3),
        Rule(points(
            (128, (5.08, 4.93), (34.2, 13.2)),
            (2_048, (13.0, 6.77), (42.1, 34.5)),
            (100_352, (90.5, 59.9), (218, 205))), dtype="bfloat16", **ZEN_3),
        Rule(points(
            (128, (9.48, 5.01), (23.8, 11.4)),
            (2_048, (36, 6.12), (120, 27.7)),
            (100_352, (214, 44.5), (1040, 133))), dtype="float16", **ZEN_3),
        Rule(points(
            (128, (3.8, 3.22), (8.92, 6.73)),
            (2_048, (13.7, 3.34), (30.2, 15.3)),
            (100_352, (51, 19.1), (200, 68.4))), dtype="float32", **ZEN_4),
        Rule(points(
            (128, (3.8, 2.88), (6.95, 7.51)),
            (2_048, (7.78, 3.48), (25.1, 12.8)),
            (100_352, (72, 23.3), (159, 64.1))), dtype="bfloat16", **ZEN_4),
    ),
    dtypes=("float32", "bfloat16", "float16"),
)  # fmt: skip
