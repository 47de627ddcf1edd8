"""Gradients that are written nearly like those of an activation, a norm or a layer, and are others: what a rule of the user's own, a
factor of the loss or a cast does to them is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from layers import conv, randn
from recognition import correct_with_gradients, directions, fuse, patterns

X, W, B, T = randn(64, 8), randn(8, 4), randn(4), randn(64, 4)
ARRAYS = X, W, B
IMAGES, FILTERS = randn(2, 6, 6, 4), randn(3, 3, 4, 8)


def dense(x, w, b):
    return x @ w + b


def batch_norm(x, w, b):
    y = x @ w
    return (y - y.mean(0)) * lax.rsqrt(y.var(0) + 1e-5) + b


LAYERS = {"dense": dense, "batch norm": batch_norm}


def gradients_agree(loss, arrays, tolerance):
    """Of the loss fused, by each array, in direction and size."""
    step = jax.grad(loss, range(len(arrays)))
    for made, plain in zip(fuse(step)(*arrays), jax.jit(step)(*arrays)):
        made, plain = (np.asarray(a, np.float64) for a in (made, plain))
        np.testing.assert_array_equal(np.isfinite(made), np.isfinite(plain))
        assert np.linalg.norm(np.nan_to_num(made - plain)) <= tolerance * np.linalg.norm(np.nan_to_num(plain))


# --- sums that a bias's gradient is a part of -------------------------------------------------------------------------


PENALTIES = {"of the first power": lambda b: 0.2 * b, "of the second": lambda b: 0.2 * b**2}


@pytest.mark.parametrize("activation", [jnp.sin, jax.nn.relu], ids=lambda f: f.__name__)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_on_the_repeated_shift_of_a_scaled_convolution(penalty, activation):
    def loss(w, scale, shift):
        y = conv(IMAGES, w)
        shift = jnp.broadcast_to(shift, y.shape)
        return activation(y * scale + shift).sum() + PENALTIES[penalty](shift).sum()

    arrays = FILTERS, randn(8), randn(8)
    gradients_agree(loss, arrays, 1e-4)
    assert any("backward conv+bn" in site for site in directions(jax.grad(loss, (0, 1, 2)), *arrays))


def test_a_batch_norm_without_a_mean():
    """Of what is count times as large, from the sums alone."""
    def loss(x, w, b):
        y = x @ w
        total, squares = y.sum(0), (y * y).sum(0)
        scale = lax.rsqrt(64 * squares - total * total + 1e-3)
        return jnp.sin(jax.nn.relu((64 * y - total) * scale + b)).sum()

    gradients_agree(loss, ARRAYS, 1e-5)


# --- a rule of one's own ---------------------------------------------------------------------------------------------


def relu_with(slope):
    """As quantised training clips gradients: the derivative is the user's."""
    @jax.custom_vjp
    def activation(z):
        return jnp.maximum(z, 0)

    activation.defvjp(lambda z: (jnp.maximum(z, 0), z), lambda z, g: (slope(z, g),))
    return activation


RULES = {
    "of a range": lambda z, g: jnp.where((z > 0) & (z < 100), g, 0),
    "of two ranges": lambda z, g: jnp.where((z > 0) & (z < 13) | (z > 14), g, 0),
    "of what is finite": lambda z, g: jnp.where(jnp.isfinite(z) & (z > 0), g, 0),
    "with a small leak": lambda z, g: jnp.where(z > 0, g, 5e-5 * g),
}


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_derivative_rule_of_ones_own(rule, squared):
    activation = relu_with(RULES[rule])

    def loss(x, w, b):
        y = activation(dense(x, w, b))
        return ((y * y if squared else y) * T).sum()

    gradients_agree(loss, ((50 * X).at[0, 0].set(jnp.inf if "finite" in rule else 0.0), W, B), 1e-5)


def test_a_rule_that_computes_another_value():
    """Hard outside of autodiff, soft within."""
    @jax.custom_jvp
    def step(z):
        return jnp.sign(jax.nn.relu(z))

    step.defjvp(lambda primals, tangents: (jax.nn.relu(primals[0]), tangents[0] * (primals[0] > 0)))
    np.testing.assert_array_equal(fuse(lambda x, w: step(x @ w))(X, W), jax.jit(lambda x, w: step(x @ w))(X, W))


# --- a factor of the loss --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [jax.nn.relu, jnp.tanh, jax.nn.silu, jax.nn.gelu], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype, factor", [("float32", 1.00005), ("float16", 0.985), ("bfloat16", 0.985)])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_factor_near_one(layer, dtype, factor, activation):
    def loss(x, w, b):
        return (jnp.asarray(factor, dtype) * activation(LAYERS[layer](x, w, b)) * T.astype(dtype)).astype(jnp.float32).sum()

    arrays = [a.astype(dtype) for a in ARRAYS]
    made, plain = fuse(jax.grad(loss, (0, 1, 2)))(*arrays), jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
    exact = jax.grad(loss, (0, 1, 2))(*(a.astype(jnp.float32) for a in arrays)) if dtype != "float32" else plain
    for a, c in zip(made, exact):
        a, c = (np.asarray(v, np.float64).ravel() for v in (a, c))
        assert abs(a @ c / (c @ c) - 1) < (2e-5 if dtype == "float32" else 6e-3)


@pytest.mark.parametrize("function", [jnp.tanh, jax.nn.sigmoid, jax.nn.softplus], ids=lambda f: f.__name__)
def test_a_number_near_one_is_no_rounded_constant(function):
    """In bfloat16, whose gelu and selu have rounded ones."""
    names = patterns(lambda x, w: function(0.99 * (x @ w)), X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))[0]
    assert names in (["dense"], ["dense+scale"])


