"""When fused attention is worth it."""

import math

import jax
import jax.numpy as jnp

from jaxfuse.tuning.rules.rule import OpRules, SizeSweep


def size(config, types) -> int:
    """2 · products."""
    sizes = config.sizes(*types[:3])
    return 2 * math.prod(sizes[a] for a in config.scores) * (sizes["d"] + sizes["e"])


def _attention(q, k, v):
    scores = jnp.einsum("btnd,bsnd->bnts", q, k) / math.sqrt(q.shape[-1])
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores.astype(jnp.float32)).astype(q.dtype), v)


_SHAPES = tuple(((b, t, n, d),) * 3 for b, t, n, d in (
    (1, 4, 2, 4), (1, 8, 2, 8), (1, 16, 4, 16), (2, 32, 4, 32), (1, 64, 8, 64), (2, 64, 12, 64), (8, 128, 12, 64), (1, 512, 12, 64)))
RULES = OpRules(
    "operations", size, size_sweeps={"any": SizeSweep(_attention, _SHAPES)},
    dtypes=("float32", "bfloat16", "float16"), directions_apart=True,
)
