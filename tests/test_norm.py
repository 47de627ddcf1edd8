"""Layer, RMS, group and instance norm beside the one contract: float16 at its limits, activations, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attributes import attributes
from compare import distance, jit, pairs, value_and_gradients
from exact import in_float64
from jaxfuse import ops
from jaxfuse.ops.activations import TABLE as ACTIVATIONS, named
from jaxfuse.ops.norm import normalised
from jaxfuse.ops.norm_config import NormConfig
from jaxfuse.runtime import ffi

needs_native = pytest.mark.skipif(ffi.unavailable("jaxfuse_norm_fwd") is not None, reason="the native module is not built")


@needs_native
@pytest.mark.parametrize("dtype, shape", [("bfloat16", (8, 16, 32)), ("bfloat16", (2, 4, 4, 32)), ("float32", (8, 16, 32))], ids=str)
def test_rows_are_not_copied_for_the_call(dtype, shape):
    x, vector = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((32,), jnp.float32)

    def forward_and_gradients(x, dy, gamma, beta):
        y, pullback = jax.vjp(ops.layer_norm, x, gamma, beta)
        return y, pullback(dy)

    text = jit(forward_and_gradients).lower(x, x, vector, vector).compile().as_text()
    assert "jaxfuse_norm_bwd" in text
    assert "copy(" not in text


@needs_native
@pytest.mark.parametrize("inner, sentence", [
    ((1, 1, 5), "x has shape (3, 4), expected a multiple of 5 elements, as inner has"),
    ((1, 0, 4), "attribute inner is (1, 0, 4), expected 3 positive numbers: spatial, groups, length"),
    ((1, 4), "attribute inner is (1, 4), expected 3 positive numbers: spatial, groups, length")], ids=str)
def test_the_kernel_refuses_what_does_not_fit(inner, sentence):
    options = dict(centered=True, epsilon=1e-6, epsilon_outside=False, **attributes("none"))
    x, vector = jnp.zeros((3, 4)), jnp.zeros((1, 4))
    with pytest.raises(Exception) as caught:
        ffi.call("jaxfuse_norm_fwd", [x], x, vector, vector, inner=inner, has_residual=False, wants_sum=False, saving=False, **options)
    assert sentence in str(caught.value)


def test_float16_at_its_limits(kernel):
    """Every float16 but NaN is read and written as it is, subnormals and infinities included."""
    every = np.arange(0, 1 << 16, dtype=np.uint16).view(np.float16)
    every = jnp.asarray(every[~np.isnan(every)])
    x = jnp.stack([jnp.zeros_like(every), every])
    _, s = jax.jit(lambda x: ops.layer_norm(x, *[jnp.ones(x.shape[1])] * 2, x[::-1], return_sum=True))(x)
    np.testing.assert_array_equal(s[0], every)


@pytest.mark.parametrize("activation", [name for name, known in ACTIVATIONS.items() if not (known.alpha and known.alpha.divides)])
@pytest.mark.parametrize("layer", ["layer_norm", "group_norm"])
def test_every_activation_at_ties_nan_and_inf(layer, activation, kernel):
    """With gamma = 0 the preactivation is beta, and the gradient of beta the activation's derivative."""
    beta = jnp.asarray([np.nan, np.inf, -np.inf, 0.0, -0.0, 6.0, 3.0, -3.0, 1.0, -1.0, 1e4, -1e4], jnp.float32)
    x = jax.random.normal(jax.random.key(0), (1, 3, 12))
    options = dict(groups=2) if layer == "group_norm" else {}

    def each(function):
        y, pullback = jax.vjp(function, beta)
        return y, *pullback(jnp.ones_like(y))

    fused = functools.partial(getattr(ops, layer), x, jnp.zeros(12), activation=activation, **options)
    plain = each(lambda beta: named(activation).value(jnp.broadcast_to(beta, x.shape)))
    for made, wanted in zip(jax.jit(lambda: each(fused))(), plain):
        np.testing.assert_allclose(made, wanted, 1e-4, 1e-4)


