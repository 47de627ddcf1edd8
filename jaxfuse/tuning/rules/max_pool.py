"""When a fused max pool is worth it."""

from jax import lax

from jaxfuse.tuning.rules.rule import OpRules, SizeSweep, elements


def _pool(x):
    """3×3, stride 2, and padded to x's size again."""
    y = lax.reduce_window(x, -float("inf"), lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return lax.pad(y, x.dtype.type(0), [(0, a - b, 0) for a, b in zip(x.shape, y.shape)])


_SHAPES = tuple(((n, s, s, c),) for n, s, c in ((1, 4, 8), (1, 8, 16), (8, 14, 32)))
RULES = OpRules("elements", elements, size_sweeps={"any": SizeSweep(_pool, _SHAPES)})
