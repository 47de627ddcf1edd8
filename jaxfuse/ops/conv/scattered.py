"""A transposed convolution of few outputs as a product of matrices, whose columns are then added up where they overlap.

With few outputs the filter is all window: 513 features to 1 with a window of 1024 fill no vector of a direct loop, and are a
product of 513×128 and 513×1024.
"""

import jax.numpy as jnp
from jax import lax

from jaxfuse.ops.arrays import other_axes

FEW = 8  # outputs below this


def refuse(config, x, w) -> str | None:
    if not config.transposed or config.feature_group_count != 1:
        return "no transposed convolution of one group"
    if w.shape[config.rhs_spec[0]] >= FEW:
        return f"{w.shape[config.rhs_spec[0]]} outputs: the product is for fewer than {FEW}"
    if any(d != 1 for d in config.rhs_dilation):
        return f"rhs_dilation {config.rhs_dilation}: the product takes none"
    return None


def convolve(config, x, w):
    """What `lax.conv_general_dilated` gives; sums in float32 at least.

    Input t of every axis adds x[t]·w[k] to output t·d + lo - k, of d = lhs_dilation and lo = the padding in front, for every
    tap k of the window: with k counted from its end, to t·d + k and then lo - (K - 1) further.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    (n, c, *space), (o, i, *window) = config.lhs_spec, config.rhs_spec
    columns = lax.dot_general(
        x, lax.rev(w, window), (((c,), (i,)), ((), ())), precision=config.precision, preferred_element_type=wide)
    positions, taps = other_axes(x, c), other_axes(w, i)
    order = [positions.index(d) for d in (n, *space)] + [len(positions) + taps.index(d) for d in (o, *window)]
    y = jnp.transpose(columns, order)  # [batch, *space, outputs, *window]
    for axis, (lhs_dilation, (low, high)) in enumerate(zip(config.lhs_dilation, config.padding), 1):
        y = _added_up(y, axis, 2 + len(space), lhs_dilation, low, high)
    return jnp.moveaxis(y, (0, y.ndim - 1, *range(1, y.ndim - 1)), config.out_spec).astype(x.dtype)


def _added_up(columns, axis: int, taps: int, lhs_dilation: int, low: int, high: int):
    """Σ over k of columns[t, k] at t·lhs_dilation + k, for t along `axis` and k along `taps`, which goes: the convolution's outputs."""
    length, reach = columns.shape[axis], columns.shape[taps] - 1
    blocks = -(-(reach + 1) // lhs_dilation)
    columns = jnp.moveaxis(columns, taps, axis + 1)
    filled = [(0, 0, 0)] * columns.ndim
    filled[axis + 1] = 0, blocks * lhs_dilation - reach - 1, 0
    columns = lax.pad(columns, columns.dtype.type(0), filled)
    columns = columns.reshape(*columns.shape[: axis + 1], blocks, lhs_dilation, *columns.shape[axis + 2 :])

    def shifted(block):
        config = [(0, 0, 0)] * (columns.ndim - 1)
        config[axis] = block, blocks - 1 - block, 0
        return lax.pad(lax.index_in_dim(columns, block, axis + 1, keepdims=False), columns.dtype.type(0), config)

    total = sum(map(shifted, range(1, blocks)), shifted(0))
    total = total.reshape(*total.shape[:axis], -1, *total.shape[axis + 2 :])
    outputs = (length - 1) * lhs_dilation + 1 + low + high - reach
    config = [(0, 0, 0)] * total.ndim
    config[axis] = low - reach, reach - low + outputs - total.shape[axis], 0
    return lax.pad(total, total.dtype.type(0), config)