@pytest.mark.parametrize("inner", [(1, 1, 24), (6, 2, 2)])
def test_epsilon_outside_of_the_root(inner, kernel):
    config = NormConfig(inner, 1 if inner[0] == 1 else 2, epsilon=0.1, epsilon_outside=True)
    shapes = (4, 24) if inner[0] == 1 else (4, 6, 4), inner[1:], inner[1:]
    x, g, b = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))

    def plain(x, g, b):
        v = x.reshape(-1, *inner)
        centered = v - v.mean((1, 3), keepdims=True)
        return (centered / (jnp.sqrt(v.var((1, 3), keepdims=True)) + 0.1) * g + b).reshape(x.shape)

    both = (lambda *a: normalised(config, *a)), plain
    for made, wanted in zip(*(value_and_gradients(lambda a: (f(*a),), (x, g, b), (jnp.cos(x),)) for f in both)):
        for m, w in pairs(made, wanted):
            np.testing.assert_allclose(m, w, 1e-4, 1e-4)


def test_a_large_mean_cancels_nothing(kernel):
    """The mean is a float32 number: 1000 ± 3e-5. E[x²] - E[x]² would be off by a tenth."""
    x = 1000 + jax.random.normal(jax.random.key(0), (8, 768))
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
    made = jax.jit(ops.layer_norm)(x, jnp.ones(768), jnp.zeros(768))
    assert distance(made, exact) < 2e-4
    assert distance(jax.jit(lambda x: ops.group_norm(x.reshape(1, 8, 768), jnp.ones(768), jnp.zeros(768), groups=1))(x)[0],
                    (np.asarray(x, np.float64) - np.mean(x, dtype=np.float64)) / np.std(np.asarray(x, np.float64))) < 2e-4


NORMS = {
    "layer": lambda x, gamma: ops.layer_norm(x, gamma, 0 * gamma),
    "group": lambda x, gamma: ops.group_norm(x, gamma, 0 * gamma, groups=4),
    "instance": lambda x, gamma: ops.group_norm(x, gamma, 0 * gamma, groups=32),
}


@pytest.mark.parametrize("mean", [0, 10, 1000])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_where_the_mean_is_large(name, mean, kernel):
    """x itself has no more digits: its rounded mean makes the errors, and they are no larger than the reference's."""
    rng = np.random.default_rng(0)
    x, t = (jnp.float32(rng.standard_normal((8, 7, 7, 32)) + m) for m in (mean, 0))
    gamma = jnp.float32(1 + 0.1 * rng.standard_normal(32))
    groups = dict(layer=None, group=4, instance=32)[name]

    def plain(x, gamma):
        y = x if groups is None else x.reshape(8, 7, 7, groups, -1)
        axes = -1 if groups is None else (1, 2, 4)
        center = y.mean(axes, keepdims=True)
        return ((y - center) * jax.lax.rsqrt(jnp.square(y - center).mean(axes, keepdims=True) + 1e-6)).reshape(x.shape) * gamma

    def of(norm):
        return jax.jit(lambda x, gamma: (norm(x, gamma), *jax.grad(lambda *a: ((norm(*a) - t) ** 2).sum(), (0, 1))(x, gamma)))

    exact = in_float64(of(plain), x, gamma)
    for made, unfused, true in zip(of(NORMS[name])(x, gamma), of(plain)(x, gamma), exact):
        assert distance(made, true) <= 3 * distance(unfused, true) + 3e-7


def test_the_largest_numbers_cancel(kernel):
    """Their mean is 0, and their variance infinite; a difference of two of them would be no number."""
    x = 3e38 * jnp.float32([1, -1, -1, 1])[:, None] * jnp.ones(32)
    assert (jax.jit(lambda x: ops.group_norm(x[None], jnp.ones(32), jnp.zeros(32), groups=32))(x) == 0).all()
