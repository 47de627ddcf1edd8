"""Integers, complex numbers, floats of 8 bits, and numbers of axes that no kernel has, in programs that are fused: what is
rounded to them stays rounded, and what no kernel takes is named and left as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from compare import jit
from layers import conv, randn
from recognition import FUSED, rows

import jaxfuse

F8, INT4, F32 = jnp.float8_e4m3fn, jnp.int4, jnp.float32
X, W, IMAGES, FILTER = randn(5, 6), randn(6, 4), randn(2, 5, 5, 2), randn(3, 3, 2, 4)


def norm(x):
    centered = x - x.mean(-1, keepdims=True)
    return centered * lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5)


def through(dtype, x):
    return (3 * x).astype(dtype).astype(F32)


# name -> (function, its arguments, the rows of explain that are fused)
ROUNDED = {
    "f8 after a norm": (lambda x: through(F8, norm(x)), (X,), ["layer_norm"]),
    "f8 between convolution and relu": (lambda x, w: jax.nn.relu(through(F8, conv(x, w))), (IMAGES, FILTER), ["conv+scale"]),
    "f8 inside silu": (lambda x, w: jax.nn.silu((x @ w).astype(F8).astype(F32)), (X, W), ["dense"]),
    "f8 bias": (lambda x, w, b: jax.nn.relu(x @ w + through(F8, b)), (X, W, randn(4)), ["dense+bias+relu"]),
    "int4 filter and bias": (
        lambda x, w, b: jax.nn.relu(conv(x, through(INT4, w)) + b.astype(F32)),
        (IMAGES, FILTER, jnp.arange(4, dtype=INT4)), ["conv+bias+relu"]),
    "integer after a norm": (lambda x: through(jnp.int8, norm(x)), (X,), ["layer_norm"]),
    "norm of what was an integer": (lambda x: norm(through(jnp.int8, x)) + x, (X,), ["layer_norm"]),
    "relu of an integer": (lambda x, w: jax.nn.relu(through(jnp.int32, x @ w)), (X, W), ["dense"]),
    "relu of a truncation": (lambda x, w: jax.nn.relu((x @ w).astype(jnp.int32).astype(F32)), (X, W), ["dense"]),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_what_is_rounded_stays_rounded(name):
    fn, args, expected = ROUNDED[name]
    assert [pattern for pattern, reason in rows(fn, *args) if reason == FUSED] == expected
    for f, fused in ((fn, jaxfuse.fuse(fn, policy="always")), *_gradients(fn)):
        made, plain = jit(fused)(*args), jit(f)(*args)
        tolerance = 2e-5 * max(1, np.abs(plain).max())
        # a number at the edge of two roundings may fall to either side
        assert np.mean(np.abs(made - plain) > tolerance) < 0.05


def _gradients(fn):
    def loss(*args):
        return jnp.sum(jnp.sin(fn(*args)))

    return [(jax.grad(loss), jaxfuse.fuse(jax.grad(loss), policy="always"))]


# name -> (function, its arguments, words of the reason)
LEFT = {
    "integer input of a dense layer": (lambda w, x: jax.nn.relu(x @ w), (W, jnp.arange(12).reshape(2, 6)), "dtypes int32, float32"),
    "integer convolution": (
        lambda b, x: conv(x, x[:1, :3, :3].transpose(1, 2, 3, 0)) * 1.0 + b, (randn(1), jnp.ones((2, 5, 5, 2), jnp.int32)),
        "dtype int32"),
    "complex layer": (lambda w, x: jnp.abs(jnp.tanh((x + 1j) @ (w + 1j))), (W, X), "dtypes complex64"),
    "scores of f8": (lambda b, x: (x @ x.mT).astype(F32) * 2 + b, (randn(1), randn(2, 3, 4).astype(F8)), "dtypes float8_e4m3fn"),
    "convolution without a spatial axis": (
        lambda w, x: jax.nn.relu(lax.conv_general_dilated(x, w, (), "SAME")), (W.T, X), "0 spatial axes: the kernel takes 1 to 3"),
    "convolution of four": (
        lambda w, x: lax.conv_general_dilated(x, w, (1,) * 4, "SAME"), (randn(3, 2, 2, 2, 2, 2), randn(1, 2, 2, 2, 2, 2)),
        "4 spatial axes: the kernel takes 1 to 3"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_no_kernel_takes(name):
    fn, args, words = LEFT[name]
    found = rows(fn, *args)
    assert FUSED not in dict(found).values() and any(words in reason for _, reason in found), found
    assert FUSED not in dict(rows(jax.grad(lambda *args: jnp.sum(fn(*args))), *args)).values()


def test_complex_numbers_in_a_norm_are_no_constants():
    def fn(g, x):
        return jnp.abs(norm((x * 1j + 1) * (2 + 1j)) * g)

    assert FUSED not in dict(rows(fn, randn(6), X)).values()
    gradient = jax.grad(lambda g, x: jnp.sum(fn(g, x)))
    np.testing.assert_allclose(jit(jaxfuse.fuse(gradient, policy="always"))(randn(6), X), jit(gradient)(randn(6), X), 1e-5)
