"""LSTM and GRU cells are recognised by their algebra in every framework's spelling, and scans over them fused; near-misses."""

from collections.abc import Callable

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from compare import jit, same
from frameworks import KEY, equinox, haiku, keras_layer, linen
from jaxfuse.patterns.recurrent.forward import ONE_STEP, Differentiated
from layers import randn
from recognition import NO_KERNEL, fuse, rows, scalar
from spellings.recurrent import NATIVE, SEQUENCE, XS, C, H, U, W, X, gru, gru_resets_first, lstm, same_with_gradients, sequence

keras = pytest.importorskip("keras")


def recognised(fn, *args) -> list[str]:
    """The patterns of all rows: sequences and dense layers are fused, cells left to XLA, and nothing speaks against the
    others but that there is no kernel."""
    found = rows(fn, *args)
    for pattern, reason in found:
        expected = ONE_STEP if pattern.endswith("cell") else SEQUENCE if pattern.startswith(("lstm", "gru", "dense")) else NO_KERNEL
        assert reason == expected, found
    return [pattern for pattern, _ in found]


CELLS = {
    "lstm_cell": lambda x, h, c, w, u: lstm(x, h, c, w, u),
    "lstm_cell, of one contraction": lambda x, h, c, w, u: lstm(jnp.concatenate([x, h], -1), h, c, jnp.concatenate([w, u]), 0 * u),
    "lstm_cell, sigmoid spelled": lambda x, h, c, w, u: lstm(x, h, c, w, u, lambda f: 1 / (1 + jnp.exp(-f))),
    "lstm_cell, forget gate shifted": lambda x, h, c, w, u: lstm(x, h, c, w, u, lambda f: jax.nn.sigmoid(f + 1)),
    "lstm_cell, bf16 with an f32 state": lambda x, h, c, w, u: lstm(
        *[a.astype(jnp.bfloat16) for a in (x, h)], c, *[a.astype(jnp.bfloat16) for a in (w, u)]
    ),
    "gru_cell": lambda x, h, c, w, u: gru(x, h, w, u),
    "gru_cell, resets before the layer": lambda x, h, c, w, u: gru_resets_first(x, h, w, u),
    "gru_cell, of a learned state": lambda x, h, c, w, u: gru(x, jnp.tanh(h @ u[:, 9:]), w, u),
}


@pytest.mark.parametrize("name", CELLS)
def test_cell(name):
    found = [row for row in recognised(CELLS[name], X, H, C, W, U) if "cell" in row]
    assert found == [name.split(",")[0]]


def test_a_cells_dense_layers_are_in_its_row():
    assert recognised(lambda *args: lstm(*args), X, H, C, W, U) == ["lstm_cell"]
    unrolled = recognised(lambda x, h, c, w, u: lstm(x, *lstm(x, h, c, w, u), w, u), X, H, C, W, U)
    assert unrolled == ["lstm_cell", "lstm_cell"]


# name -> (the cell with another function in its place, what the reason says)
MISSES = {
    "forget gate": (lambda x, h, c, w, u: lstm(x, h, c, w, u, jax.nn.silu), "silu: the forget gate of an LSTM is sigmoid"),
    "candidate": (lambda x, h, c, w, u: lstm(x, h, c, w, u, tanh=jax.nn.relu), "relu: the candidate of an LSTM is tanh"),
    "output": (lambda x, h, c, w, u: lstm(x, h, c, w, u, squash=jax.nn.relu), "relu: the output of an LSTM is tanh"),
    "unknown": (lambda x, h, c, w, u: lstm(x, h, c, w, u, tanh=jnp.sin), "no known activation: the candidate of an LSTM"),
    "GRU's candidate": (lambda x, h, c, w, u: gru(x, h, w, u, jax.nn.relu), "relu: the candidate of a GRU is tanh"),
    "GRU's reset gate": (lambda x, h, c, w, u: gru(x, h, w, u, reset=jnp.tanh), "tanh: the reset gate of a GRU is sigmoid"),
}


