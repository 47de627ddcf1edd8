"""When `freeze` packs a convolution's filter. Measured on Zen 5 with AVX-512 (benchmarks/README.md); elsewhere nothing is packed."""

import math

import jax.numpy as jnp

from jaxfuse.tuning import tuned

SHORTEST_SUM = 96  # products: outputs of shorter ones oneDNN writes faster
MOST_PIXELS = {jnp.dtype(jnp.bfloat16): 800}  # of the outputs: with more of them oneDNN's layout of the filter costs little
FEWEST_TILES = 48  # of 2×2 outputs: below it a transformed filter, 16/9 times as large, takes longer to read


def is_faster(config, x, w) -> bool:
    """Than oneDNN, which lays out the filter again at every call."""
    products = math.prod(w.shape) // w.shape[config.rhs_spec[0]]
    pixels = math.prod(x.shape) // x.shape[config.lhs_spec[1]] // math.prod(config.window_strides)
    fits = products >= SHORTEST_SUM and pixels <= MOST_PIXELS.get(x.dtype, pixels)
    return fits and any(isa.startswith("avx512") for isa in tuned.isa())


def by_winograd(config, x) -> bool:
    """Whether F(2×2, 3×3) is faster than the direct way, both packed."""
    batch, channels, *image = (x.shape[d] for d in config.lhs_spec)
    return channels >= 32 and batch * math.prod(image) >= 4 * FEWEST_TILES
