"""Loops over LSTM and GRU cells that are fused, with values and gradients; near-misses, which stay as they are, with the reason."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxfuse
from jaxfuse import ops
from jaxfuse.tuning import tuned
from jaxfuse.tuning.rules.rule import Point, Rule
from compare import distance
from layers import randn
from recognition import rows, scalar
from spellings.recurrent import NATIVE, SEQUENCE, XS, C, H, U, W, gru, lstm, same_with_gradients, sequence


def outputs(xs, h, c, w, u, reverse=False):
    """Backwards; both states and a dense layer of them returned at every step."""

    def step(state, x):
        h, c = lstm(x, *state, w, u)
        return (h, c), (h, c, jnp.tanh(h @ u) + c.sum())

    return lax.scan(step, (h, c), xs.swapaxes(0, 1), reverse=reverse)


def one_row(xs, h, c, w, u):
    return lax.scan(lambda state, x: (lstm(x, *state, w, u), None), (h, c), xs)[0]


def longest(xs, lengths, h, c, w, u):
    """As Flax does it: every state is kept, and the one at each row's length taken."""
    (_, states) = lax.scan(lambda s, x: (lstm(x, *s, w, u),) * 2, (h, c), xs.swapaxes(0, 1))
    return [s[lengths - 1, jnp.arange(2)] for s in states]


LOW = [a.astype(jnp.bfloat16) for a in (XS, W, U)]
HITS = {
    "outputs of every step": (outputs, (XS, H, C, W, U)),
    "reverse": (lambda *args: outputs(*args, reverse=True), (XS, H, C, W, U)),
    "no batch": (one_row, (XS[0], H[0], C[0], W, U)),
    "bf16": (sequence(lstm), (LOW[0], H.astype(jnp.bfloat16), C.astype(jnp.bfloat16), *LOW[1:])),
    "bf16, f32 states": (sequence(lambda x, h, c, w, u: lstm(x, h.astype(x.dtype), c, w, u)), (LOW[0], H, C, *LOW[1:])),
    "lengths": (longest, (XS, jnp.array([3, 6]), H, C, W, U)),
    "vmap": (jax.vmap(one_row, (0, 0, 0, None, None)), (XS, H, C, W, U)),
}


@pytest.mark.parametrize("name", HITS)
def test_sequence_hit(name):
    fn, args = HITS[name]
    assert rows(fn, *args)[0] == ("lstm", SEQUENCE)
    same_with_gradients(fn, *args)


def masked(xs, h, c, w, u):
    def step(state, x):
        new = lstm(x, *state, w, u)
        return jax.tree.map(lambda n, s: jnp.where(x[:, :1] > 0, n, s), new, state), None

    return lax.scan(step, (h, c), xs.swapaxes(0, 1))


def fed_back(xs, h, c, w, u):
    def step(state, x):
        (h, c), y = state
        h, c = lstm(x + y, h, c, w, u)
        return ((h, c), h @ u[:, :4]), None

    return lax.scan(step, ((h, c), 0 * xs[:, 0]), xs.swapaxes(0, 1))


def two_batch_axes(xs, h, c, w, u):
    xs, h, c = (jnp.stack([a, a]) for a in (xs, h, c))
    return jax.vmap(sequence(lstm), (0, 0, 0, None, None))(xs, h, c, w, u)


def reset_of_x(x, h, c, w, u):
    r, z = jax.nn.sigmoid(x @ w[:, :3] + h @ u[:, :3]), jax.nn.sigmoid(x @ w[:, 3:6] + h @ u[:, 3:6])
    n = jnp.tanh(r * (x @ w[:, 6:9] + h @ u[:, 6:9]))
    return (1 - z) * n + z * h, c


LOOP_MISSES = {
    "masked": (masked, "comes between"),
    "counter": (
        lambda xs, h, c, w, u: lax.scan(lambda s, x: ((lstm(x, *s[0], w, u), s[1] + 1), None), ((h, c), 0), xs.swapaxes(0, 1)),
        "the loop also carries int32[] on"),
    "fed back": (fed_back, "which is carried from step to step and is not its state"),
    "weights of x": (sequence(lambda x, h, c, w, u: lstm(x, h, c, w, u * x[0, 0])), "has weights that change from step to step"),
    "two batch axes": (two_batch_axes, "a state float32[2, 2, 3]: the kernel takes [batch, hidden] or [hidden]"),
    "reset gate of x": (sequence(reset_of_x), "also multiplies what is not the state"),
}


@pytest.mark.parametrize("name", LOOP_MISSES)
def test_loop_near_miss(name):
    fn, words = LOOP_MISSES[name]
    found = [row for row in rows(fn, XS, H, C, W, U) if row[0] in ("lstm", "gru")]
    assert len(found) == 1 and words in found[0][1], found
    same_with_gradients(fn, XS, H, C, W, U)


def test_short_loops_are_left_to_xla(monkeypatch):
    loses_and_wins = Rule((Point(6, 1.0, 2.0, "forward"), Point(64, 1.0, 0.5, "forward")))
    monkeypatch.setattr(tuned, "rules", lambda op: (loses_and_wins,))
    found = jaxfuse.explain(lambda xs, h, w, u: lax.scan(lambda h, x: (gru(x, h, w, u), None), h, xs.swapaxes(0, 1))[0], XS, H, W, U)
    assert not NATIVE or found.skipped[0].reason.startswith("too small to gain: 6 steps, measured faster from 64")


