"""Where a fused kernel is worth it. "measured" asks the rules below, which are data with the measurement beside them."""

import math

import jax

from jaxfuse.ops.errors import one_of

POLICIES = ("measured", "always", "never")

# Fewest floating-point operations (conv) or elements (others) from which the fused kernel was measured faster.
# `python -m benchmarks threshold` measures them again.
SMALLEST = {"conv": 0, "batch_norm": 0, "max_pool": 0}


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
    size = _work(op, types)
    if size < SMALLEST[op]:
        return f"too small to gain: {size} {'operations' if op == 'conv' else 'elements'}, measured faster from {SMALLEST[op]}"
    return ""


def _work(op, types) -> int:
    x = math.prod(types[0].shape)
    if op != "conv":
        return x
    # each input element meets each filter tap of its group's outputs: an upper bound for strided convolutions
    w = types[1].shape
    return 2 * x * math.prod(w) // max(1, min(w))
