"""Norms whose gradient the same program computes: numbers, partial gradients, and gradients that are not a norm's own."""

import functools
import operator

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from layers import BETA, GAMMA
from recognition import correct, differentiated, explain, labelled, norms, scalar
from spellings.norm import X, fast, group_norm, layer_norm, moments, normalised

ARGS = X, GAMMA, BETA


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
    "variance held": (
        lambda x, g, b: (lambda mean, var: (x - mean) * lax.rsqrt(lax.stop_gradient(var) + 1e-5) * g + b)(*moments(x, -1)), HELD),
    "mean held": (lambda x, g, b: (lambda mean, var: (x - lax.stop_gradient(mean)) * lax.rsqrt(var + 1e-5) * g + b)(*moments(x, -1)), HELD),
}


@pytest.mark.parametrize("name", OTHER_GRADIENTS)
def test_another_gradient(name):
    fn, words = OTHER_GRADIENTS[name]
    ((pattern, reason),) = norms(differentiated(fn, *ARGS), *ARGS)
    assert pattern == "layer_norm" and words in reason
    assert words is READ or norms(fn, *ARGS) == [(pattern, reason)]  # the gradient of what is fused is the kernel's


def test_a_gradient_of_the_same_formula_by_a_rule_of_the_users():
    assert norms(differentiated(layer_norm_by_rule(layer_norm), *ARGS), *ARGS) == ["layer_norm", "backward layer_norm"]


@pytest.mark.parametrize("inputs", [(0,), (1, 2), (2,)], ids=str)
def test_some_gradients(inputs):
    """Frozen parameters; an input that is not trained."""
    step = differentiated(layer_norm, *ARGS, inputs=inputs)
    assert norms(step, *ARGS) == ["layer_norm", "backward layer_norm"][: 1 + (inputs != (2,))]  # beta's alone needs no kernel
    correct(step, *ARGS)


def two(y, x, g, b):
    return y * jnp.sin(g), y * jnp.cos(b)


FURTHER = {  # what follows and is no part of it: the norm ends before, in both directions
    "a scale and a shift for each example, as in a diffusion transformer": lambda y, x, g, b: y * (1 + x[:, :1, :1]) + x[:, 1:2, :1],
    "stochastic depth": lambda y, x, g, b: x + (y * g + b) * (x[:, :1, :1, :1] > 0),
    "two scales": two,
    "read also before its scale": lambda y, x, g, b: (jnp.cos(y), y * g + b),
    "a scale of each token": lambda y, x, g, b: (y * g + b) * x[..., :1],
    "a rule for its gradient": lambda y, x, g, b: clipped(y) * g + b,
}


@pytest.mark.parametrize("name", FURTHER)
def test_further_scales(name):
    def fn(x, g, b):
        return FURTHER[name](normalised(x), x, g, b)

    report = explain(differentiated(fn, *ARGS), *ARGS)
    assert ([labelled(site) for site in report.fused], len(report.unfused_steps)) == (["layer_norm", "backward layer_norm"], 1)
    correct(differentiated(fn, *ARGS), *ARGS)


NORMS = {"layer_norm": layer_norm, "layer_norm, E[x²]-E[x]²": functools.partial(layer_norm, of=fast), "group_norm": group_norm}


@pytest.mark.parametrize("act", [lambda y: y, jax.nn.silu], ids=["alone", "silu"])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_every_sample(name, act):
    """Those of gamma and beta are no sums over the batch: the norm ends before them."""
    step = jax.vmap(differentiated(lambda x, g, b: act(NORMS[name](x, g, b)), *ARGS), (0, None, None))
    args, pattern = (jnp.stack([X, 2 + X]), GAMMA, BETA), name.split(",")[0]
    assert [labelled(site) for site in explain(step, *args).fused] == [pattern, f"backward {pattern}"]
    correct(step, *args)


def test_skip_connections_around_a_norm():
    """The sum's other gradients: one of the norm's own result, and one of what it is applied to."""

    def fn(x, g, b):
        y = layer_norm(x, g, b)
        return x + y + jnp.cos(x), y

    step = differentiated(fn, *ARGS)
    assert norms(step, *ARGS)[:2] == ["layer_norm", "backward layer_norm"]
    correct(step, *ARGS)


def test_gradient_of_a_norm_of_a_norm():
    """Read as it is, as a matrix, and by the second norm."""

    def fn(x, g, b):
        y = layer_norm(x, g, b)
        return layer_norm(y, g, b) + jnp.cos(y.reshape(72, 8)).reshape(x.shape) * y

    correct(differentiated(fn, *ARGS), *ARGS)


def test_what_a_loop_keeps_of_a_norm_for_its_backward_loop():
    """Of relu as a maximum that is whether z equals max(z, 0): both by XLA, or both by the kernel."""

    def fn(x, g):
        def part(x):
            centred = x - x.sum(-1, keepdims=True) / 8
            return jax.jit(lambda z: jnp.maximum(z, 0.0))(g * (centred * ((centred**2).sum(-1, keepdims=True) / 8 + 1e-3) ** -0.5))

        return lax.map(part, x)

    correct(jax.grad(scalar(fn), (0, 1)), X, GAMMA)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_narrow_result_of_a_wide_input(dtype):
    """Its mean is 300 times its deviation: rounded before that is taken off, a third of it would be lost."""

    def fn(x, g, b):
        return layer_norm(300 + x, g, b).astype(dtype)

    assert norms(fn, *ARGS) == ["layer_norm"]
    correct(fn, *ARGS)
    correct(jax.grad(scalar(fn), (0, 1, 2)), *ARGS)


@pytest.mark.costly
@pytest.mark.parametrize("act", [lambda y: y, jax.nn.gelu])
def test_casts_of_a_wide_result_by_several_readers(act):
    """As an attention of bfloat16 has them behind a norm of float32: their gradients are added in float32."""

    def fn(x, g, b):
        y = act(layer_norm(x, g, b))
        return jnp.sin(y.astype(jnp.bfloat16)), jnp.cos(y.astype(jnp.bfloat16)), jnp.exp(-y.astype(jnp.bfloat16) ** 2)

    step = differentiated(fn, *ARGS)
    label = "layer_norm" if act(1.0) == 1 else "layer_norm+gelu_tanh"
    assert norms(step, *ARGS) == [label, f"backward {label}"]
    correct(step, *ARGS)


@pytest.mark.parametrize("factors", [1, 2])
def test_factors_of_one_behind_it(factors):
    """As multipliers that are left at their defaults make them."""
    step = differentiated(lambda x, g, b: functools.reduce(operator.mul, [1.0] * factors, layer_norm(x, g, b)), *ARGS)
    assert norms(step, *ARGS) == ["layer_norm", "backward layer_norm"]
    correct(step, *ARGS)
