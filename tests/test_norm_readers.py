"""Norms whose result is read by other norms, or in several shapes and types at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recognition import scalar
from test_recognition_norms import BETA, GAMMA, X, differentiated, fast, group_norm, layer_norm, norms

import jaxfuse


# name -> (function of the norm's value, gamma and beta; rows of explain that are norms)
READ = {
    "by another norm": (lambda y, g, b: jnp.tanh(layer_norm(y, g, b)), ["layer_norm", "layer_norm+tanh"]),
    "by another norm and a skip connection": (lambda y, g, b: y + jnp.tanh(layer_norm(y, g, b, fast)), ["layer_norm", "layer_norm+tanh"]),
    "by a group norm": (lambda y, g, b: y * jnp.cos(group_norm(y, g, b)), ["group_norm", "layer_norm"]),
    "scaled by its own mean": (lambda y, g, b: y * jnp.exp(y.mean(-1, keepdims=True)), ["layer_norm"]),
    "as it is and as a matrix": (lambda y, g, b: y + jnp.cos(y.reshape(72, 8)).reshape(y.shape), ["layer_norm"]),
    "as it is and transposed": (lambda y, g, b: (y, jnp.cos(y.swapaxes(1, 2))), ["layer_norm"]),
    "as it is and rounded": (lambda y, g, b: (jnp.sin(y), jnp.cos(y.astype(jnp.bfloat16))), ["layer_norm"]),
}


@pytest.mark.parametrize("name", READ)
def test_a_result_that_is_read(name):
    """What reads it in another shape, or takes statistics of it, is no part of the norm."""
    read, expected = READ[name]

    def fn(x, g, b):
        return read(layer_norm(x, g, b), g, b)

    assert sorted(norms(fn, X, GAMMA, BETA)) == expected
    found = norms(differentiated(fn), X, GAMMA, BETA)
    assert sorted(found) == sorted([*expected, *[f"backward {pattern}" for pattern in expected]])


def test_gradient_of_a_norm_of_a_norm():
    """Read as it is, as a matrix, and by the second norm."""

    def fn(x, g, b):
        y = layer_norm(x, g, b)
        return layer_norm(y, g, b) + jnp.cos(y.reshape(72, 8)).reshape(x.shape) * y

    gradient = jax.grad(scalar(fn), (0, 1, 2))
    made, plain = (jax.jit(f)(X, GAMMA, BETA) for f in (jaxfuse.fuse(gradient, policy="always"), gradient))
    for value, expected in zip(made, plain):
        np.testing.assert_allclose(value, expected, 1e-4, 1e-4 * np.abs(expected).max())


def test_what_a_loop_keeps_of_a_norm_for_its_backward_loop():
    """Of relu as a maximum that is whether z equals max(z, 0): both by XLA, or both by the kernel."""

    def fn(x, g):
        def part(x):
            centred = x - x.sum(-1, keepdims=True) / 8
            return jax.jit(lambda z: jnp.maximum(z, 0.0))(g * (centred * ((centred**2).sum(-1, keepdims=True) / 8 + 1e-3) ** -0.5))

        return jax.lax.map(part, x)

    gradient = jax.grad(scalar(fn), (0, 1))
    made, plain = (jax.jit(f)(X, GAMMA) for f in (jaxfuse.fuse(gradient, policy="always"), gradient))
    for value, expected in zip(made, plain):
        np.testing.assert_allclose(value, expected, 1e-4, 1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_narrow_result_of_a_wide_input(dtype):
    """Its mean is 300 times its deviation: rounded before that is taken off, a third of it would be lost."""

    def fn(x, g, b):
        return layer_norm(300 + x, g, b).astype(dtype)

    assert norms(fn, X, GAMMA, BETA) == ["layer_norm"]
    made = jaxfuse.fuse(fn, policy="always")(X, GAMMA, BETA)
    assert made.dtype == dtype
    np.testing.assert_allclose(np.float32(made), np.float32(fn(X, GAMMA, BETA)), 2e-2, 2e-2)
    gradient = jax.grad(lambda *args: scalar(fn)(*args).astype(jnp.float32), (0, 1, 2))
    found, plain = (jax.jit(f)(X, GAMMA, BETA) for f in (jaxfuse.fuse(gradient, policy="always"), gradient))
    for value, expected in zip(found, plain):
        np.testing.assert_allclose(value, expected, 2e-2, 2e-2 * np.abs(expected).max())
