"""How `benchmarks.gpu` measures: medians of whole programs that repeat a call, memory poisoned before, errors to float64."""

import collections
import contextlib
import math
import pathlib
import statistics
import tempfile
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
    return max(1, min(16, math.ceil(4 * CACHE / max(1, nbytes))))


def timed(function, make_arguments, seconds: float = 1.0) -> Time:
    """Of `function(*make_arguments(i))` on the clock of the wall, as one program over several sets of buffers. It is called again
    before it has ended, so that the device never waits for Python."""
    run, sets = _over_sets(function, make_arguments)
    together = max(1, round(0.02 / _wall(run, sets, 3)))
    found, end = [], time.perf_counter() + seconds
    while len(found) < 5 or time.perf_counter() < end:
        found.append(_wall(run, sets, together))
    return Time.of(found, len(sets))


def profiled(function, make_arguments, runs: int = 10) -> tuple[Time, dict[str, float]]:
    """The same by the profiler: what the device's kernels take, without the time between them; and microseconds by kernel.
    Raises ``RuntimeError`` where the profiler does not see them."""
    run, sets = _over_sets(function, make_arguments, xla_gpu_graph_min_graph_size=1 << 30)  # it does not see into a recorded graph
    jax.block_until_ready(run(sets))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(runs):
                jax.block_until_ready(run(sets))
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        events = sorted(_kernels(jax.profiler.ProfileData.from_file(str(file))))
    each = len(events) // runs
    if not each or len(events) % runs:
        raise RuntimeError(f"the profiler saw {len(events)} kernels in {runs} runs of one program")
    totals = [sum(ns for _, _, ns in events[i * each : (i + 1) * each]) * 1e-9 for i in range(runs)]
    by_kernel = collections.Counter()
    for _, name, ns in events:
        by_kernel[name[:60]] += ns / 1e3 / runs / len(sets)
    return Time.of(totals, len(sets)), dict(by_kernel.most_common())


def _over_sets(function, make_arguments, **options):
    """One program that goes round several sets of buffers, compiled; and the sets."""
    nbytes = sum(a.nbytes for a in jax.tree.leaves(make_arguments(0)))
    sets = [make_arguments(i) for i in range(rotations(nbytes))]
    return jax.jit(lambda sets: [function(*s) for s in sets], compiler_options=options), sets


def _wall(run, sets, times: int) -> float:
    """Seconds of one of so many runs, each started before the last has ended."""
    jax.block_until_ready(run(sets))
    start = time.perf_counter()
    for _ in range(times):
        last = run(sets)
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / times


def _kernels(profile):
    """(start, name, nanoseconds) of all that ran on the first GPU."""
    for plane in profile.planes:
        if plane.name == "/device:GPU:0":
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    yield from ((event.start_ns, event.name, event.duration_ns) for event in line.events)


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
