"""How `benchmarks.gpu` measures: medians of whole programs that repeat a call, memory poisoned before, errors to float64."""

import contextlib
import math
import statistics
import time
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.runtime import cuda

CACHE = 50 << 20  # the second-level cache of a Hopper
PEERS = ("xla", "plain", "kernels")


class Time(NamedTuple):
    """Microseconds of one call; spread is the distance of the quartiles over the median."""

    us: float
    spread: float

    @classmethod
    def of(cls, seconds: list[float], calls: int) -> "Time":
        low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [*seconds] * 3
        return cls(middle / calls * 1e6, (high - low) / middle)


def rotations(nbytes: int) -> int:
    """How many sets of buffers a program goes round, so that none is still in the cache when its turn comes."""
    return max(2, min(16, math.ceil(4 * CACHE / max(1, nbytes))))


def timed(function, make_arguments, seconds: float = 1.0) -> Time:
    """`function(*make_arguments(i))`, as one program over several sets of buffers: launches are then not waited for."""
    nbytes = sum(a.nbytes for a in jax.tree.leaves(make_arguments(0)))
    sets = [make_arguments(i) for i in range(rotations(nbytes))]
    run = jax.jit(lambda sets: [function(*s) for s in sets])
    jax.block_until_ready(run(sets))
    found, end = [], time.perf_counter() + seconds
    while len(found) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        jax.block_until_ready(run(sets))
        found.append(time.perf_counter() - start)
    return Time.of(found, len(sets))


@contextlib.contextmanager
def peer(name: str):
    """Compiles anew for this peer: "plain" leaves the CUDA library out."""
    jax.clear_caches()
    left_out = mock.patch.object(cuda, "unavailable", lambda target: "left out by the benchmark")
    with left_out if name == "plain" else contextlib.nullcontext():
        yield
    jax.clear_caches()


def poison(nbytes: int) -> None:
    """Fills memory of that size, which the next results will lie in, with NaN."""
    jax.block_until_ready(jnp.full(nbytes // 4, jnp.nan, jnp.float32)).delete()


def gradient(function):
    """(cotangent, *arguments) -> the gradients of all arguments"""
    return lambda ct, *arguments: jax.vjp(function, *arguments)[1](ct)


def value_and_gradients(function):
    def run(ct, *arguments):
        y, pullback = jax.vjp(function, *arguments)
        return y, *pullback(ct)

    return run


def errors(values, exact) -> list[float]:
    """Of each the root mean square error, relative to the root mean square of the truth; infinite where a NaN is."""
    found = []
    for value, true in zip(values, exact, strict=True):
        value, true = np.asarray(value, np.float64), np.asarray(true, np.float64)
        error = np.sqrt(np.mean((value - true) ** 2) / (np.mean(true**2) + 1e-300))
        found.append(float(error) if np.isfinite(error) else math.inf)
    return found


def wrong(own: list[float], xla: list[float], dtype: str) -> bool:
    """Whether an error is larger than one and a half of XLA's and a rounding."""
    rounding = {"bfloat16": 2e-3, "float16": 3e-4, "float32": 5e-7}[dtype]
    return any(not a <= 1.5 * b + rounding for a, b in zip(own, xla, strict=True))


def bitwise_equal(first, second) -> bool:
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(first, second, strict=True))
