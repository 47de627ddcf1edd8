"""When a fused op is worth it on CUDA. On an H200 batch norm and norms of rows were timed alone, and batch norm in a train step of
ResNet-50, whose max pools are fused with it (`docs/gpu.md`). How much smaller a site may be is told by the bytes that it moves less;
they were counted in XLA's code for an H200, forward and gradient together (`tests/gpu`).
"""

import math
from typing import NamedTuple

from jaxfuse.ops.norm import refuse_on_cuda


class Traffic(NamedTuple):
    """Bytes per element of a 2-byte dtype, as users write it and fused."""

    xla: float
    fused: float


# By op, and shape class of its rules: batch norm with residual and relu; max pool with stride 2, by element of x; layer norm, whose
# "xla" is plain JAX's: as users write it alone it is 26.1, but XLA computes a norm's neighbours along with it.
TRAFFIC = {("batch_norm", "any"): Traffic(24.0, 20.3), ("max_pool", "any"): Traffic(20.0, 5.5), ("norm", "rows"): Traffic(16.1, 10.1)}
SMALLEST = 16e6  # bytes less: 4 µs at the 4.3 TB/s that were measured, as long as a launch or two
SMALLEST_RMS_NORM = 1 << 26  # elements: timed, and faster. With 6 million the forward pass took 1.2 times as long as XLA's


def expects_no_gain(op: str, shape: str, config, types) -> str:
    """Why a site is left alone, or ""; config and types as a rule's `size` has them."""
    if (op, shape) not in TRAFFIC:
        return f"{op} ({shape}) has not been measured on cuda, and its bytes do not speak for it"
    if op == "norm" and (reason := _norm_expects_no_gain(config, types)):
        return reason
    traffic = TRAFFIC[op, shape]
    saved = (traffic.xla - traffic.fused) / 2 * types[0].dtype.itemsize * math.prod(types[0].shape)
    if saved < SMALLEST:
        return f"too small to gain on cuda: {saved / 1e6:.2g} MB less to move, worth it from {SMALLEST / 1e6:.0f}"
    return ""


def _norm_expects_no_gain(config, types) -> str:
    if reason := refuse_on_cuda(config, types):
        return f"without its kernel no gain on cuda: {reason}"
    if types[0].dtype.itemsize != 2:
        return f"norm of {types[0].dtype} has not been measured on cuda, as those of two bytes have"
    if not config.centered and math.prod(types[0].shape) < SMALLEST_RMS_NORM:
        return f"RMS norm is no faster than XLA on cuda below {SMALLEST_RMS_NORM} elements"
    return ""
