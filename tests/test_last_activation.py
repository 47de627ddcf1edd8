"""A loss that reads nothing but an activation's value: its cotangent is a function of the activation's argument too, or a number."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from layers import conv, randn
from recognition import FUSED, correct, fused, rows

IMAGES = randn(2, 6, 6, 4), randn(3, 3, 4, 4), randn(4)


def normalised(x, axis):
    return (x - x.mean(axis, keepdims=True)) * lax.rsqrt(x.var(axis, keepdims=True) + 1e-5)


def low(*arrays):
    return [a.astype(jnp.bfloat16) for a in arrays]


def wide(y):
    return y.astype(jnp.float32)


LOSSES = {
    "conv, mean of squares": (lambda x, w, b: (jax.nn.silu(conv(x, w) + b) ** 2).mean(), "conv+bias+silu"),
    "conv, mean": (lambda x, w, b: jax.nn.gelu(conv(x, w) + b).mean(), "conv+bias+gelu_tanh"),
    "conv, relu squared": (lambda x, w, b: (jax.nn.relu(conv(x, w) + b) ** 2).mean(), "conv+bias+relu_squared"),
    "conv, relu6 in a hard_sigmoid": (lambda x, w, b: jnp.sin(jax.nn.hard_sigmoid(conv(x, w) + b)).mean(), "conv+bias+hard_sigmoid"),
    "batch norm": (lambda x, w, b: jnp.square(jax.nn.silu(normalised(x, (0, 1, 2)) * b) - 1).mean(), "bn+silu"),
    "layer norm": (lambda x, w, b: (jax.nn.selu(normalised(x, -1) * b) ** 2).mean(), "layer_norm+selu"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_activation_is_fused_in_both_directions(name):
    loss, pattern = LOSSES[name]
    assert fused(jax.value_and_grad(loss, (0, 1, 2)), *IMAGES) == [pattern, pattern]


LOW = {
    "conv": (lambda x, w, b: (wide(jax.nn.silu(conv(*low(x, w)) + low(b)[0])) ** 2).mean(), "conv+bias+silu"),
    "batch norm": (lambda x, w, b: (wide(jax.nn.silu(normalised(low(x)[0], (0, 1, 2)) * low(b)[0])) ** 2).mean(), "bn+silu"),
}


@pytest.mark.parametrize("name", LOW)
def test_bfloat16_whose_loss_is_float32(name):
    loss, pattern = LOW[name]
    step = jax.grad(loss, (0, 1, 2))
    assert sorted(row for row, reason in rows(step, *IMAGES) if reason == FUSED) == [f"backward {pattern}", pattern]
    correct(step, *IMAGES)


def times_argument(x, w, b):
    """d(z·silu(z)) = silu(z)·dz + z·silu'(z)·dz: with z taken for a cotangent the first term is no multiple of it."""
    z = conv(x, w) + b
    return (z * jax.nn.silu(z)).mean()


def test_near_miss():
    assert fused(jax.value_and_grad(times_argument, (0, 1, 2)), *IMAGES) == ["conv+bias", "conv+bias"]
