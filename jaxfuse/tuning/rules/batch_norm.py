"""When a fused batch norm is worth it."""

import jax
import jax.numpy as jnp

from jaxfuse.tuning.rules.rule import OpRules, SizeSweep, elements


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


RULES = OpRules("elements", elements, size_sweeps={"any": SizeSweep(_training, _shapes((2, 4, 4), (8, 4, 16), (8, 14, 64)))})
