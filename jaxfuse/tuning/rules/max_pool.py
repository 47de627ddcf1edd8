"""When a fused max pool is worth it."""

import math

from jax import lax

from jaxfuse.tuning.rules.rule import ZEN_3, ZEN_4, Ladder, OpRules, Rule, points


def size(config, types) -> int:
    return math.prod(types[0].shape)


def _pool(x):
    """3×3, stride 2, and padded to x's size again."""
    y = lax.reduce_window(x, -float("inf"), lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return lax.pad(y, x.dtype.type(0), [(0, a - b, 0) for a, b in zip(x.shape, y.shape)])


RULES = OpRules(
    "elements", size, size_sweeps={"any": Ladder(_pool, tuple(((n, s, s, c),) for n, s, c in ((1, 4, 8), (1, 8, 16), (8, 14, 32))))},
    rules=(
        Rule(points(
            (128, (5.06, 3.5), (41.0, 5.72)),
            (1_024, (8.77, 4.47), (54.8, 8.87)),
            (50_176, (107, 32.9), (628, 82.8))), dtype="float32", **ZEN_3),
        Rule(points(
            (128, (5.93, 5.73), (42.8, 11.5)),
            (1_024, (22.3, 7.87), (54.5, 21.4)),
            (50_176, (243, 52.9), (628, 97.9))), dtype="bfloat16", **ZEN_3),
        Rule(points(
            (128, (6.06, 3.52), (41, 5.39)),
            (1_024, (14.4, 4.34), (43.6, 9.63)),
            (50_176, (197, 28.6), (678, 74.7))), dtype="float16", **ZEN_3),
        Rule(points(
            (128, (3.64, 2.17), (27.4, 3.96)),
            (1_024, (6.49, 2.56), (32.1, 4.81)),
            (50_176, (82, 32.3), (531, 66.3))), dtype="float32", **ZEN_4),
        Rule(points(
            (128, (5.26, 2.12), (27.8, 10.7)),
            (1_024, (12.6, 5.13), (38.4, 10.4)),
            (50_176, (153, 27.5), (521, 77))), dtype="bfloat16", **ZEN_4),
    ),
    dtypes=("float32", "bfloat16", "float16"),
)  # fmt: skip
