"""Layers that are written nearly like a cell, an attention or a convolution, and compute something else: the state that a cell keeps,
rows whose scores are all masked, products that overflow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from layers import randn
from recognition import fuse

# --- the state of a cell ---------------------------------------------------------------------------------------------

XS, U, H0, C0 = randn(4, 2, 5), 0.5 * randn(5, 20), randn(2, 5, seed=1), randn(2, 5, seed=2)
W = randn(5, 20)
OLD_STATES = {
    "decayed": lambda state, x: 0.5 * state,
    "reset": lambda state, x: jnp.where(x[:, :1] > 0, 0.0, state),
    "clipped": lambda state, x: jnp.clip(state, -0.1, 0.1),
    "bent": lambda state, x: jnp.tanh(state),
    "reversed": lambda state, x: state[:, ::-1],
    "another": lambda state, x: x,
    "constant": lambda state, x: C0,
    "without a gradient": lambda state, x: lax.stop_gradient(state),
}


def lstm(old):
    def step(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ W + h @ U, 4, -1)
        c = jax.nn.sigmoid(f) * old(c, x) + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lambda xs, h, c: lax.scan(step, (h, c), xs)[1]


def gru(old):
    def step(h, x):
        (xr, xz, xn), (hr, hz, hn) = jnp.split(x @ W[:, :15], 3, -1), jnp.split(h @ U[:, :15], 3, -1)
        z = jax.nn.sigmoid(xz + hz)
        h = (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * old(h, x)
        return h, h

    return lambda xs, h, c: lax.scan(step, h, xs)[1]


@pytest.mark.parametrize("old", OLD_STATES)
@pytest.mark.parametrize("cell", [lstm, gru])
def test_what_a_cell_keeps_is_not_its_state(cell, old):
    function = cell(OLD_STATES[old])
    step = lambda function: jax.value_and_grad(lambda *states: jnp.sin(function(*states)).sum(), (0, 1, 2))
    plain = jax.tree.leaves(jax.jit(step(function))(XS, H0, C0))
    for made in (fuse(step(function)), step(fuse(function))):
        for a, b in zip(jax.tree.leaves(made(XS, H0, C0)), plain):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# --- attention -------------------------------------------------------------------------------------------------------

Q, K, V = (randn(2, 3, 16, 8, seed=i) for i in range(3))
MASK = jnp.ones((2, 1, 16, 16), bool).at[1, :, 3:].set(False)  # padded rows have no key


def attention(q, k, v, before=None, after=None, biases=(), times=1):
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k)
    for bias in biases:
        scores = scores + bias
    scores = scores if before is None else jnp.where(before, scores, -jnp.inf)
    p = times * jax.nn.softmax(scores, -1)
    return jnp.einsum("bhts,bhse->bhte", p if after is None else jnp.where(after, p, 0), v)


def kept(share):
    return jax.random.bernoulli(jax.random.key(0), share, (2, 3, 16, 16))


ATTENTIONS = {
    "cleared by the mask": lambda *qkv: attention(*qkv, before=MASK, after=MASK),
    "cleared row by row": lambda *qkv: attention(*qkv, before=MASK, after=MASK.any(-1, keepdims=True)),
    "cleared by another mask": lambda *qkv: attention(*qkv, before=MASK & (jnp.arange(16) < 9), after=MASK),
    "cleared after a bias": lambda *qkv: attention(*qkv, biases=[jnp.where(MASK, 0, -jnp.inf)], after=MASK),
    "cleared where dropout is too": lambda *qkv: attention(*qkv, before=MASK, after=MASK & kept(0.9)),
    "not cleared": lambda *qkv: attention(*qkv, before=MASK),
    "two biases of 16 bits": lambda *qkv: attention(*qkv, biases=[jnp.full((16, 1), 300, jnp.bfloat16).astype(jnp.float32),
                                                                 jnp.linspace(0, 0.9, 16).astype(jnp.bfloat16).astype(jnp.float32)]),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_rows_without_a_score(name):
    function = ATTENTIONS[name]
    for f in (function, jax.grad(lambda *qkv: jnp.sin(function(*qkv)).sum(), (0, 1, 2))):
        for a, b in zip(jax.tree.leaves(fuse(f)(Q, K, V)), jax.tree.leaves(jax.jit(f)(Q, K, V))):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_cleared_rows_are_fused_and_dropout_too():
    for function in (ATTENTIONS["cleared by the mask"], lambda *qkv: attention(*qkv, before=MASK, after=kept(0.5), times=2)):
        for dtype in (jnp.float32, jnp.float16):
            report = jaxfuse.explain(function, *(a.astype(dtype) for a in (Q, K, V)), policy="always")
            assert [site.pattern for site in report.fused] == ["attention+mask+dropout"]


@pytest.mark.parametrize("computed_in", [jnp.float16, jnp.float32])
def test_a_number_after_the_softmax_in_float16(computed_in):
    q, v = jnp.full((1, 1, 2, 4), 0.1, jnp.float16), jnp.full((1, 1, 2, 4), 100, jnp.float16)

    def function(q, v):
        q, v = q.astype(computed_in), v.astype(computed_in)
        p = jax.nn.softmax(jnp.einsum("bhtd,bhsd->bhts", q, q + 1), -1) * computed_in(1000)
        return jnp.einsum("bhts,bhse->bhte", p, v, preferred_element_type=jnp.float32)

    np.testing.assert_allclose(fuse(function)(q, v), jax.jit(function)(q, v), rtol=1e-2)
