"""What a place of a program keeps from call to call, and what a frozen program is called with."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from compare import same
from jaxfuse.runtime import ffi, processors

pytestmark = pytest.mark.usefixtures("some_kernel")


def block(weights, x):
    """Packed convolutions, one of them by Winograd, a depthwise one and a strided one with few channels."""
    def conv(x, w, strides=(1, 1), groups=1):
        return lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups)

    stem, wide, depthwise, squared, narrow, bias = weights
    x = jax.nn.relu(conv(x, stem, (2, 2)))
    h = jnp.clip(conv(jax.nn.relu(conv(x, wide) + bias), depthwise, groups=64), 0, 6)
    return conv(jax.nn.relu(conv(h, squared)), narrow) + x


SHAPES = (3, 3, 3, 32), (1, 1, 32, 64), (3, 3, 1, 64), (3, 3, 64, 64), (1, 1, 64, 32), (64,)


def weights(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return [(jax.random.normal(key, shape) / np.sqrt(np.prod(shape[:-1]))).astype(dtype) for key, shape in zip(keys, SHAPES)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("made", ["frozen", "fused"])
def test_calls_at_the_same_time(made, dtype):
    """Of one program, on several threads, each with arrays of its own: the same bits as one after the other."""
    given = weights(dtype)
    run = jaxfuse.freeze(block, given, policy="always") if made == "frozen" else jaxfuse.fuse(lambda x: block(given, x), policy="always")
    inputs = [jax.random.normal(jax.random.key(i), (1, 32, 32, 3), dtype) for i in range(6)]
    same(run(inputs[0]), block(given, inputs[0]), times=10, floor=0.02)
    wanted = [np.asarray(run(x)) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda i: (i % 6, np.asarray(run(inputs[i % 6]))), range(120)))
    for i, y in found:
        np.testing.assert_array_equal(y, wanted[i])


def test_after_the_number_of_threads_changed():
    """The same bits, cut anew."""
    run, x = jaxfuse.freeze(block, weights(), policy="always"), jax.random.normal(jax.random.key(1), (2, 32, 32, 3))
    wanted, before = run(x), ffi.num_threads()
    try:
        for threads in (1, 3, 2):
            ffi.set_num_threads(processors.Limit(threads, "a test"))
            np.testing.assert_array_equal(run(x), wanted)
    finally:
        ffi.set_num_threads(processors.Limit(before, "as it was"))


def test_small_constants_are_part_of_the_program():
    """And large ones are arguments; so is one for which a device was chosen."""
    large = jax.random.normal(jax.random.key(0), (700, 400))  # 1.1 MB
    small, placed = jnp.arange(400.0), jax.device_put(jnp.arange(400.0) / 7, jax.devices("cpu")[0])
    made = jaxfuse.freeze(lambda weights, x: jnp.tanh(x @ weights[0] + weights[1]) * weights[2], (large, small, placed), policy="never")
    x = jnp.ones((3, 700))
    same(made(x), jnp.tanh(x @ large + small) * placed)
    arguments = made._of((x,), {})[0].run.args[1]
    assert [(a.shape, a.committed) for a in arguments] == [((1, 400), True), ((700, 400), False)]
