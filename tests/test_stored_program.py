"""A program that was exported once still means what it meant: `stored_v1.program`, with a convolution, a batch norm and a dense layer.

By the names of targets and attributes alone (exported_targets.json) another meaning of one would not be seen. If JAX refuses the
file, for it promises to read one for half a year only, write another on a commit that still passes, with the oldest JAX that is
supported: `python tests/test_stored_program.py`. If a kernel's meaning changes, its target gets another version, and this file stays.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from compare import as_near_to_the_truth
from exact import in_float64
from jaxfuse.runtime import ffi
from layers import conv

FILE = pathlib.Path(__file__).with_name("stored_v1.program")
TARGETS = ["batch_norm_apply", "batch_norm_bwd_apply", "batch_norm_bwd_stats", "batch_norm_stats",
           "conv_bwd", "conv_fwd", "dense_bwd", "dense_fwd"]
SHAPES = dict(x=(2, 5, 6, 3), w=(3, 2, 3, 4), bias=(4,), gamma=(4,), beta=(4,), v=(4, 5), shift=(5,))


def arguments() -> dict[str, np.ndarray]:
    """No random numbers, whose generator may change."""
    return {name: np.sin(i + np.arange(np.prod(shape), dtype="float32")).reshape(shape) for i, (name, shape) in enumerate(SHAPES.items())}


def network(p):
    y = jax.nn.relu(conv(p["x"], p["w"], padding=((2, 0), (0, 1)), window_strides=(2, 1)) + p["bias"])
    mean, var = y.mean((0, 1, 2)), y.var((0, 1, 2))
    y = jax.nn.relu((y - mean) * jax.lax.rsqrt(var + 1e-3) * p["gamma"] + p["beta"])
    return jnp.tanh(y @ p["v"] + p["shift"])


def value_and_gradients(p):
    return network(p), jax.grad(lambda p: jnp.sum(jnp.sin(network(p))))(p)


def targets_of(program) -> list[str]:
    return sorted(set(re.findall(r"@jaxfuse_(\w+)_v1\(", program.mlir_module())))


def write():
    jax.config.update("jax_traceback_in_locations_limit", 0)  # no paths of this machine in the file
    program = jax.export.export(jax.jit(jaxfuse.fuse(value_and_gradients, policy="always")))(arguments())
    assert targets_of(program) == TARGETS
    FILE.write_bytes(program.serialize())


@pytest.mark.skipif(ffi.no_onednn() is not None, reason="not every kernel is built")
def test_it_means_what_it_meant():
    pytest.importorskip("flatbuffers")
    try:
        program = jax.export.deserialize(bytearray(FILE.read_bytes()))
    except Exception as error:
        pytest.fail(f"JAX {jax.__version__} does not read {FILE.name}; what to do stands at the top of {__file__}: {error}")
    assert targets_of(program) == TARGETS
    plain, exact = jax.jit(value_and_gradients)(arguments()), in_float64(value_and_gradients, arguments())
    as_near_to_the_truth(program.call(arguments()), plain, exact)


if __name__ == "__main__":
    write()
