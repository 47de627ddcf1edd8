"""When a fused op is worth it on CUDA. No device has timed it yet, so it goes by the bytes that the compiled kernels move.

They were counted in XLA's code for an H200 (`tests/gpu`), forward and gradient together; what is fused there is plain JAX,
arranged so that XLA moves less (`docs/gpu.md`), or a kernel. An op that is not in the table is left to XLA: full convolutions,
bound by arithmetic, for which bytes do not speak, and norms over spatial positions, of which plain JAX moves no less.
"""

import math
from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes per element of a 2-byte dtype, as users write it and fused."""

    xla: float
    fused: float


# By op, and shape class of its rules. Batch norm with residual and relu; layer norm; depthwise convolution (no other one with groups
# has a kernel) with bias and an activation that needs its argument kept, which XLA's code and ours write and read again; max pool
# with stride 2, by element of x.
TRAFFIC = {("batch_norm", "any"): Traffic(24.0, 20.3), ("norm", "rows"): Traffic(24.1, 16.1), ("conv", "grouped"): Traffic(22.0, 18.0),
           ("max_pool", "any"): Traffic(20.0, 5.5)}
SMALLEST = 16e6  # bytes less: 4 µs at the 4 TB/s of an H200, as long as a launch or two
LARGEST_WINDOW = 9  # taps: of larger ones the gradient reads its tensors again


def expects_no_gain(op: str, shape: str, config, types) -> str:
    """Why a site is left alone, or ""; config and types as a rule's `size` has them."""
    if (op, shape) not in TRAFFIC:
        return f"{op} ({shape}) has not been measured on cuda, and its bytes do not speak for it"
    elements = math.prod(types[0].shape)
    if op == "conv":
        if not (config.has_scale or config.has_bias or config.activation.kind != "none"):
            return "XLA makes one kernel of it"
        if (taps := math.prod(types[1].shape[d] for d in config.rhs_spec[2:])) > LARGEST_WINDOW:
            return f"a window of {taps} taps has not been measured on cuda, and its bytes do not speak for it"
        elements //= math.prod(config.window_strides)
    traffic = TRAFFIC[op, shape]
    saved = (traffic.xla - traffic.fused) / 2 * types[0].dtype.itemsize * elements
    if saved < SMALLEST:
        return f"too small to gain on cuda: {saved / 1e6:.2g} MB less to move, worth it from {SMALLEST / 1e6:.0f}"
    return ""
