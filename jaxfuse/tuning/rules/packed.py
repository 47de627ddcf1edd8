"""How `freeze` lays out a convolution's filter. Measured on Zen 5 with AVX-512 (benchmarks/README.md); elsewhere it stays as it is."""

import enum
import math

import jax.numpy as jnp

from jaxfuse.ops.conv.packed import fits_winograd
from jaxfuse.runtime import private
from jaxfuse.tuning import tuned

SHORTEST_SUM = 64  # products: outputs of shorter ones oneDNN writes faster
MOST_PIXELS = {jnp.dtype(jnp.bfloat16): 800}  # of the outputs: with more of them oneDNN's layout of the filter costs little
FEWEST_TILES = 16  # of 2×2 outputs: a transformed filter is 16/9 times as large


class Packing(enum.Enum):
    none = "as it is"
    direct = "packed"
    winograd = "packed, and transformed for F(2×2, 3×3)"


def fastest(config, x, w) -> Packing:
    """As it is oneDNN lays it out again at every call."""
    batch, channels, *image = (private.known(x.shape[d]) for d in config.lhs_spec)
    positions, products = batch * math.prod(image), math.prod(w.shape) // w.shape[config.rhs_spec[0]]
    if products < SHORTEST_SUM or not any(isa.startswith("avx512") for isa in tuned.isa()):
        return Packing.none
    if positions // math.prod(config.window_strides) > MOST_PIXELS.get(x.dtype, positions):
        return Packing.none
    tiles = batch * math.prod(-(-n // 2) for n in image)
    by_winograd = fits_winograd(config, x, w) and channels >= 32 and tiles >= FEWEST_TILES
    return Packing.winograd if by_winograd else Packing.direct


def any_that_fits(config, x, w) -> Packing:
    return Packing.winograd if fits_winograd(config, x, w) else Packing.direct