def split_before(x, h, c, w, u):
    """x's part and the state's are cut up apart."""
    return lstm_of_gates([a + b for a, b in zip(jnp.split(x @ w, 4, -1), jnp.split(h @ u, 4, -1))], c)


def sliced(x, h, c, w, u):
    z = x @ w + h @ u
    return lstm_of_gates([z[:, i : i + 3] for i in (0, 3, 6, 9)], c)


def other_order(x, h, c, w, u):
    i, g, f, o = jnp.split(x @ w + h @ u, 4, -1)
    return lstm_of_gates((i, f, g, o), c)


def lstm_of_gates(gates, c):
    i, f, g, o = gates
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


@pytest.mark.skipif(not NATIVE, reason="no sequence is fused")
@pytest.mark.parametrize(("cell", "pieces"), [(split_before, 0), (sliced, 0), (other_order, 4)])
def test_gates_in_the_kernels_order_are_never_padded(cell, pieces):
    """Their gradients are columns of one array already, of all steps and of the weights; in another order they are put together."""
    program = sequence(cell)
    same_with_gradients(program, XS, H, C, W, U)
    fused = jaxfuse.fuse(program, policy="always")
    text = str(jax.make_jaxpr(jax.grad(scalar(fused), (0, 3, 4)))(XS, H, C, W, U))
    for shape in ("f32[6,2,12]", "f32[3,12]"):
        made = [line for line in text.splitlines() if f":{shape} = pad" in line or f":{shape} = concatenate" in line]
        assert (len(made) > pieces) == (pieces > 0), (shape, made)


def test_products_of_all_steps_are_dense_layers():
    """That of x with its weights, their gradients, and that of the recurrent weights, for they are large enough to be worth a call."""
    xs, h, w, u = randn(8, 32, 24), randn(8, 64), randn(24, 256) / 5, randn(64, 256) / 8
    same_with_gradients(sequence(lstm), xs, h, h, w, u)
    fused = jaxfuse.fuse(sequence(lstm), policy="always")
    text = jax.jit(jax.grad(scalar(fused), (0, 3, 4))).lower(xs, h, h, w, u).compile().as_text()
    calls = [text.count(f'custom_call_target="jaxfuse_{name}"') for name in ("dense_fwd", "dense_bwd", "dot")]
    assert not NATIVE or calls == [2, 1, 0]


def test_a_product_with_its_weights_on_the_left_is_left_to_xla():
    """It makes columns; the kernel writes rows."""
    columns = sequence(lambda x, h, c, w, u: lstm_of_gates(jnp.split((w.T @ x.T).T + h @ u, 4, -1), c))
    text = str(jax.make_jaxpr(jaxfuse.fuse(columns, policy="always"))(XS, H, C, W, U))
    assert not NATIVE or ("jaxfuse_lstm" in text and "jaxfuse_dense" not in text)


@pytest.mark.skipif(not NATIVE, reason="no sequence is fused")
def test_gradients_of_the_bias_and_of_the_inputs_weights_are_summed_in_float32():
    """Over all steps and rows. XLA rounds the bias's sum to bfloat16 at every step, and sums the weights' in bfloat16 (jax 0.12)."""
    def loss(bias, w, xs, h, u):
        def step(state, x):
            h, c = lstm_of_gates(jnp.split((x @ w + bias) + state[0] @ u, 4, -1), state[1])
            return (h, c), h

        return jnp.sum(lax.scan(step, (h, h), xs)[1] * 2)

    args = randn(64), randn(8, 64) / 3, randn(48, 16, 8), randn(16, 16), randn(16, 64) / 4
    low = [a.astype(jnp.bfloat16) for a in args]
    gradients = jax.grad(loss, (0, 1))
    true = jax.jit(gradients)(*[a.astype(jnp.float32) for a in low])
    plain = list(map(distance, jax.jit(gradients)(*low), true))
    for fused in (jaxfuse.fuse(gradients, policy="always"), jax.grad(jaxfuse.fuse(loss, policy="always"), (0, 1))):
        assert "jaxfuse_lstm_bwd" in jax.jit(fused).lower(*low).as_text()
        for made, known, error in zip(jax.jit(fused)(*low), true, plain):
            assert distance(made, known) < min(error, 6e-3)


@pytest.mark.parametrize("op, gates", [(ops.lstm, 4), (ops.gru, 3)])
def test_the_ops_sum_the_gradient_of_the_inputs_weights_in_float32(op, gates):
    xs, w, u = randn(48, 16, 8), randn(8, gates * 16) / 3, randn(16, gates * 16) / 4
    low = [a.astype(jnp.bfloat16) for a in (xs, w, u)]
    gradient = jax.jit(jax.grad(lambda xs, w, u: jnp.sum(op(xs, w, u)[0] * 2), 1))
    assert distance(gradient(*low), gradient(*[a.astype(jnp.float32) for a in low])) < 6e-3