# --- casts -----------------------------------------------------------------------------------------------------------


def quantised(cast):
    @jax.custom_vjp
    def same(y):
        return y

    same.defvjp(lambda y: (y, None), lambda _, g: (cast(g),))
    return same


CASTS = {
    "int8": (lambda g: (g * 16).astype(jnp.int8).astype(g.dtype) / 16, 1.0),
    "float8": (lambda g: g.astype(jnp.float8_e5m2).astype(g.dtype), 1.0),
    "bfloat16": (lambda g: g.astype(jnp.bfloat16).astype(g.dtype), 1.0),
    "float16, which overflows": (lambda g: g.astype(jnp.float16).astype(g.dtype), 1e5),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_gradient_that_is_rounded(layer, cast):
    rounded, scale = CASTS[cast]
    keep = quantised(rounded)
    gradients_agree(lambda x, w, b: (jax.nn.relu(keep(LAYERS[layer](x, w, b))) * T).sum() * scale, ARRAYS, 1e-4)


def test_a_layers_value_that_overflows_on_its_way():
    def function(x, w, b):
        return jax.nn.relu((1e4 * x @ w).astype(jnp.float16).astype(jnp.float32) + b)

    made, plain = fuse(function)(*ARRAYS), jax.jit(function)(*ARRAYS)
    np.testing.assert_array_equal(np.isfinite(made), np.isfinite(plain))
    assert not np.isfinite(plain).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_mixed_precision_is_fused_all_the_same(dtype):
    """Products are summed in float32, and so are activations and norms; what goes from layer to layer is of 16 bits."""
    def product(x, w):
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    def norm(x, w, b):
        return batch_norm(product(x, w), jnp.eye(4), b.astype(jnp.float32)).astype(dtype)

    def activated(x, w, b):
        return jax.nn.silu(product(x, w).astype(dtype).astype(jnp.float32)).astype(dtype)

    arrays = [a.astype(dtype) for a in ARRAYS]
    for layer, name in ((norm, "bn"), (activated, "silu_grad+dense_grad")):
        step = jax.grad(lambda *arrays: (layer(*arrays) * T.astype(dtype)).astype(jnp.float32).sum(), (0, 1))
        assert name in patterns(step, *arrays)[0]


def test_a_bfloat16_value_that_is_rounded_to_float16():
    function = lambda x, w: jax.nn.relu((x @ w).astype(jnp.float16).astype(jnp.bfloat16))
    arguments = 1e5 * jnp.eye(8, dtype=jnp.bfloat16), jnp.eye(8, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(fuse(function)(*arguments), jax.jit(function)(*arguments))


# --- gradients of gradients ------------------------------------------------------------------------------------------


def gradient_of_two_layers(w, b, x):
    return jax.grad(lambda w: (jax.nn.relu(x @ w[0] + b) * jax.nn.relu(x @ w[1] + b)).sum())(w)


def two_cotangents(w, b, x):
    y, vjp = jax.vjp(lambda x: jax.nn.relu(conv(x, w) + b), x)
    return vjp(y)[0] + vjp(jnp.cos(y))[0]


@pytest.mark.parametrize("function, arrays", [(gradient_of_two_layers, (randn(2, 8, 4), B, X)),
                                              (two_cotangents, (FILTERS, randn(8), IMAGES))], ids=["dense", "convolution"])
def test_what_is_fused_with_its_gradient_is_differentiated(function, arrays):
    gradient = lambda f: jax.grad(lambda *arrays: (f(*arrays) ** 2).sum(), (0, 1, 2))(*arrays)
    for made, plain in zip(gradient(fuse(function)), gradient(function)):
        np.testing.assert_allclose(made, plain, rtol=1e-4, atol=1e-3)


# --- numbers at their limits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 32), (4, 5, 2, 16)], ids=["rows", "groups"])
@pytest.mark.parametrize("epsilon", [1.0, 1e-3, 1e-6])
def test_rows_that_are_nearly_constant(shape, epsilon):
    axes = -1 if len(shape) == 2 else (1, 3)
    x, scale, t = (randn(*shape, seed=3)).at[3].multiply(1e-5 * epsilon), 1 + randn(shape[-1]), randn(*shape, seed=4)

    def loss(x, scale):
        centred = x - x.mean(axes, keepdims=True)
        return (centred / (jnp.sqrt(jnp.square(centred).mean(axes, keepdims=True)) + epsilon) * scale * t).sum()

    gradients_agree(loss, (x, scale), 1e-4)


def test_filters_behind_a_large_variance_in_float16():
    half = jnp.float16
    mean, beta, variance, t = *(randn(8, seed=i).astype(half) for i in (5, 6)), jnp.full(8, 5e4, half), randn(2, 6, 6, 8).astype(half)

    def loss(x, w, gamma):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = jax.nn.relu((y - mean) * lax.rsqrt(variance + 1e-5) * gamma + beta)
        return (y * t).astype(jnp.float32).sum() * 512

    arrays = (30 * IMAGES).astype(half), FILTERS.astype(half), jnp.ones(8, half)
    gradients_agree(loss, arrays, 2e-2)
    for made in jax.grad(fuse(loss), (0, 1, 2))(*arrays):
        assert np.isfinite(made).all()


def test_the_derivative_where_nothing_is_lost():
    correct_with_gradients(lambda x, w, b: 0.5 * jax.nn.relu(x @ w + b), *ARRAYS)
