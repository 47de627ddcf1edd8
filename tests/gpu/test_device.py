"""The contract of every op and whole train steps on a GPU, against float64 and beside the same thing unfused.

Run it where JAX has an NVIDIA GPU and the CUDA library is built:

    python -m pytest tests/gpu/test_device.py
"""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxfuse
from benchmarks.gpu_programs import two_blocks
from benchmarks.models import MobileNetV2, ResNet50
from cases import CASES, CORE
from compare import as_float64, as_near_to_the_truth, kinds, pairs, value_and_gradients, with_cotangents
from jaxfuse.ops.activations import TABLE as ACTIVATIONS
from jaxfuse.runtime import cuda, platforms

if platforms.here() != "cuda":
    pytest.skip("this machine has no NVIDIA GPU that JAX can use", allow_module_level=True)

DTYPES = ("float32", "bfloat16", "float16")
# The ops with kernels of the library, a case of each.
CALLED = {"batch_norm-residual_relu": "jaxfuse_batch_norm_apply", "layer_norm-residual": "jaxfuse_norm_fwd"}


@pytest.fixture(autouse=True)
def whole_float32():
    """Or XLA's products have 10 bits, and nothing is left to compare."""
    with jax.default_matmul_precision("float32"):
        yield


def test_the_library_is_built():
    assert cuda.unavailable("jaxfuse_norm_fwd") is None


def has_kernel(case):
    stages = importlib.import_module(f"jaxfuse.ops.{case.module}").OP
    return any(kernel.platform == "cuda" for kernel in stages.forward.kernels)


ROWS = [(name, dtype) for name, case in CASES.items() if has_kernel(case) for dtype in DTYPES if dtype != "float16" or name in CORE]


@pytest.mark.parametrize("name, dtype", ROWS)
def test_as_close_to_the_truth_as_unfused(name, dtype):
    case = CASES[name]
    args = with_cotangents(case, case.inputs(dtype))
    run, plain = (jax.jit(functools.partial(value_and_gradients, f)) for f in (case.fused, case.unfused))
    assert name not in CALLED or CALLED[name] in run.lower(*args).as_text()
    made = run(*args)
    # Of that one the sign of a few of 864 sums follows from their last rounding, and relu's derivative with it.
    times = 32 if (name, dtype) == ("conv-transposed_3d", "bfloat16") else 1
    as_near_to_the_truth(made, plain(*args), exactly(plain, args), times=times)
    for first, second in pairs(made, run(*args)):
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes(), "from one run to the next"


def exactly(function, args):
    """In float64, by XLA on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return jax.device_get(jax.jit(function)(*as_float64(args)))


@pytest.mark.parametrize("name", CALLED)
def test_transformations(name):
    """vmap of the gradient, a loop, a checkpoint, tangents; each as the same of the unfused op."""
    case = CASES[name]
    sets = [with_cotangents(case, case.inputs(seed=seed)) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sets)

    def each(function):
        def gradients(arrays, cotangents):
            return value_and_gradients(jax.checkpoint(function), arrays, cotangents)

        def looped(arrays, cotangents):
            return jax.lax.scan(lambda total, args: (total + 1, gradients(*args)), 0, (arrays, cotangents))

        def tangents(arrays, cotangents):
            return jax.jvp(function, (arrays,), (jax.tree.map(jnp.sin, arrays),))

        return jax.jit(lambda args: [jax.vmap(gradients)(*args), looped(*args), jax.vmap(tangents)(*args)])

    plain = each(case.unfused)
    as_near_to_the_truth(each(case.fused)(stacked), plain(stacked), exactly(plain, (stacked,)), times=2)


@pytest.mark.parametrize("name, where", [("batch_norm-residual_relu", (1, 2, 3)), ("layer_norm-residual", (1,))])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf(name, where, dtype):
    case = CASES[name]
    arrays, cotangents = with_cotangents(case, case.inputs(dtype))
    for i, value in enumerate((np.nan, np.inf, -np.inf)):
        place = tuple(w % n for w, n in zip(where, arrays["x"].shape)) if name != "layer_norm-residual" else (i % len(arrays["x"]),)
        arrays["x"] = arrays["x"].at[(*place, ..., i)].set(value)
    made, plain = (jax.jit(functools.partial(value_and_gradients, f))(arrays, cotangents) for f in (case.fused, case.unfused))
    for value, known in pairs(made, plain):
        np.testing.assert_array_equal(kinds(value), kinds(known))


def test_every_activation():
    case = CASES["batch_norm-residual_relu"]
    args = with_cotangents(case, case.inputs())
    for activation in ACTIVATIONS:
        of = dataclasses.replace(case, options=case.options | dict(activation=activation, alpha=0.3))
        plain = functools.partial(value_and_gradients, of.unfused)
        as_near_to_the_truth(jax.jit(functools.partial(value_and_gradients, of.fused))(*args), jax.jit(plain)(*args), exactly(plain, args))


def blocks(dtype):
    return lambda params, x: two_blocks(x, *params)


def of_blocks():
    keys = jax.random.split(jax.random.key(0), 5)
    vectors = [1 + 0.1 * jax.random.normal(keys[4], (16,)), jnp.full(16, 0.1)]
    return ([0.2 * jax.random.normal(k, (3, 3, 16, 16)) for k in keys[:4]], vectors), jax.random.normal(keys[4], (4, 12, 12, 16))


def network(model, dtype):
    return lambda params, x: model(dtype).apply(params, x, True, mutable=["batch_stats"])[0]


def of_network(model):
    images = jax.random.normal(jax.random.key(1), (4, 64, 64, 3))
    return model().init(jax.random.key(2), images), images


NETWORKS = {"blocks": (blocks, of_blocks)} | {
    model.__name__: (functools.partial(network, model), functools.partial(of_network, model)) for model in (ResNet50, MobileNetV2)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_networks(name, dtype):
    """Ten times: XLA records the launches of the later ones. It adds a filter's gradients in any order, so bits may differ."""
    network, arguments = NETWORKS[name]
    params, images = arguments()
    if name == "blocks":
        params = [w.astype(dtype) for w in params[0]], params[1]

    def gradients(dtype):
        wide = jnp.promote_types(dtype, jnp.float32)
        return jax.grad(lambda params, x: jnp.square(network(dtype)(params, x).astype(wide)).mean())

    step = gradients(jnp.dtype(dtype))
    args = params, images.astype(dtype)
    fused = jaxfuse.fuse(step, policy="always")
    assert jaxfuse.explain(step, *args, policy="always").fused
    made = [fused(*args) for _ in range(10)]
    plain, exact = jax.jit(step)(*args), exactly(gradients(jnp.dtype("float64")), args)
    # Fifty layers with four images make ten thousand times as much of a float32 rounding: XLA's own gradients are off by 0.01.
    times = 4000 if (name, dtype) == ("ResNet50", "float32") else 4
    for found in (made[0], made[-1]):
        as_near_to_the_truth(found, plain, exact, narrowest=dtype, times=times)


def test_exported():
    """For the GPU, loaded again. An exported program calls no library's kernels there."""
    case = CASES["batch_norm-residual_relu"]
    arrays = case.inputs()
    made = export.deserialize(export.export(jax.jit(case.fused), platforms=["cuda"])(arrays).serialize()).call(arrays)
    plain = jax.jit(case.unfused)
    as_near_to_the_truth(made, plain(arrays), exactly(plain, (arrays,)))
