"""A float32 filter that a program casts to bfloat16 for a convolution: the cast is the kernel's, in value and in every derivative."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxfuse
from arrays import array
from layers import conv


def linear(x, w, b):
    return conv(x, w.astype(jnp.bfloat16)) + b.astype(jnp.bfloat16)


def layer(x, w, b):
    return jax.nn.relu(linear(x, w, b))


def wide(x, w, b):
    return jax.nn.relu(conv(x.astype(jnp.float32), w.astype(jnp.bfloat16).astype(jnp.float32)) + b)


def arguments():
    random = np.random.default_rng(0)
    x = array(random.standard_normal((2, 7, 7, 64)), jnp.bfloat16)
    w = array(random.standard_normal((3, 3, 64, 256)) / 24, jnp.float32)
    return x, w, array(random.standard_normal(256), jnp.float32)


def loss(f):
    return lambda *args: jnp.sum(f(*args).astype(jnp.float32) ** 2)


def assert_close(got, want):
    got, want = np.float64(got), np.float64(want)
    assert np.max(np.abs(got - want)) <= 2e-2 * np.max(np.abs(want)), np.max(np.abs(got - want)) / np.max(np.abs(want))


def test_the_cast_is_taken_in():
    args = arguments()
    fused = jax.make_jaxpr(jaxfuse.fuse(layer))(*args)
    assert "rounds_filter=True" in str(fused)
    assert_close(jax.jit(jaxfuse.fuse(layer))(*args), jax.jit(layer)(*args))


def test_derivatives():
    """Near those of the layer in float32, whose sums are not rounded."""
    args = arguments()
    gradients = lambda f: jax.jit(jax.grad(loss(f), (0, 1, 2)))(*args)
    for got, want in zip(gradients(jaxfuse.fuse(layer)), gradients(wide)):
        assert got.dtype == want.dtype
        assert_close(got, want)
    tangents = tuple(jnp.ones_like(a) for a in args)
    assert_close(jax.jvp(jaxfuse.fuse(linear), args, tangents)[1], jax.jvp(linear, args, tangents)[1])  # no sign can differ


def test_a_filter_for_every_item():
    x, w, b = arguments()
    ws = jnp.stack([w, 2 * w])
    over_filters = lambda f: jax.jit(jax.vmap(f, (None, 0, None)))(x, ws, b)
    assert_close(over_filters(jaxfuse.fuse(layer)), over_filters(layer))


def test_a_cast_that_is_read_twice_stays():
    def twice(x, w, b):
        narrow = w.astype(jnp.bfloat16)
        return jax.nn.relu(conv(x, narrow) + b.astype(jnp.bfloat16)), narrow

    fused = jax.make_jaxpr(jaxfuse.fuse(twice))(*arguments())
    assert "jaxfuse_conv" in str(fused) and "rounds_filter=True" not in str(fused)
