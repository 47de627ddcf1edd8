"""When fused attention is worth it."""

import math

import jax
import jax.numpy as jnp

from jaxfuse.tuning.rules.rule import OpRules, SizeSweep


def size(config, types) -> int:
    """2 · products."""
    sizes = config.sizes(*types[:3])
    return 2 * math.prod(sizes[a] for a in config.scores) * (sizes["d"] + sizes["e"])


def _attention(x, *weights):
    """With the three products that make q, k and v of x, as networks have them: of slices of one product XLA makes copies first."""
    batch, rows, heads, d = x.shape
    flat = x.reshape(batch, rows, heads * d)
    q, k, v = ((flat @ w).reshape(x.shape) for w in weights)
    scores = jnp.einsum("btnd,bsnd->bnts", q, k) / math.sqrt(d)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores.astype(jnp.float32)).astype(q.dtype), v)


_SHAPES = tuple(((b, t, n, d), *3 * ((n * d, n * d),)) for b, t, n, d in (
    (1, 4, 2, 4), (1, 8, 2, 8), (1, 16, 4, 16), (2, 32, 4, 32), (1, 64, 8, 64), (2, 64, 12, 64), (1, 197, 6, 64), (8, 128, 12, 64),
    (1, 512, 12, 64)))
RULES = OpRules(
    "operations", size, size_sweeps={"any": SizeSweep(_attention, _SHAPES, neighbours=("dense",))}, directions_apart=True)
