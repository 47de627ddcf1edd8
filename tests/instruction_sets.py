"""A file's cases at an instruction set of ours, in a process of its own: the level is read once."""

import json

import jax
import jax.numpy as jnp
import pytest

from compare import distance, jit, pairs, unfused, value_and_gradients, with_cotangents
from jaxfuse.runtime import ffi
from processes import python

LEVELS = ["portable", "avx2", "avx512"]
unavailable = ffi.unavailable  # as it is without the fixture `kernel`, which other tests of the file may have left in force


def errors_at(level: str, file: str, target: str) -> list[float]:
    """What the file prints, run as a script; the test is skipped where the kernel or the CPU's instructions are missing."""
    if reason := unavailable(target):
        pytest.skip(reason)
    run = python(file, JAXFUSE_SIMD=level)
    if run.returncode and "and this CPU has" in run.stderr:  # the module's own words for a level that it refuses
        pytest.skip(run.stderr.splitlines()[-1])
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def worst(cases, dtype: str) -> float:
    """The largest error of any output and gradient of any case, by the float32 program of the same inputs."""
    found = []
    for case in cases:
        arrays, cts = with_cotangents(case, case.inputs(dtype))
        if "relu" in case.name and dtype != "float32":  # a sign within rounding of 0
            continue
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), (arrays, cts))
        found += [distance(a, b) for a, b in pairs(jit(lambda a, c: value_and_gradients(case.fused, a, c))(arrays, cts),
                                                   unfused(case)(*wide))]
    return float(max(found))
