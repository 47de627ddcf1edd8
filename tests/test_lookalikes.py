"""Programs that are written nearly like a pattern, and compute something else where it is seldom looked: at rows that are constant, behind
a logarithm, in gradients, of integers. Fused or not, what they compute is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from layers import randn
from recognition import correct_with_gradients, fuse, patterns

X, W, B = randn(4, 16), randn(16, 32), randn(32)
ROWS = jnp.concatenate([randn(2, 32), jnp.full((1, 32), 3.0), jnp.zeros((1, 32))])
CHANNELS = randn(4, 8, 16).at[:, :, 3].set(2.0)
IMAGES, SCALE, SHIFT = randn(4, 8, 8, 16), randn(16, seed=1), randn(16, seed=2)
Q, K, V = (randn(2, 8, 2, 16, seed=i) for i in range(3))


def centred(x, axes=-1):
    return x - x.mean(axes, keepdims=True)


# --- activations: what a logarithm shows ----------------------------------------------------------------------------

BEHIND_A_LOGARITHM = {
    "binary cross-entropy as Keras clips it": lambda x, w: jnp.log(jnp.clip(jax.nn.sigmoid(x @ w), 1e-7, 1 - 1e-7)),
    "softplus and an epsilon": lambda x, w: jnp.log(jax.nn.softplus(x @ w - 300) + 1e-6),
    "squared relu and an epsilon": lambda x, w: jnp.log(jax.nn.relu(x @ w) ** 2 + 1e-6),
    "relu and an epsilon": lambda x, w: jnp.log(jax.nn.relu(x @ w) + 1e-12),
    "softplus and an epsilon, bfloat16": lambda x, w: jnp.log(jax.nn.softplus(x.astype(jnp.bfloat16) @ (10 * w).astype(jnp.bfloat16))
                                                              + jnp.bfloat16(5e-3)).astype(jnp.float32),
}


@pytest.mark.parametrize("name", BEHIND_A_LOGARITHM)
def test_what_is_added_to_an_activation_that_vanishes(name):
    function = BEHIND_A_LOGARITHM[name]
    plain = np.asarray(jax.jit(function)(X, 6 * W))
    np.testing.assert_allclose(fuse(function)(X, 6 * W), plain, rtol=2e-2 if "bfloat16" in name else 1e-4, atol=2e-3)


# --- activations: between the points where they are looked at ---------------------------------------------------------

BETWEEN = {
    "a band": lambda z: jnp.where((z > 0.51) & (z < 0.55), 0, jax.nn.relu(z)),
    "one number": lambda z: jnp.where(z == -100, 0, jax.nn.leaky_relu(z)),
    "one number of a line": lambda z: jnp.where(3 * z + 7 == -293, 0, jax.nn.leaky_relu(z)),
    "a dead zone": lambda z: jnp.where(z > 5e-4, z, 0),
    "a cut": lambda z: jnp.log(jnp.where(z < -11, 0, jax.nn.sigmoid(z))),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_an_activation_is_one_between_its_points(name):
    z = jnp.asarray([[-100.0, -14, -11.5, -3, 2e-4, 4e-4, 0.53, 0.54]])
    function, argument = BETWEEN[name], jnp.eye(8)
    np.testing.assert_allclose(fuse(lambda x, w: function(x @ w))(z, argument), function(z), rtol=1e-5, atol=1e-7)


# --- norms: rows that are constant ----------------------------------------------------------------------------------

NORMS = {
    "layer norm": lambda x, e: centred(x) * lax.rsqrt(x.var(-1, keepdims=True) + e),
    "RMS norm": lambda x, e: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + e),
    "outside of the root": lambda x, e: centred(x) / (x.std(-1, keepdims=True) + e),
    "the larger one": lambda x, e: centred(x) / jnp.maximum(x.std(-1, keepdims=True), e),
    "the larger variance": lambda x, e: centred(x) * lax.rsqrt(jnp.maximum(x.var(-1, keepdims=True), e)),
}


@pytest.mark.parametrize("epsilon", [1e-3, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize("name", NORMS)
def test_a_small_epsilon_stays(name, epsilon):
    function = lambda x: NORMS[name](x, epsilon)
    np.testing.assert_allclose(fuse(function)(ROWS), jax.jit(function)(ROWS), rtol=1e-4, atol=1e-4)


def test_a_small_number_times_a_large_parameter():
    function = lambda x, b: centred(x) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) + jnp.broadcast_to(b, x.shape) * 1e-8
    arguments = ROWS, jnp.full(32, 1e8)
    np.testing.assert_allclose(fuse(function)(*arguments), jax.jit(function)(*arguments), rtol=1e-4, atol=1e-4)


IN_FLOAT64 = {
    "layer norm": lambda x: centred(x) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5),
    "RMS norm": lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5),
    "batch norm": lambda x: (x - x.mean((0, 1))) * lax.rsqrt(x.var((0, 1)) + 1e-5),
    "pool": lambda x: x.mean((1, 2)),
}


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_statistics_that_the_program_takes_in_float64(name):
    with jax.enable_x64(True):
        function = lambda x: IN_FLOAT64[name](x.astype(jnp.float64)).astype(jnp.float32)
        x = randn(4, 8, 8, 16) * (1e38 if name == "pool" else 1e25)
        np.testing.assert_allclose(fuse(function)(x), jax.jit(function)(x), rtol=1e-5, atol=1e-5)


def test_norms_with_the_epsilon_of_bert_are_fused():
    assert patterns(lambda x: NORMS["layer norm"](x, 1e-12), ROWS)[0] == ["layer_norm"]


def test_a_batch_norm_of_a_constant_channel():
    function = lambda x: (x - x.mean((0, 1))) * lax.rsqrt(x.var((0, 1)) + 1e-12) * 2
    np.testing.assert_allclose(fuse(function)(CHANNELS), jax.jit(function)(CHANNELS), rtol=1e-4, atol=1e-4)


def test_statistics_of_what_was_rounded():
    def function(x):
        s = x.astype(jnp.bfloat16).astype(jnp.float32)
        return (x - s.mean(-1, keepdims=True)) * lax.rsqrt(s.var(-1, keepdims=True) + 1e-5)

    np.testing.assert_allclose(fuse(function)(ROWS + 100), jax.jit(function)(ROWS + 100), rtol=1e-3, atol=1e-3)


# --- gradients ------------------------------------------------------------------------------------------------------


def test_a_softmax_whose_sum_has_no_gradient():
    def attend(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
        e = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
        return jnp.einsum("bhqk,bkhd->bqhd", e / lax.stop_gradient(e.sum(-1, keepdims=True)), v)

    correct_with_gradients(attend, Q, K, V)


def _scaled_by_vjp(slope):
    @jax.custom_vjp
    def same(x):
        return x * 1.0

    same.defvjp(lambda x: (x * 1.0, None), lambda _, g: (g * slope,))
    return same


def _scaled_by_jvp(slope):
    @jax.custom_jvp
    def same(x):
        return x * 1.0

    same.defjvp(lambda x, t: (same(*x), t[0] * slope))
    return same


@pytest.mark.parametrize("scaled", [_scaled_by_vjp, _scaled_by_jvp])
def test_batch_norms_that_differ_in_a_derivative_rule(scaled):
    first, second = scaled(0.0), scaled(50.0)

    def norm(x, rule):
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) * (rule(lax.rsqrt(var + 1e-5)) * SCALE) + SHIFT

    loss = lambda x: jnp.vdot(norm(jnp.sin(norm(x, first)), second), IMAGES[::-1])
    plain = jax.jit(jax.grad(loss))(IMAGES)
    for found in (jax.jit(jax.grad(fuse(loss)))(IMAGES), fuse(jax.grad(loss))(IMAGES)):
        np.testing.assert_allclose(found, plain, rtol=1e-3, atol=1e-3)


def with_a_rule(table):
    """A function of one text for all tables, which its own program does not show."""
    inner = jax.jit(lambda x: x * table)

    @jax.custom_jvp
    def function(x):
        return jnp.sin(inner(x))

    function.defjvp(lambda primals, tangents: (function(*primals), jnp.cos(inner(*primals)) * inner(*tangents)))
    return function


def test_functions_with_rules_that_close_over_other_arrays():
    first, second = (with_a_rule(np.linspace(1, end, 32).astype(np.float32)) for end in (2, 3))
    correct_with_gradients(lambda x, w, b: (jax.nn.relu(x @ w + b), first(x @ w), second(x @ w)), X, W, B)


def test_two_derivatives_of_one_value_called_in_one_line():
    def relu_times(slope):
        @jax.custom_jvp
        def relu(x):
            return jnp.maximum(x, 0)

        relu.defjvp(lambda x, t: (relu(*x), slope * jnp.where(x[0] > 0, t[0], 0)))
        return relu

    for activation in map(relu_times, (1.0, 2.0)):
        correct_with_gradients(lambda x, w: activation(x @ w), X, W)


# --- numbers and casts ----------------------------------------------------------------------------------------------


def columns_first(x, w, b):
    """`order="F"` is a reshape with a parameter."""
    return jax.nn.relu(x @ w + b.reshape(2, -1).ravel(order="F"))


def norm_in_columns(x, w, b):
    y = centred(x) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return y.reshape(-1, x.shape[-1]).reshape(x.shape[-1], -1, order="F") @ jnp.ones((x.size // x.shape[-1], 1))


def leaks_of_whole_numbers(x, w, b):
    y = x @ w + b
    return jnp.where(y > 0, y, y * lax.div(jnp.full((), 3), jnp.full((), 2)))


def masked_whole_numbers(x, w, b):
    n = jnp.bitwise_and(jnp.int32(6), jnp.int32(3))
    return lax.scan(lambda c, _: (jax.nn.relu(c @ w[:, :16] + b[:16]) * n, None), x, None, length=2)[0]


def clipped_at_a_whole_number(x, w, b):
    bounded = jax.jit(lambda y, limit: jnp.minimum(jnp.maximum(y, 0), limit.astype(jnp.int32).astype(jnp.float32)))
    return bounded(x @ w + b, jnp.float32(2.7))


def what_wraps_around(x, w, b):
    number = jnp.full((), 200, jnp.uint8)
    return jax.nn.leaky_relu(x @ w + b, (number + number).astype(jnp.float32) / 1000)


def what_overflows(x, w, b):
    number = jnp.full((), 300, jnp.float16)
    return jax.nn.leaky_relu(x @ w + b, 1e4 / (number * number).astype(jnp.float32))


@pytest.mark.parametrize("function", [columns_first, norm_in_columns, leaks_of_whole_numbers, masked_whole_numbers,
                                      clipped_at_a_whole_number, what_wraps_around, what_overflows])
def test_numbers_of_the_program(function):
    correct_with_gradients(function, X, W, B)


def test_each_call_of_a_generator_draws_anew():
    drawn = fuse(lambda x, w: (jax.nn.relu(x @ w), lax.rng_uniform(0.0, 1.0, (3,)) - lax.rng_uniform(0.0, 1.0, (3,))))(X, W)[1]
    assert np.any(drawn != 0)


float8 = lambda v: v.astype(jnp.float8_e4m3fn).astype(jnp.float32)
whole = lambda v: v.astype(jnp.int32).astype(jnp.float32)
same = lambda v: v


@pytest.mark.parametrize("state, gates, output", [(float8, same, same), (same, whole, same), (same, float8, same), (same, same, float8)])
def test_casts_that_lose_in_a_loop_of_cells(state, gates, output):
    xs, w, u, b, zeros = randn(5, 4, 8), randn(8, 64), 0.5 * randn(16, 64), randn(64), jnp.zeros((4, 16))

    def step(carried, x):
        h, c = carried
        i, f, g, o = jnp.split(gates(x @ w + state(h) @ u + b), 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = output(jax.nn.sigmoid(o) * jnp.tanh(c))
        return (h, c), h

    function = lambda xs: lax.scan(step, (zeros, zeros), xs)[1]
    np.testing.assert_allclose(fuse(function)(xs), jax.jit(function)(xs), rtol=1e-4, atol=1e-4)


def ensemble_with_one_bias(x, w, b):
    """As many networks as an image has pixels: the bias repeated over pixels has as many numbers as they have biases."""
    def layer(x, w):
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))
        return jnp.tanh(y + jnp.broadcast_to(b[:, None, None], y.shape[1:]))

    return jax.vmap(layer)(x, w)


def heads_with_a_bias_each(x, w, b):
    """As many rows as a head has features."""
    return jnp.tanh(jnp.einsum("npd,dhk->nphk", x, w) + jnp.broadcast_to(b[:, None], (8, 4, 1)))


@pytest.mark.parametrize("function, shapes", [(ensemble_with_one_bias, [(4, 2, 3, 2, 2), (4, 3, 3, 3, 3), (3,)]),
                                              (heads_with_a_bias_each, [(2, 8, 16), (16, 4, 8), (4,)])])
def test_a_bias_along_some_of_the_channel_axes(function, shapes):
    rng = np.random.default_rng(0)
    correct_with_gradients(function, *[jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes])


def test_random_numbers_under_two_settings():
    def function(x, w):
        kinds = []
        for partitionable in (True, False):
            with jax.threefry_partitionable(partitionable):
                kinds.append(jax.random.normal(jax.random.key(0), (4,)))
        return jax.nn.relu(x @ w), *kinds

    made = fuse(function)(jnp.ones((4, 4)), jnp.ones((4, 4)))
    for value, known in zip(made, jax.jit(function)(jnp.ones((4, 4)), jnp.ones((4, 4)))):
        np.testing.assert_array_equal(value, known)
