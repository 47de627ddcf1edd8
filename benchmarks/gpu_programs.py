"""What `benchmarks.gpu` runs: programs as users write them, at real shapes, and what is expected of each.

Bytes per element are those of bfloat16; a float32 element moves twice as many.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


DIRECTIONS = ("forward", "with gradients")


class Program(NamedTuple):
    """`function(x, ..)`; `full` of its first arguments have x's shape, `vectors` more have its last axis."""

    name: str
    function: Callable
    full: int
    vectors: int
    shapes: tuple[tuple[int, ...], ...]
    odd: tuple[int, ...]  # a small shape that no vector of 8 fits
    # bytes per element, forward and backward, of XLA's own code, of plain JAX and of the kernels: counted (tests/gpu)
    moved: dict[str, tuple[float, float]]

    def arguments(self, shape, dtype, seed=0) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(seed), self.full + self.vectors)
        full = [jax.random.normal(k, shape, dtype) + 0.5 for k in keys[: self.full]]
        return full + [1 + 0.3 * jax.random.normal(k, shape[-1:], jnp.float32) for k in keys[self.full :]]

    def predicted(self, shape, directions: int, peer: str, bandwidth: float, itemsize: int = 2) -> float:
        """Microseconds of the first one or two directions: the bytes at this many per second."""
        return sum(self.moved[peer][:directions]) / 2 * itemsize * math.prod(shape) / bandwidth * 1e6


def normalised(x, gamma, beta):
    """By batch statistics, as Flax computes it."""
    wide = x.astype(jnp.float32)
    axes = tuple(range(x.ndim - 1))
    mean = wide.mean(axes)
    var = jnp.maximum(0.0, (wide * wide).mean(axes) - mean * mean)
    return ((wide - mean) * (lax.rsqrt(var + 1e-5) * gamma) + beta).astype(x.dtype)


def bn_add_relu(x, z, gamma, beta):
    return jax.nn.relu(normalised(x, gamma, beta) + z)


def bn_relu(x, gamma, beta):
    return bn_add_relu(x, jnp.zeros((), x.dtype), gamma, beta)


def layer_norm(x, gamma, beta):
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    var = jnp.maximum(0.0, (wide * wide).mean(-1, keepdims=True) - mean * mean)
    return ((wide - mean) * (lax.rsqrt(var + 1e-6) * gamma) + beta).astype(x.dtype)


def rms_norm(x, gamma):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * gamma).astype(x.dtype)


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def two_blocks(x, weights, vectors):
    """Two residual blocks, each of two 3×3 convolutions with their batch norms."""
    for first, second in zip(weights[::2], weights[1::2]):
        y = bn_relu(conv(x, first), *vectors)
        x = bn_add_relu(conv(y, second), x, *vectors)
    return x


IMAGES = tuple((128, size, size, channels) for size, channels in ((56, 256), (28, 512), (14, 1024), (7, 2048)))
ROWS = ((4096, 8192), (16384, 4096), (16384, 1024), (8192, 768))
PROGRAMS = (
    Program("bn+add+relu", bn_add_relu, 2, 2, IMAGES, (3, 5, 5, 13),
            dict(xla=(8.0, 16.0), plain=(8.15, 12.15), kernels=(8.13, 12.25))),
    Program("bn+relu", bn_relu, 1, 2, IMAGES, (3, 5, 5, 13), dict(xla=(6.0, 12.0), plain=(6.02, 10.02), kernels=(6.0, 10.0))),
    Program("layer norm", layer_norm, 1, 2, ROWS, (7, 131), dict(xla=(6.0, 20.1), plain=(6.01, 10.13), kernels=(4.0, 6.1))),
    Program("rms norm", rms_norm, 1, 1, ROWS, (7, 131), dict(xla=(4.0, 16.1), plain=(6.0, 10.1), kernels=(4.0, 6.1))),
)  # fmt: skip

# Written before any device was measured. Bandwidth: what copies reach on an H200, bytes a second.
PREDICTED = {
    "copy bandwidth": 4.3e12,
    "bf16 matmul": 700e12,
    "share of the copy bandwidth that the kernels reach": 0.85,
    "bn+add+relu, kernels over XLA's best": 1.3,
    "layer norm backward, kernels over XLA's best": 2.0,
    "ResNet-50 step, kernels over XLA": 1.1,
    "ResNet-50 step, plain JAX over XLA": 1.05,
}


def predictions() -> list[dict]:
    """Microseconds of every micro-benchmark at the predicted bandwidth: what its bytes take, nothing else."""
    return [
        dict(program=p.name, shape=shape, direction=direction,
             us={peer: round(p.predicted(shape, i, peer, PREDICTED["copy bandwidth"]), 1) for peer in p.moved})
        for p in PROGRAMS for shape in p.shapes for i, direction in enumerate(DIRECTIONS, 1)
    ]  # fmt: skip
