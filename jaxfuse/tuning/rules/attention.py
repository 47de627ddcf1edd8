"""When fused attention is worth it."""

import math

import jax
import jax.numpy as jnp

from jaxfuse.tuning.rules.rule import ZEN_3, Ladder, OpRules, Rule, points


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
    "operations", size, size_sweeps={"any": Ladder(_attention, _SHAPES)},
    rules=(
        Rule(points(
            (512, (22.5, 6.2), (34.1, 15.3)),
            (4_096, (14.9, 5.86), (31.4, 34.4)),
            (65_536, (22.3, 9.54), (42, 46.4)),
            (1_048_576, (65, 29.9), (148, 103)),
            (8_388_608, (218, 123), (642, 406)),
            (25_165_824, (501, 266), (1950, 1050)),
            (402_653_184, (10100, 4030), (37500, 15200)),
            (805_306_368, (13700, 6560), (51500, 23000))), dtype="float32", **ZEN_3),
        Rule(points(
            (512, (23.4, 6.14), (34, 28.3)),
            (4_096, (16, 6.02), (29.1, 26.2)),
            (65_536, (24.6, 11.2), (42.5, 39.3)),
            (1_048_576, (67.2, 27.8), (164, 111)),
            (8_388_608, (212, 103), (735, 430)),
            (25_165_824, (779, 302), (2090, 1100)),
            (402_653_184, (9920, 3910), (37300, 13000)),
            (805_306_368, (13300, 6470), (49700, 22700))), dtype="bfloat16", **ZEN_3),
        Rule(points(
            (512, (12.9, 6.31), (34.3, 14.9)),
            (4_096, (12.4, 6.56), (30.2, 32.5)),
            (65_536, (29.7, 10.7), (44.7, 43.8)),
            (1_048_576, (70, 28), (143, 101)),
            (8_388_608, (213, 90.4), (654, 303)),
            (25_165_824, (579, 268), (1620, 878)),
            (402_653_184, (9600, 3900), (36500, 13800)),
            (805_306_368, (11300, 6130), (50700, 22800))), dtype="float16", **ZEN_3)),
    dtypes=("float32", "bfloat16", "float16"),
)  # fmt: skip
