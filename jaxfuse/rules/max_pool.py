"""When a fused max pool is worth it."""

import math

from jax import lax

from jaxfuse.rules.rule import Ladder, OpRules, Rule, points


def size(config, types) -> int:
    return math.prod(types[0].shape)


def _pool(x):
    """3×3, stride 2, and padded to x's size again."""
    y = lax.reduce_window(x, -float("inf"), lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return lax.pad(y, x.dtype.type(0), [(0, a - b, 0) for a, b in zip(x.shape, y.shape)])


RULES = OpRules(
    "elements", size, ladders={"any": Ladder(_pool, tuple(((n, s, s, c),) for n, s, c in ((1, 4, 8), (1, 8, 16), (8, 14, 32))))},
    rules=(
        Rule(points(
            (128, (3.64, 2.17), (27.4, 3.96)),
            (1_024, (6.49, 2.56), (32.1, 4.81)),
            (50_176, (82, 32.3), (531, 66.3))), dtype="float32"),
        Rule(points(
            (128, (5.26, 2.12), (27.8, 10.7)),
            (1_024, (12.6, 5.13), (38.4, 10.4)),
            (50_176, (153, 27.5), (521, 77))), dtype="bfloat16"),
    ),
)  # fmt: skip
