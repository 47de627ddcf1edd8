"""When a fused convolution is worth it."""

import math

import jax
from jax import lax

from jaxfuse.tuning.rules.rule import OpRules, SizeSweep


def size(config, types) -> int:
    """2 · output positions · filter elements; `x // strides` stands for the positions, whatever the padding."""
    x, w = (t.shape for t in types[:2])
    positions = math.prod(x) // x[config.lhs_spec[1]] // math.prod(config.window_strides)
    return 2 * positions * math.prod(w)


def shape_class(config, types) -> str:
    """A transposed one of few outputs is a product (`ops/conv/scattered.py`), one of one channel to one a sum of taps
    (`ops/conv/taps.py`): classes of their own. Where a dilated one has no rule of its own, the last ones speak for it."""
    transposed = any(d > 1 for d in config.lhs_dilation or ()) and config.feature_group_count == 1
    if transposed and types[1].shape[config.rhs_spec[0]] < 8 and all(d == 1 for d in config.rhs_dilation):
        return "scattered"
    x, w = (t.shape for t in types[:2])
    plain = not config.transposed and all(s == 1 for s in config.window_strides)
    if plain and x[config.lhs_spec[1]] == w[config.rhs_spec[0]] == 1 and math.prod(w) <= 64:
        return "one channel"
    if config.feature_group_count > 1:
        return "grouped"
    return "dilated" if any(d > 1 for d in config.rhs_dilation) else "full"


def _conv_bias_relu(x, w, b):
    groups = x.shape[-1] // w.shape[2]
    y = lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups)
    return jax.nn.relu(y + b.astype(y.dtype))


def _dilated(x, w, b):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", rhs_dilation=(2, 2), dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + b.astype(y.dtype))


def _overlapping(x, w):
    """Frames of a signal, added up where they overlap: as many outputs as x has numbers."""
    return lax.conv_transpose(x, w, x.shape[-1:], "SAME", dimension_numbers=("NWC", "WIO", "NWC")).reshape(x.shape)


def _shapes(*rows):
    """(batch, image size, kernel, channels in a group, channels)"""
    return tuple(((n, s, s, c), (k, k, per_group, c), (c,)) for n, s, k, per_group, c in rows)


SIZE_SWEEPS = {
    "full": SizeSweep(_conv_bias_relu, _shapes(
        (1, 4, 3, 4, 4), (1, 8, 3, 8, 8), (1, 8, 3, 16, 16), (1, 14, 1, 32, 32), (1, 14, 3, 32, 32), (1, 14, 3, 64, 64),
        (8, 14, 3, 64, 64))),
    "dilated": SizeSweep(_dilated, _shapes((1, 14, 3, 32, 32), (1, 14, 3, 64, 64), (1, 28, 3, 256, 256))),
    "grouped": SizeSweep(_conv_bias_relu, _shapes((1, 4, 3, 1, 8), (1, 8, 3, 1, 16), (1, 14, 3, 1, 64))),
    "one channel": SizeSweep(_conv_bias_relu, _shapes(
        (1, 4, 3, 1, 1), (1, 8, 3, 1, 1), (8, 5, 3, 1, 1), (1, 28, 3, 1, 1), (8, 128, 3, 1, 1), (1, 512, 7, 1, 1))),
    "scattered": SizeSweep(_overlapping, tuple(((n, s, c), (4 * c, c, 1)) for n, s, c in ((1, 8, 8), (1, 32, 64), (2, 128, 256)))),
}
RULES = OpRules("operations", size, size_sweeps=SIZE_SWEEPS, shape_class=shape_class)
