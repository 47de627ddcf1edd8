"""When fused attention is worth it."""

import math

import jax
import jax.numpy as jnp

from jaxfuse.tuning.rules.rule import OpRules, SizeSweep


def size(config, types) -> int:
    """2 · products."""
    sizes = config.sizes(*types[:3])
    return 2 * math.prod(sizes[a] for a in config.scores) * (sizes["d"] + sizes["e"])


def _attention(x, w):
    """With the products that make q, k and v of x."""
    batch, rows, heads, d = x.shape
    q, k, v = jnp.split((x.reshape(batch, rows, heads * d) @ w).reshape(batch, rows, 3 * heads, d), 3, axis=2)
    scores = jnp.einsum("btnd,bsnd->bnts", q, k) / math.sqrt(q.shape[-1])
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores.astype(jnp.float32)).astype(q.dtype), v)


_SHAPES = tuple(((b, t, n, d), (n * d, 3 * n * d)) for b, t, n, d in (
    (1, 4, 2, 4), (1, 8, 2, 8), (1, 16, 4, 16), (2, 32, 4, 32), (1, 64, 8, 64), (2, 64, 12, 64), (1, 197, 6, 64), (8, 128, 12, 64),
    (1, 512, 12, 64)))
RULES = OpRules(
    "operations", size, size_sweeps={"any": SizeSweep(_attention, _SHAPES, neighbours=("dense",))}, directions_apart=True)
