"""A convolution of one channel with one filter as a sum over its taps, of x moved and scaled.

That is elementwise, so XLA makes one loop of it and of what follows. Matrix kernels, made for many channels, leave their vectors all but
empty.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

MOST = 64  # taps
SMALL = 1024  # elements of x: of more the gradient's sums are slower than oneDNN's


def refuse(config, x, w) -> str | None:
    if (x.shape[config.lhs_spec[1]], w.shape[config.rhs_spec[0]]) != (1, 1):
        return "more than one channel"
    if config.transposed or any(s != 1 for s in config.window_strides):
        return f"window_strides {config.window_strides}, lhs_dilation {config.lhs_dilation}: the sum of taps is for 1"
    if w.size > MOST:
        return f"{w.size} taps, at most {MOST}"
    return None


def refuse_backward(config, x, w) -> str | None:
    return refuse(config, x, w) or (f"{math.prod(x.shape)} elements, at most {SMALL}" if math.prod(x.shape) > SMALL else None)


def convolve(config, x, w):
    """What `lax.conv_general_dilated` gives; sums in float32 at least."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    (n, c, *space), (o, i, *window) = config.lhs_spec, config.rhs_spec
    images = jnp.transpose(x, (n, c, *space)).astype(wide)
    images = lax.pad(images, wide.type(0), [(0, 0, 0)] * 2 + [(low, high, 0) for low, high in config.padding])
    images = lax.optimization_barrier(images)  # or XLA computes x anew for every tap that reads it
    weights = jnp.transpose(w, (o, i, *window)).astype(wide)[0, 0]
    reach = [(size - 1) * r for size, r in zip(weights.shape, config.rhs_dilation)]
    lengths = [max(0, size - beyond) for size, beyond in zip(images.shape[2:], reach)]
    total = jnp.zeros((*images.shape[:2], *lengths), wide)
    for tap in np.ndindex(*weights.shape) if 0 not in lengths else ():
        start = [k * r for k, r in zip(tap, config.rhs_dilation)]
        part = lax.slice(images, (0, 0, *start), (*images.shape[:2], *(a + b for a, b in zip(start, lengths))))
        total = total + part * weights[tap]
    return jnp.moveaxis(total, range(total.ndim), config.out_spec).astype(x.dtype)
