"""When a fused max pool is worth it."""

import math

from jax import lax

from jaxfuse.tuning.rules.rule import OpRules, SizeSweep


def size(config, types) -> int:
    return math.prod(types[0].shape)


def _pool(x):
    """3×3, stride 2, and padded to x's size again."""
    y = lax.reduce_window(x, -float("inf"), lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return lax.pad(y, x.dtype.type(0), [(0, a - b, 0) for a, b in zip(x.shape, y.shape)])


RULES = OpRules(
    "elements", size, size_sweeps={"any": SizeSweep(_pool, tuple(((n, s, s, c),) for n, s, c in ((1, 4, 8), (1, 8, 16), (8, 14, 32))))},
    dtypes=("float32", "bfloat16", "float16"),
)
