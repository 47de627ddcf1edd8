"""When a fused layer, RMS, group or instance norm is worth it."""

import jax
import jax.numpy as jnp

from jaxfuse.tuning.rules.rule import OpRules, SizeSweep, elements


def shape_class(config, types) -> str:
    return "rows" if config.inner[0] == 1 else "places"


def _layer_norm(x, gamma, beta):
    """As Flax computes it."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    var = jnp.maximum(0.0, (wide * wide).mean(-1, keepdims=True) - mean * mean)
    return ((wide - mean) * (jax.lax.rsqrt(var + 1e-6) * gamma) + beta).astype(x.dtype)


def _group_norm(x, gamma, beta):
    """Of 8 groups, as Flax computes it."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], 8, x.shape[-1] // 8)
    mean = wide.mean((1, 2, 4), keepdims=True)
    var = jnp.maximum(0.0, (wide * wide).mean((1, 2, 4), keepdims=True) - mean * mean)
    y = ((wide - mean) * jax.lax.rsqrt(var + 1e-6)).reshape(x.shape)
    return jax.nn.silu((y * gamma + beta).astype(x.dtype))


def _shapes(*shapes):
    return tuple((shape, shape[-1:], shape[-1:]) for shape in shapes)


RULES = OpRules(
    "elements", elements, shape_class=shape_class,
    size_sweeps={
        "rows": SizeSweep(_layer_norm, _shapes((4, 32), (32, 64), (64, 256), (128, 768))),
        "places": SizeSweep(_group_norm, _shapes((2, 4, 4, 32), (2, 8, 8, 32), (4, 16, 16, 64))),
    },
)
