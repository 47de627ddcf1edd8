"""When a fused batch norm is worth it."""

import math

import jax
import jax.numpy as jnp

from jaxfuse.rules.rule import Ladder, OpRules, Rule, points


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
    "elements", size, ladders={"any": Ladder(_training, _shapes((2, 4, 4), (8, 4, 16), (8, 14, 64)))},
    rules=(
        Rule(points(
            (128, (3.8, 3.22), (8.92, 6.73)),
            (2_048, (13.7, 3.34), (30.2, 15.3)),
            (100_352, (51, 19.1), (200, 68.4))), dtype="float32"),
        Rule(points(
            (128, (3.8, 2.88), (6.95, 7.51)),
            (2_048, (7.78, 3.48), (25.1, 12.8)),
            (100_352, (72, 23.3), (159, 64.1))), dtype="bfloat16"),
    ),
)  # fmt: skip
