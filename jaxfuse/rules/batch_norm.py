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
        Rule(
            points("forward", (128, 2.6, 1.5), (2048, 12, 1.7), (100_352, 72, 30), (401_408, 266, 84))
            + points("backward", (128, 8.5, 5.5), (2048, 60, 5.7), (100_352, 322, 47), (401_408, 1129, 298)),
            machine="AMD Zen 5, 2 cores",
        ),
    ),
)
