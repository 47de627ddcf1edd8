"""What is part of a fused function's signature: strings, flags and static numbers among the arguments, beside arrays and nnx's objects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from jaxfuse import ops

X = jnp.arange(4.0) - 1


def chosen(x, mode):
    return x if mode == "a" else -x


def test_a_string_where_jax_runs_op_by_op():
    function = jaxfuse.fuse(chosen)
    np.testing.assert_array_equal(function(X, "a"), X)
    with jax.disable_jit():
        np.testing.assert_array_equal(function(X, "a"), X)
        np.testing.assert_array_equal(function(X, "b"), -X)


def test_a_string_beside_a_nan_that_is_looked_for():
    function = jaxfuse.fuse(lambda x, mode: jnp.log(x) if mode == "a" else x)
    function(X + 2, "a")
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="log"):
        function(X, "a")


@pytest.mark.parametrize("size", [3, np.int64(3), np.int32(3)])
def test_a_static_number(size):
    function = lambda x, n: x[:1] + jnp.zeros(n)
    assert jaxfuse.fuse(function, static_argnames="n")(X, n=size).shape == (3,)
    assert jaxfuse.fuse(function, static_argnums=1)(X, size).shape == (3,)


def test_a_string_given_to_a_jitted_function_within_another():
    inner = jaxfuse.fuse(jax.jit(chosen, static_argnames="mode"))
    np.testing.assert_array_equal(inner(X, "a"), X)
    np.testing.assert_array_equal(jaxfuse.fuse(lambda x: inner(x, "b") + 1)(X), 1 - X)


def test_a_string_beside_an_nnx_module():
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def counted(layer, x, mode=None):
        if layer is not None:
            layer.kernel[...] += 1
        return x if mode == "a" else 2 * x

    function = jaxfuse.fuse(counted)
    before = layer.kernel[...]
    for mode, factor in (("a", 1), (None, 2), ("a", 1)):
        np.testing.assert_array_equal(function(None, X, mode), factor * X)
        np.testing.assert_array_equal(function(layer, X, mode), factor * X)
    np.testing.assert_allclose(layer.kernel[...], before + 3, rtol=1e-6)


def test_the_state_of_an_argument_of_a_replaced_module():
    nnx = pytest.importorskip("flax.nnx")
    from jaxfuse.flax import nnx as fused

    class Dropped(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.dropout = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5)

        def __call__(self, x, rngs):
            return self.dropout(self.linear(x), rngs=rngs)

    x, found = jnp.ones((2, 8)), []
    for module in (Dropped(nnx.Rngs(0)), fused.replace(Dropped(nnx.Rngs(0)))):
        rngs = nnx.Rngs(dropout=1)
        found.append([module(x, rngs), module(x, rngs)])
        assert int(rngs.dropout.count[...]) == 2
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert np.any(found[0][0] != found[0][1])


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_attention_of_nothing_with_a_mask(shape):
    q, k = jnp.ones((*shape, 2, 8)), jnp.ones((shape[0], 4, 2, 8))
    assert ops.attention(q, k, k, mask=jnp.ones((shape[0], 1, shape[1], 4), bool)).shape == q.shape


def test_given_statistics_in_16_bits():
    one, zero = jnp.ones(2, jnp.float16), jnp.zeros(2, jnp.float16)
    y = ops.batch_norm(jnp.ones((4, 2), jnp.float16), one, zero, mean=one * 0.999, var=zero, epsilon=1e-8)
    y = y[0] if isinstance(y, tuple) else y
    np.testing.assert_allclose(y, np.full((4, 2), float(1 - one[0] * jnp.float16(0.999)) * 1e4), rtol=1e-2)
