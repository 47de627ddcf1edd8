"""When a fused op is worth it on CUDA. On an H200 batch norm was timed alone and in a train step of ResNet-50, whose max pools are
fused with it (`docs/gpu.md`). How much smaller a site may be is told by the bytes that it moves less; they were counted in XLA's
code for an H200, forward and gradient together (`tests/gpu`).
"""

import math
from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes per element of a 2-byte dtype, as users write it and fused."""

    xla: float
    fused: float


# By op, and shape class of its rules: batch norm with residual and relu; max pool with stride 2, by element of x.
TRAFFIC = {("batch_norm", "any"): Traffic(24.0, 20.3), ("max_pool", "any"): Traffic(20.0, 5.5)}
SLOWER = {("norm", "rows")}  # timed with gradients: 0.71 to 0.92 of XLA's speed, before the kernels' sums over warps became shorter
SMALLEST = 16e6  # bytes less: 4 µs at the 4.3 TB/s that were measured, as long as a launch or two


def expects_no_gain(op: str, shape: str, config, types) -> str:
    """Why a site is left alone, or ""; config and types as a rule's `size` has them."""
    if (op, shape) in SLOWER:
        return f"{op} ({shape}) was measured on cuda, and XLA's own code was faster"
    if (op, shape) not in TRAFFIC:
        return f"{op} ({shape}) has not been measured on cuda, and its bytes do not speak for it"
    traffic = TRAFFIC[op, shape]
    saved = (traffic.xla - traffic.fused) / 2 * types[0].dtype.itemsize * math.prod(types[0].shape)
    if saved < SMALLEST:
        return f"too small to gain on cuda: {saved / 1e6:.2g} MB less to move, worth it from {SMALLEST / 1e6:.0f}"
    return ""