@pytest.mark.parametrize("name", MISSES)
def test_cell_near_miss(name):
    fn, words = MISSES[name]
    ((pattern, reason),) = rows(fn, X, H, C, W, U)
    assert pattern == ("gru_cell" if "GRU" in name else "lstm_cell")
    assert f"computes {words}" in reason and "recurrent.py:" in reason


NO_CELLS = {
    "highway": lambda x, h, c, w, u: (lambda z: z * jnp.tanh(x @ w[:, :3]) + (1 - z) * h)(jax.nn.sigmoid(x @ w[:, 3:6])),
    "state of another gate": lambda x, h, c, w, u: jax.nn.sigmoid(x @ w) * jnp.tanh(x @ w),
    "gates without layers": lambda x, h, c, w, u: jax.nn.sigmoid(h) * c + jax.nn.sigmoid(c) * jnp.tanh(h),
    "no output gate": lambda x, h, c, w, u: jax.nn.sigmoid(h @ u[:, :3]) * c + jax.nn.sigmoid(h @ u[:, 3:6]) * jnp.tanh(h @ u[:, 6:9]),
}


@pytest.mark.parametrize("name", NO_CELLS)
def test_no_cell(name):
    assert not [row for row in rows(NO_CELLS[name], X, H, C, W, U) if "cell" in row[0]]


# --- sequences ---------------------------------------------------------------------------------------------------


def test_a_scan_over_a_cell_is_a_sequence():
    for cell, name in ((lstm, "lstm"), (lambda x, h, c, w, u: (gru(x, h, w, u), c), "gru")):
        assert recognised(sequence(cell), XS, H, C, W, U) == [name]
        same_with_gradients(sequence(cell), XS, H, C, W, U)


def test_stacked_cells_in_one_scan():
    def two(x, h, c, w, u):
        h1, c1 = lstm(x, h[0], c[0], w, u)
        h2, c2 = lstm(jnp.concatenate([h1, h1[:, :1]], -1), h[1], c[1], w, u)
        return (h1, h2), (c1, c2)

    found = rows(sequence(two), XS, (H, H), (C, C), W, U)
    assert found == ([("lstm+lstm", "fused")] if NATIVE else [("lstm", SEQUENCE)] * 2)
    same_with_gradients(sequence(two), XS, (H, H), (C, C), W, U)


def test_sequence_near_misses():
    ((pattern, reason),) = rows(sequence(lstm, lambda state: (state[0], jnp.clip(state[1], -3, 3))), XS, H, C, W, U)
    assert pattern == "lstm" and "the next step's state is not the cell's: " in reason
    ((pattern, reason),) = rows(sequence(lambda x, h, c, w, u: lstm(x, h, 0.5 * c, w, u)), XS, H, C, W, U)
    assert pattern == "lstm" and "its state is not one that the loop carries: mul at " in reason


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_sequence_in_a_differentiated_program(name):
    """The loop and the one that autodiff made of it are one op each."""
    cell = lstm if name == "lstm" else lambda x, h, c, w, u: (gru(x, h, w, u), c)
    step, args = jax.value_and_grad(scalar(sequence(cell)), (0, 1, 3, 4)), (XS, H, C, W, U)
    if NATIVE:
        assert rows(step, *args) == [(name, "fused"), (f"backward {name}", "fused")]
    same(jit(fuse(step))(*args)[1], jit(step)(*args)[1], times=2.5)


@pytest.mark.parametrize("change", [lambda dh: jnp.clip(dh, -1, 1), lambda dh: dh + dh])
def test_another_gradient_of_a_sequence(change):
    """The state's cotangent is changed on its way, by a rule of the user's: the loop is an LSTM's, its gradient is not."""

    @jax.custom_vjp
    def ruled(h):
        return h

    ruled.defvjp(lambda h: (h, None), lambda _, dh: (change(dh),))
    step = jax.grad(scalar(sequence(lstm, lambda state: (ruled(state[0]), state[1]))), (0, 1, 3, 4))
    found = rows(step, XS, H, C, W, U)
    assert ("lstm", Differentiated().reason) in found and not any(reason == "fused" for _, reason in found)


# --- frameworks --------------------------------------------------------------------------------------------------


