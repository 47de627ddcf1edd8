"""Where a fused kernel is worth it. "measured" asks the rules below, which are data with the measurement beside them."""

import math

import jax

from jaxfuse.ops.errors import one_of

POLICIES = ("measured", "always", "never")

# Smallest site, in floating-point operations (conv) or elements (the others), from which the fused kernel was measured
# faster. Chains of ten ops in one jit, 2 cores of AMD Zen 5, microseconds per op, XLA / fused, forward and gradient:
#   conv 3x3  8²x8     74 k operations   5.9 /  6.6    24 / 24        batch norm 2x4²x4    128 elements    2.6 / 1.5    8.5 / 5.5
#   conv 3x3  8²x16   295 k              7.6 /  6.8    36 / 27        batch norm 8x4²x16   2 k              12 / 1.7     60 / 5.7
#   conv 1x1 14²x32   401 k              8.6 /  6.7    27 / 26        batch norm 8x14²x64  100 k            72 / 30     322 / 47
#   conv 3x3 14²x32   3.6 M               22 / 16      81 / 54        batch norm 8x28²x64  401 k           266 / 84    1129 / 298
#
#
# Sequences, in steps. f32, 2 cores of AMD Zen 4, milliseconds, XLA's scan / fused, forward, and with the gradient:
#   lstm hidden  28, batch 1    1 step  0.008 / 0.009    0.018 / 0.025      16 steps  0.031 / 0.024    0.105 / 0.072
#   lstm hidden 512, batch 8    2       0.43  / 0.70     4.1   / 3.1        16        3.3   / 3.7      28.8  / 10.4
#                              32       6.5   / 6.3      54.6  / 18.7       64        12.5  / 12.1     107   / 36
#   gru  hidden 512, batch 8   16       2.5   / 3.1      19.8  / 9.1        32        5.6   / 5.1      71    / 14.8
SMALLEST = {"conv": 200_000, "batch_norm": 0, "max_pool": 0, "lstm": 32, "gru": 32}
UNITS = {"conv": "operations", "lstm": "steps", "gru": "steps"}  # elements of x for the others


def judge(policy: str):
    """A function (op name, config, argument types) -> reason to leave the site alone, or ""."""
    one_of(policy, POLICIES, "policy")
    return dict(measured=_measured, always=_always, never=_never)[policy]


def _always(op, config, types) -> str:
    return ""


def _never(op, config, types) -> str:
    return 'policy "never"'


def _measured(op, config, types) -> str:
    platform = jax.default_backend()
    if platform != "cpu":
        return f"no kernel yet on {platform}"
    size = _work(op, config, types)
    if size < SMALLEST[op]:
        return f"too small to gain: {size} {UNITS.get(op, 'elements')}, measured faster from {SMALLEST[op]}"
    return ""


def _work(op, config, types) -> int:
    if op in ("lstm", "gru"):
        return types[0].shape[0]
    x = math.prod(types[0].shape)
    if op != "conv":
        return x
    positions = x // types[0].shape[config.lhs_spec[1]] // math.prod(config.window_strides)
    return 2 * positions * math.prod(types[1].shape)
