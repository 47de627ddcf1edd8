"""Activations as `jax.nn`, Flax and Keras spell them; the networks of `benchmarks.networks` are in test_networks.py."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import pytest

import jaxfuse
from jaxfuse.ops.activations import TABLE
from test_patterns import B, BETA, GAMMA, W, X, Z, ZR, check_values, conv, patterns
from test_train_step import close, sites

ACTIVATIONS = {
    "relu": [jax.nn.relu, nn.relu, keras.activations.relu, keras.ops.relu, keras.layers.ReLU(),
             lambda x: jnp.where(jnp.isnan(x) | (x > 0), x, 0)],
    "maximum0": [lambda x: jnp.maximum(x, 0), lambda x: jnp.maximum(0.0, x), lambda x: jnp.clip(x, 0)],
    "relu6": [jax.nn.relu6, nn.relu6, keras.activations.relu6, keras.ops.relu6, keras.layers.ReLU(6.0)],
    "clip6": [lambda x: jnp.clip(x, 0, 6), lambda x: jnp.maximum(jnp.minimum(x, 6), 0)],
    "clip": [lambda x: jnp.clip(x, 0, 5), lambda x: jnp.clip(x, 0, 1)],
    "leaky_relu": [jax.nn.leaky_relu, nn.leaky_relu, keras.activations.leaky_relu, keras.layers.LeakyReLU(0.3)],
    "elu": [jax.nn.elu, nn.elu, keras.activations.elu, lambda x: jax.nn.elu(x, 0.5)],
    "selu": [jax.nn.selu, nn.selu, keras.activations.selu],
    "celu": [lambda x: jax.nn.celu(x, 0.7), lambda x: nn.celu(x, 2.0), lambda x: keras.activations.celu(x, 2.0)],
    "gelu": [lambda x: jax.nn.gelu(x, approximate=False), keras.activations.gelu,
             lambda x: 0.5 * x * (1 + jax.scipy.special.erf(x / jnp.sqrt(2.0)))],
    "gelu_tanh": [jax.nn.gelu, nn.gelu, lambda x: keras.activations.gelu(x, approximate=True),
                  lambda x: 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x**3)))],
    "silu": [jax.nn.silu, nn.swish, keras.activations.silu, keras.ops.silu, lambda x: x * jax.nn.sigmoid(x)],
    "mish": [jax.nn.mish, keras.activations.mish, lambda x: x * jnp.tanh(jax.nn.softplus(x))],
    "hard_swish": [jax.nn.hard_swish, nn.hard_silu, keras.activations.hard_silu],
    "hard_sigmoid": [jax.nn.hard_sigmoid, nn.hard_sigmoid, keras.activations.hard_sigmoid],
    "hard_tanh": [jax.nn.hard_tanh, nn.hard_tanh, keras.activations.hard_tanh],
    "sigmoid": [jax.nn.sigmoid, nn.sigmoid, keras.activations.sigmoid, lambda x: 1 / (1 + jnp.exp(-x))],
    "tanh": [jnp.tanh, nn.tanh, keras.activations.tanh],
    "softplus": [jax.nn.softplus, nn.softplus, keras.activations.softplus],
    "relu_squared": [lambda x: jax.nn.relu(x) ** 2, lambda x: jnp.square(nn.relu(x))],
}


def test_every_activation_is_spelled_here():
    assert set(ACTIVATIONS) == set(TABLE) - {"none"}


@pytest.mark.parametrize("name, index", [(name, i) for name, spellings in ACTIVATIONS.items() for i in range(len(spellings))])
def test_activation(name, index):
    activation = ACTIVATIONS[name][index]
    fused, skipped = patterns(lambda x, w, b: activation(conv(x, w) + b), X, W, B)
    assert (fused, skipped) == ([f"conv+bias+{name}"], [])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values(name):
    check_values(lambda x, w, b: ACTIVATIONS[name][0](conv(x, w) + b), X, W, B, tolerance=1e-4)


def normalised(x, gamma, beta):
    return (x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5) * gamma + beta


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name, index", [(name, i) for name, spellings in ACTIVATIONS.items() for i in range(len(spellings))])
def test_activation_behind_batch_norm_in_a_train_step(name, index, residual):
    """Autodiff has written its derivative; the passes of the gradient begin behind it."""

    def loss(x, gamma, beta, added):
        z = normalised(x, gamma, beta)
        return jnp.sum(jnp.sin(ACTIVATIONS[name][index](z + added if residual else z)) * ZR)

    step, args = jax.value_and_grad(loss, (0, 1, 2, *[3] * residual)), (Z, GAMMA, BETA, ZR)
    report = jaxfuse.explain(step, *args, policy="always")
    label = f"bn{'+add' * residual}+{name}"
    assert sites(report, "forward") == sites(report, "backward") == {label: 1} and not report.skipped
    close(jaxfuse.fuse(step, policy="always")(*args), jax.jit(step)(*args), 1e-4)


def test_another_derivative_behind_batch_norm_is_not_the_activations():
    """silu forward, the derivative of relu backward: the rule is the user's."""

    @jax.custom_jvp
    def odd(z):
        return jax.nn.silu(z)

    odd.defjvp(lambda primals, tangents: (jax.nn.silu(*primals), jnp.where(primals[0] > 0, tangents[0], 0)))
    step, args = jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(odd(normalised(*args)))), (0, 1, 2)), (Z, GAMMA, BETA)
    close(jaxfuse.fuse(step, policy="always")(*args), jax.jit(step)(*args), 1e-4)


def test_the_same_text_with_another_constant():
    """The constants of a nested jit are arguments of it: its equations read the same."""
    for depth in (1.0, 0.25):
        check_values(lambda x, w, b: jax.nn.elu(conv(x, w) + b, depth), X, W, B, tolerance=1e-4)


def test_a_long_computation_of_a_number_is_not_followed():
    """Neither without end nor twice at every step."""

    def fn(x, w, s):
        for _ in range(2000):
            s = s * s
        return conv(x, w) * s

    assert patterns(fn, X, W, jnp.float32(1)) == (["conv+scale"], [])
