"""How `freeze` lays out the filter of a convolution, or the weight of a dense layer. Measured with AVX-512 on Zen 4, Zen 5 and an Intel
Xeon, and with AVX2 on Zen 3 (benchmarks/README.md); elsewhere it stays as it is."""

import enum
import math

import jax.numpy as jnp

from jaxfuse.ops.conv.packed import FEW_CHANNELS, fits_winograd
from jaxfuse.runtime import private
from jaxfuse.tuning import tuned

FEWEST_TILES = 16  # of 2×2 outputs: a transformed filter is 16/9 times as large


class Packing(enum.Enum):
    """The layouts of a constant filter."""

    none = "as it is"
    direct = "packed"
    winograd = "packed, and transformed for F(2×2, 3×3)"


def fastest(config, x, w, is_dense: bool) -> Packing:
    """The layout with which the convolution of x by w was measured to be fastest. A filter as it is, the kernel lays out again at every
    call."""
    batch, channels, *image = (private.known(x.shape[d]) for d in config.lhs_spec)
    positions, features = batch * math.prod(image), w.shape[config.rhs_spec[0]]
    if is_dense or has_one_place(config, x, w):
        wins = _has_avx2(x.dtype) or wins_packed(x.dtype, positions)
        return Packing.direct if wins else Packing.none
    products, pixels = math.prod(w.shape) // features, positions // math.prod(config.window_strides)
    tiles = batch * math.prod(-(-n // 2) for n in image)
    direct, winograd = _wins(x.dtype, channels, products, features, pixels)
    if winograd and fits_winograd(config, x, w) and channels >= 32 and tiles >= FEWEST_TILES:
        return Packing.winograd
    return Packing.direct if direct else Packing.none


def packs(dtype) -> bool:
    """Whether packed weights of this dtype were measured here, and found faster for some layers."""
    if has_avx512():
        return dtype != jnp.bfloat16 or not _has_amx() or tuned.multiplies_matrices()
    return _has_avx2(dtype)


def wins_expanded(x, activation) -> bool:
    """Whether an expansion of x, of channels last, is fastest together with the depthwise convolution behind it. Of bf16 oneDNN has
    faster ones, unless the activation is more than a clip; with AMX all of them. With AVX2 short lines cost more than they save."""
    is_clip = activation.kind in ("none", "relu", "piecewise_linear")
    if has_avx512():
        return x.dtype != jnp.bfloat16 or not (is_clip or _has_amx())
    return _has_avx2(x.dtype) and private.known(x.shape[2]) >= (28 if is_clip else 7)


def wins_packed(dtype, rows: int) -> bool:
    """Whether a dense layer of so many rows, with a packed weight, is faster than what it would be otherwise. Of bf16 all are where the
    CPU multiplies that, else the fewest; of f32 those that XLA's product, which packs the weight at each call, was slower for: on Zen 5 and
    Intel's CPUs with AMX all. With AVX2 few rows are as fast, and leave no operation to XLA, whose threads are others."""
    if not has_avx512():
        return _has_avx2(dtype) and rows <= 8
    multiplies_bf16 = "avx512_core_bf16" in tuned.isa()
    if dtype == jnp.bfloat16:
        return packs(dtype) and (rows <= 64 or multiplies_bf16 or tuned.multiplies_matrices())
    return rows <= 512 or _has_amx() or multiplies_bf16 and tuned.computes_whole_vectors()


def has_one_place(config, x, w) -> bool:
    """Whether images and filter are of one pixel, so that the convolution is a dense layer, as those of squeeze-and-excitation."""
    is_one = all(x.shape[i] == w.shape[j] == 1 for i, j in zip(config.lhs_spec[2:], config.rhs_spec[2:]))
    return is_one and config.feature_group_count == 1 and not config.transposed and not any(map(any, config.padding))


def has_avx512() -> bool:
    return any(isa.startswith("avx512") for isa in tuned.isa())


def _has_amx() -> bool:
    """Whether oneDNN multiplies matrices of bf16 by one instruction, many times as fast as our loops multiply vectors."""
    return "avx512_core_amx" in tuned.isa()


def _has_avx2(dtype) -> bool:
    return "avx2" in tuned.isa() and dtype == jnp.float32


def _wins(dtype, channels: int, products: int, features: int, pixels: int) -> tuple[bool, bool]:
    """Whether a packed filter is faster, directly and by Winograd. `products` of a sum: outputs of short ones oneDNN writes faster.
    `pixels` of the output: with many of them its layout of the filter costs little. Of few `channels` its kernels are slower with
    AVX-512; with AVX2 ours are, and those of few `features`, which leave most of a tile empty."""
    if has_avx512():
        if dtype == jnp.bfloat16 and tuned.multiplies_matrices():
            return products >= 128, False
        wins = products >= 64 and packs(dtype) and (dtype != jnp.bfloat16 or pixels <= 800 or channels < FEW_CHANNELS)
        return wins, wins
    if _has_avx2(dtype):
        return min(channels, features, products / 4) >= FEW_CHANNELS, True
    return False, False


def any_that_fits(config, x, w) -> Packing:
    """A layout that the kernel takes, be it faster or not: for policy "always"."""
    return Packing.winograd if fits_winograd(config, x, w) else Packing.direct
