"""Activations as `jax.nn`, Flax and Keras spell them; the networks of `benchmarks.networks` are in test_frameworks.py."""

import jax
import jax.numpy as jnp
import pytest

from jaxfuse.ops.activations import TABLE
from layers import BETA, GAMMA, ZR, B, W, X, Z, batch_norm, conv
from recognition import correct, correct_with_gradients, explain, patterns, same_as_unfused, scalar, sites
from spellings.activations import ACTIVATIONS

each_spelling = pytest.mark.parametrize(
    "name, index", [(name, i) for name, spellings in ACTIVATIONS.items() for i in range(len(spellings))])


def test_every_activation_is_spelled_here():
    assert set(ACTIVATIONS) == set(TABLE) - {"none"}


@each_spelling
def test_activation(name, index):
    activation = ACTIVATIONS[name][index]
    fused, skipped = patterns(lambda x, w, b: activation(conv(x, w) + b), X, W, B)
    assert (fused, skipped) == ([f"conv+bias+{name}"], [])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values(name):
    correct_with_gradients(lambda x, w, b: ACTIVATIONS[name][0](conv(x, w) + b), X, W, B)


@pytest.mark.parametrize("residual", [False, True])
@each_spelling
def test_activation_behind_batch_norm_in_a_train_step(name, index, residual):
    """Autodiff has written its derivative; the passes of the gradient begin behind it."""

    def loss(x, gamma, beta, added):
        z = batch_norm(x, gamma, beta)
        return jnp.sum(2 + jnp.sin(ACTIVATIONS[name][index](z + added if residual else z)) * ZR)

    step, args = jax.value_and_grad(loss, (0, 1, 2, *[3] * residual)), (Z, GAMMA, BETA, ZR)
    report = explain(step, *args)
    label = f"bn{'+add' * residual}+{name}"
    assert sites(report, "forward") == sites(report, "backward") == {label: 1} and not report.skipped
    same_as_unfused(step, *args, times=25)  # of sums whose mean is taken off


def test_another_derivative_behind_batch_norm_is_not_the_activations():
    """silu forward, the derivative of relu backward: the rule is the user's."""

    @jax.custom_jvp
    def odd(z):
        return jax.nn.silu(z)

    odd.defjvp(lambda primals, tangents: (jax.nn.silu(*primals), jnp.where(primals[0] > 0, tangents[0], 0)))
    step, args = jax.grad(scalar(lambda *args: odd(batch_norm(*args))), (0, 1, 2)), (Z, GAMMA, BETA)
    correct(step, *args)


def test_the_same_text_with_another_constant():
    """The constants of a nested jit are arguments of it: its equations read the same."""
    for depth in (1.0, 0.25):
        correct_with_gradients(lambda x, w, b: jax.nn.elu(conv(x, w) + b, depth), X, W, B)


def test_a_long_computation_of_a_number_is_not_followed():
    """Neither without end nor twice at every step."""

    def fn(x, w, s):
        for _ in range(2000):
            s = s * s
        return conv(x, w) * s

    assert patterns(fn, X, W, jnp.float32(1)) == (["conv+scale"], [])
