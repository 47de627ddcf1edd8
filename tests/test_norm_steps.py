"""Norms whose gradient the same program computes: numbers, partial gradients, and gradients that are not a norm's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from compare import distance, jit
from exact import in_float64
from test_recognition_norms import BETA, GAMMA, HITS, X, differentiated, layer_norm, moments, normalised, norms

NUMBERS = ("layer_norm, E[x²]-E[x]²", "layer_norm, of bf16 in f32", "rms_norm+silu", "group_norm, channels first", "add+layer_norm")


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_a_differentiated_program(name):
    """Against float64: at most twice the error of the unfused program, or a few roundings of the loss, which is one number."""
    step, args = differentiated(HITS[name]), (X, GAMMA, BETA)
    exact = jax.tree.leaves(in_float64(step, *args))
    made, plain = (jax.tree.leaves(jit(f)(*args)) for f in (jaxfuse.fuse(step, policy="always"), step))
    for value, unfused, truth in zip(made, plain, exact, strict=True):
        assert value.dtype == unfused.dtype and distance(value, truth) <= 2 * distance(unfused, truth) + 1e-6


def layer_norm_by_rule(backward):
    """Whose gradient is the user's own."""
    rule = jax.custom_vjp(lambda x, g, b: layer_norm(x, g, b))
    rule.defvjp(lambda x, g, b: (layer_norm(x, g, b), (x, g, b)), lambda kept, dy: jax.vjp(backward, *kept)[1](dy))
    return rule


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, dy: (jnp.clip(dy, -1, 1),))


READ = "too, in the backward pass"
HELD = "holds a part of it: the kernel's gradient is that of the whole"
# The forward pass is that of a layer norm, and the gradient is not.
OTHER_GRADIENTS = {
    "another epsilon": (
        layer_norm_by_rule(lambda x, g, b: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-4) * g + b), READ),
    "clipped inside": (lambda x, g, b: clipped(normalised(x)) * g + b, READ),
    "variance held": (
        lambda x, g, b: (lambda mean, var: (x - mean) * lax.rsqrt(lax.stop_gradient(var) + 1e-5) * g + b)(*moments(x, -1)), HELD),
    "mean held": (lambda x, g, b: (lambda mean, var: (x - lax.stop_gradient(mean)) * lax.rsqrt(var + 1e-5) * g + b)(*moments(x, -1)), HELD),
}


@pytest.mark.parametrize("name", OTHER_GRADIENTS)
def test_another_gradient(name):
    fn, words = OTHER_GRADIENTS[name]
    ((pattern, reason),) = norms(differentiated(fn), X, GAMMA, BETA)
    assert pattern == "layer_norm" and words in reason
    assert words is READ or norms(fn, X, GAMMA, BETA) == [(pattern, reason)]  # the gradient of what is fused is the kernel's


def test_a_gradient_of_the_same_formula_by_a_rule_of_the_users():
    assert norms(differentiated(layer_norm_by_rule(layer_norm)), X, GAMMA, BETA) == ["layer_norm", "backward layer_norm"]


@pytest.mark.parametrize("inputs", [(0,), (1, 2), (2,)], ids=str)
def test_some_gradients(inputs):
    """Frozen parameters; an input that is not trained."""
    step, args = differentiated(layer_norm, inputs), (X, GAMMA, BETA)
    assert norms(step, *args) == ["layer_norm", "backward layer_norm"][: 1 + (inputs != (2,))]  # beta's alone needs no kernel
    for made, plain in zip(*[jit(f)(*args)[1] for f in (jaxfuse.fuse(step, policy="always"), step)], strict=True):
        np.testing.assert_allclose(made, plain, 1e-4, 1e-4)


def test_skip_connections_around_a_norm():
    """The sum's other gradients: one of the norm's own result, and one of what it is applied to."""

    def fn(x, g, b):
        y = layer_norm(x, g, b)
        return x + y + jnp.cos(x), y

    step, args = differentiated(fn), (X, GAMMA, BETA)
    assert norms(step, *args)[:2] == ["layer_norm", "backward layer_norm"]
    for made, plain in zip(*[jit(f)(*args)[1] for f in (jaxfuse.fuse(step, policy="always"), step)], strict=True):
        np.testing.assert_allclose(made, plain, 1e-4, 1e-4)