def nnx_rnn(cell):
    graph, params, keys = nnx.split(nnx.RNN(cell(4, 3, rngs=nnx.Rngs(0))), nnx.Param, ...)
    return lambda params, xs: nnx.merge(graph, params, jax.tree.map(jnp.asarray, keys))(xs), params


def unrolled(cell):
    return haiku(lambda: lambda xs: hk.dynamic_unroll(cell(3), xs, cell(3).initial_state(2), time_major=False), XS)


class Scanned(eqx.Module):
    """The sequence of one row, from zeros."""

    cell: eqx.Module
    state: Callable

    def __call__(self, xs):
        return lax.scan(lambda s, x: (self.cell(x, s), None), self.state(), xs)[0]


def of_keras(layer, **options):
    keras.utils.set_random_seed(0)
    return keras_layer(layer(3, **options), XS)


FRAMEWORKS = {
    "lstm, linen": lambda: linen(nn.RNN(nn.LSTMCell(3)), XS),
    "lstm, linen optimized": lambda: linen(nn.RNN(nn.OptimizedLSTMCell(3)), XS),
    "gru, linen": lambda: linen(nn.RNN(nn.GRUCell(3)), XS),
    "lstm, nnx": lambda: nnx_rnn(nnx.LSTMCell),
    "lstm, nnx optimized": lambda: nnx_rnn(nnx.OptimizedLSTMCell),
    "gru, nnx": lambda: nnx_rnn(nnx.GRUCell),
    "lstm, haiku": lambda: unrolled(hk.LSTM),
    "gru, haiku": lambda: unrolled(hk.GRU),
    "lstm, equinox": lambda: equinox(Scanned(eqx.nn.LSTMCell(4, 3, key=KEY), lambda: (jnp.zeros(3), jnp.zeros(3))), 1),
    "gru, equinox": lambda: equinox(Scanned(eqx.nn.GRUCell(4, 3, key=KEY), lambda: jnp.zeros(3)), 1),
    "lstm, keras": lambda: of_keras(keras.layers.LSTM),
    "gru, keras": lambda: of_keras(keras.layers.GRU),
    "gru, keras, resets first": lambda: of_keras(keras.layers.GRU, reset_after=False),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_sequence_of_a_framework(name):
    """One row; a dense layer of all steps at once, before the loop, is a row of its own (Keras's GRU)."""
    apply, weights = FRAMEWORKS[name]()
    found = recognised(apply, weights, XS)
    same_with_gradients(apply, weights, XS)
    assert [row for row in found if not row.startswith("dense")] == [name.split(",")[0]]
    assert len(found) == 1 or "keras" in name and "dense+bias" in found


@pytest.mark.skipif(not NATIVE, reason="a sequence and its gradient are fused together or not at all")
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_train_step_of_a_framework(name):
    """Weights in any order, also cut up before the loop (Haiku's GRU); gradients added up in any order (Keras's)."""
    apply, weights = FRAMEWORKS[name]()
    step, kind = jax.value_and_grad(scalar(apply), (0, 1)), name.split(",")[0]
    found = [row for row in rows(step, weights, XS) if "dense" not in row[0]]
    assert found == [(kind, "fused"), (f"backward {kind}", "fused")]
    same(jit(fuse(step))(weights, XS)[1], jit(step)(weights, XS)[1], times=2.5)


def test_keras_hard_sigmoid_is_a_near_miss():
    apply, weights = of_keras(keras.layers.LSTM, recurrent_activation="hard_sigmoid")
    ((pattern, reason),) = rows(apply, weights, XS)
    assert pattern == "lstm" and "the forget gate of an LSTM is sigmoid" in reason


def test_a_blend_with_constants_is_no_cell():
    """As in random numbers that are drawn while tracing: a layer's initial parameters, made and replaced in one function."""

    def blend(x):
        z = jnp.cos(lax.iota(jnp.float32, 4))
        return (1 - z) * jnp.sin(lax.iota(jnp.float32, 4)) + z * x

    assert rows(blend, X) == []

    def conv(x, w):
        layer = nnx.Conv(4, 4, (3,), rngs=nnx.Rngs(0))
        layer.kernel[...] = w
        return layer(x)

    assert "gru_cell" not in [pattern for pattern, _ in rows(conv, XS, randn(3, 4, 4))]
