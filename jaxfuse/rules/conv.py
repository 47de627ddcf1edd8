"""When a fused convolution is worth it."""

import math

import jax
from jax import lax

from jaxfuse.rules.rule import Ladder, OpRules, Rule, points


def size(config, types) -> int:
    """2 · output positions · filter elements; `x // strides` stands for the positions, whatever the padding."""
    x, w = (t.shape for t in types[:2])
    positions = math.prod(x) // x[config.lhs_spec[1]] // math.prod(config.window_strides)
    return 2 * positions * math.prod(w)


def shape_class(config, types) -> str:
    return "full" if config.feature_group_count == 1 else "grouped"


def _full(x, w, b):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + b.astype(y.dtype))


def _depthwise(x, w, b):
    names, groups = ("NHWC", "HWIO", "NHWC"), x.shape[-1]
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names, feature_group_count=groups)
    return jax.nn.relu(y + b.astype(y.dtype))


def _shapes(*rows):
    """(batch, image size, kernel, channels in a group, channels)"""
    return tuple(((n, s, s, c), (k, k, per_group, c), (c,)) for n, s, k, per_group, c in rows)


LADDERS = {
    "full": Ladder(_full, _shapes((1, 8, 3, 8, 8), (1, 8, 3, 16, 16), (1, 14, 1, 32, 32), (1, 14, 3, 32, 32), (8, 14, 3, 64, 64))),
    "grouped": Ladder(_depthwise, _shapes((1, 4, 3, 1, 8), (1, 8, 3, 1, 16), (1, 14, 3, 1, 64))),
}
RULES = OpRules(
    "operations", size, ladders=LADDERS, shape_class=shape_class,
    rules=(
        Rule(
            points("forward", (73_728, 5.9, 6.6), (294_912, 7.6, 6.8), (401_408, 8.6, 6.7), (3_612_672, 22, 16))
            + points("backward", (73_728, 24, 24), (294_912, 36, 27), (401_408, 27, 26), (3_612_672, 81, 54)),
            machine="AMD Zen 5, 2 cores",
        ),
    ),
)
