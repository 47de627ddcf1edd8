"""Convolutions with what XLA:GPU does not fuse, by XLA and by cuDNN's plans: a section of `benchmarks.gpu`."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import jaxfuse

from . import gpu_measure as measure

BANDWIDTH = 4.3e12  # bytes a second, expected of copies on an H200


class Program(NamedTuple):
    """`function(x, w, bias, *more)`; XLA runs `passes` over the result after its convolution, each reads and writes it."""

    name: str
    function: Callable
    residual: bool
    passes: int

    def arguments(self, shape, dtype, seed=0) -> list[jax.Array]:
        n, size, inputs, features, kernel = shape
        keys = jax.random.split(jax.random.key(seed), 4)
        w = jax.random.normal(keys[1], (kernel, kernel, inputs, features), dtype) / math.sqrt(kernel * kernel * inputs)
        return [jax.random.normal(keys[0], (n, size, size, inputs), dtype), w.astype(dtype), jax.random.normal(keys[2], (features,)),
                *[jax.random.normal(keys[3], (n, size, size, features), dtype)] * self.residual]

    def saved(self, shape) -> float:
        """Microseconds, predicted: what the passes take at the bandwidth, in a 2-byte dtype."""
        n, size, _, features, _ = shape
        return 2 * 2 * self.passes * n * size * size * features / BANDWIDTH * 1e6


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def bias_silu(x, w, bias):
    return jax.nn.silu(conv(x, w) + bias.astype(x.dtype))


def bias_add_gelu(x, w, bias, residual):
    return jax.nn.gelu(conv(x, w) + bias.astype(x.dtype) + residual, approximate=False)


def scale_relu(x, w, scale):
    """As an unfolded batch norm."""
    return jax.nn.relu(conv(x, w) * scale.astype(x.dtype))


PROGRAMS = (Program("conv+bias+silu", bias_silu, False, 1), Program("conv+bias+add+gelu", bias_add_gelu, True, 1),
            Program("conv+scale+relu", scale_relu, False, 1))
SHAPES = ((128, 56, 64, 64, 3), (128, 56, 64, 256, 1), (128, 28, 128, 128, 3), (128, 14, 256, 256, 3), (128, 7, 512, 512, 3))
ODD = (3, 9, 13, 21, 3)  # batch, size, input channels, output channels, kernel


def convolutions(seconds: float = 0.3) -> list[dict]:
    """Correct in both dtypes at small shapes; times in bfloat16. `kernel` says what ran."""
    rows = []
    for program in PROGRAMS:
        for dtype in ("bfloat16", "float16"):
            for shape in (ODD, (4, 14, 64, 64, 3)):
                rows += _correct(program, dtype, shape)
        for shape in SHAPES:
            rows += [_timed(program, shape, peer, seconds) for peer in ("xla", "cudnn")]
    return rows


def _fused(program: Program, peer: str, arguments):
    """(function, the kernel that runs it)"""
    if peer == "xla":
        return program.function, "xla"
    sites = jaxfuse.explain(program.function, *arguments, policy="always").fused
    return jaxfuse.fuse(program.function, policy="always"), "+".join(site.kernel for site in sites) or "none"


def _correct(program, dtype, shape) -> list[dict]:
    arguments = program.arguments(shape, dtype)
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        exact = [jax.jit(program.function)(*[jnp.asarray(jax.device_get(a), jnp.float64) for a in arguments])]
    rows, xla = [], None
    for peer in ("xla", "cudnn"):
        function, kernel = _fused(program, peer, arguments)
        results = []
        for _ in range(2):
            measure.poison(4 * sum(a.nbytes for a in arguments))
            results.append([jax.device_get(jax.jit(function)(*arguments))])
        found = measure.errors(results[0], exact)
        xla = xla or found
        rows.append(dict(program=program.name, dtype=dtype, shape=shape, peer=peer, kernel=kernel, errors=found,
                         repeatable=measure.bitwise_equal(*results), wrong=measure.wrong(found, xla, dtype)))
    return rows


def _timed(program, shape, peer, seconds) -> dict:
    arguments = program.arguments(shape, jnp.bfloat16)
    function, kernel = _fused(program, peer, arguments)
    found = measure.timed(function, lambda i: program.arguments(shape, jnp.bfloat16, i), seconds)
    return dict(program=program.name, shape=shape, peer=peer, kernel=kernel, us=found.us, spread=found.spread,
                saved_predicted=program.saved(shape))
