"""When a fused op is worth it on CUDA. No device has timed it yet, so it goes by the bytes that the compiled kernels move.

They were counted in XLA's code for an H200 (`tests/gpu`), forward and gradient together; what is fused there is plain JAX,
arranged so that XLA moves less (`docs/gpu.md`). An op that is not in the table is left to XLA: convolutions, bound by
arithmetic, for which bytes do not speak, and norms over places, of which plain JAX moves no less.
"""

from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes per element of a 2-byte dtype, as users write it and fused."""

    xla: float
    fused: float


# By op, and shape class of its rules. Batch norm with residual and relu; layer norm.
TRAFFIC = {("batch_norm", "any"): Traffic(24.0, 20.3), ("norm", "rows"): Traffic(24.1, 16.1)}
SMALLEST = 16e6  # bytes less: 4 µs at the 4 TB/s of an H200, as long as a launch or two


def judge(op: str, shape: str, elements: int, itemsize: int) -> str:
    """Why a site is left alone, or ""."""
    if (op, shape) not in TRAFFIC:
        return f"{op} ({shape}) has not been measured on cuda, and its bytes do not speak for it"
    traffic = TRAFFIC[op, shape]
    saved = (traffic.xla - traffic.fused) / 2 * itemsize * elements
    if saved < SMALLEST:
        return f"too small to gain on cuda: {saved / 1e6:.2g} MB less to move, worth it from {SMALLEST / 1e6:.0f}"
    return ""
