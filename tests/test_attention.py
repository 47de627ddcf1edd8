"""Attention in programs, in every framework's spelling, forward and with its gradients, with dropout; and what only looks like it."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from compare import jit, same
from frameworks import haiku, linen, nnx_module
from jaxfuse import ops
from jaxfuse.runtime import ffi
from layers import randn
from recognition import FUSED, correct, fuse, recognised, rows, scalar
from spellings.attention import CAUSAL, SPELLINGS, K, Q, V, attention, mixed, scores

keras = pytest.importorskip("keras")
X = randn(2, 5, 8)


BACKWARD = {
    "one value is query and key": (lambda q, k, v: attention()(q, q, v), "what is inside is read by"),
    "the softmax's own gradient": (
        lambda q, k, v: sum(jnp.sum(jnp.sin(a)) for a in jax.value_and_grad(lambda q: mixed(scores(q, k), v).sum())(q)), "is read by"),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_that_are_left(name):
    function, reason = BACKWARD[name]
    step = jax.grad(scalar(function), (0, 1, 2))
    assert reason in dict(rows(step, Q, K, V))["attention"]
    correct(step, Q, K, V, times=5)  # more than before: a softmax that is differentiated twice


def test_some_gradients_only():
    for wanted in (0, 1, 2, (0, 2)):
        step = jax.grad(scalar(SPELLINGS["attention+mask"]), wanted)
        assert recognised(step, Q, K, V) == ["attention+mask", "backward attention+mask"]
        correct(step, Q, K, V)


def test_gradient_of_a_bias():
    def biased(q, k, v, heads, relative):
        return attention(lambda s: s + heads[:, None, None] * jnp.arange(5) + relative)(q, k, v)

    step, args = jax.grad(scalar(biased), (0, 1, 2, 3, 4)), (Q, K, V, randn(4), randn(1, 1, 5, 5))
    assert [row for row in recognised(step, *args) if "attention" in row] == ["attention+bias", "backward attention+bias"]
    correct(step, *args)


def test_inside_loops_and_remat():
    def layers(q, k, v):
        layer = SPELLINGS["attention+mask"]  # whose number JAX takes out of the loop
        return jax.lax.scan(lambda q, kv: (q + layer(q, *kv), None), q, (jnp.stack([k, v]), jnp.stack([v, k])))[0]

    remat = jax.checkpoint(SPELLINGS["attention+mask"])  # its backward pass has no product with the values, so its products are alone
    assert recognised(layers, Q, K, V) == ["attention+mask"]
    assert recognised(jax.grad(scalar(layers), (0, 1, 2)), Q, K, V) == ["attention+mask", "backward attention+mask"]
    assert rows(jax.grad(scalar(remat), (0, 1, 2)), Q, K, V)[0] == ("attention+mask", FUSED)
    for function in (layers, remat):
        correct(function, Q, K, V)
        correct(jax.grad(scalar(function), (0, 1, 2)), Q, K, V)


# --- frameworks --------------------------------------------------------------------------------------------------


def haiku_attention():
    options = dict(w_init=hk.initializers.Constant(0.1))
    return haiku(lambda: lambda x: hk.MultiHeadAttention(2, 4, **options)(x, x, x, mask=CAUSAL[None, None]), X)


def keras_attention(layer, **call):
    layer.build(X.shape, X.shape)
    state = [v.value for v in layer.non_trainable_variables]
    return (lambda w, x: layer.stateless_call(w, state, x, x, **call)[0]), [v.value for v in layer.trainable_variables]


def equinox_attention():
    arrays, rest = eqx.partition(eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0)), eqx.is_array)
    return lambda arrays, x: jax.vmap(lambda x: eqx.combine(arrays, rest)(x, x, x, CAUSAL))(x), arrays


FRAMEWORKS = {
    "linen": lambda: linen(nn.SelfAttention(2, dtype=jnp.bfloat16), X, mask=nn.make_causal_mask(X[..., 0])),
    "nnx": lambda: nnx_module(lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)),
    "haiku": haiku_attention,
    "keras": lambda: keras_attention(keras.layers.MultiHeadAttention(2, 4), use_causal_mask=True),
    "equinox": equinox_attention,
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_layer_of_a_framework(name):
    apply, weights = FRAMEWORKS[name]()
    kind = "attention" if name == "nnx" else "attention+mask"
    dense = "dense" if name == "equinox" else "dense+bias"
    forward = rows(apply, weights, X)  # linen and Equinox scale the query, the others the scores
    assert sorted(forward) == sorted([(kind, FUSED), *[(dense, FUSED)] * 4])
    found = rows(jax.grad(scalar(apply), (0, 1)), weights, X)
    assert [row for row in found if "attention" in row[0]] == [(kind, FUSED), (f"backward {kind}", FUSED)]


# --- dropout of the softmax, and a factor that is learnt ----------------------------------------------------------

KEY, RATE = jax.random.key(3), 0.3
DROPPED = dict(rngs=dict(dropout=KEY))


def halved(q, k):
    return scores(q, k, lambda s: s / 2)


def causal(broadcast):
    model = nn.MultiHeadDotProductAttention(2, dropout_rate=RATE, broadcast_dropout=broadcast, deterministic=False)
    return linen(model, X, mask=nn.make_causal_mask(X[..., 0]), **DROPPED)


class Layer(nn.Module):
    """With the softmax dropped by `nn.Dropout`, as Hugging Face's models have it."""

    @nn.compact
    def __call__(self, x):
        q, k, v = (nn.DenseGeneral((2, 4))(x) for _ in range(3))
        p = nn.Dropout(RATE, deterministic=False)(halved(q, k))
        return nn.DenseGeneral(8, axis=(-2, -1))(mixed(p, v))


def nnx_with_dropout():
    layer = nnx.MultiHeadAttention(2, 8, dropout_rate=RATE, deterministic=False, decode=False, rngs=nnx.Rngs(0))
    graph, weights, others = nnx.split(layer, nnx.Param, ...)
    return lambda weights, x: nnx.merge(graph, weights, others)(x, rngs=nnx.Rngs(3)), weights


def haiku_with_dropout():
    def layer(x):
        q, k, v = (hk.Linear(8)(x).reshape(2, 5, 2, 4) for _ in range(3))
        p = hk.dropout(hk.next_rng_key(), RATE, halved(q, k))
        return hk.Linear(8)(mixed(p, v).reshape(2, 5, 8))

    net = hk.transform(layer)
    return lambda weights, x: net.apply(weights, KEY, x), net.init(jax.random.key(0), X)


def equinox_with_dropout():
    arrays, rest = eqx.partition(eqx.nn.MultiheadAttention(2, 8, dropout_p=RATE, key=jax.random.key(0)), eqx.is_array)

    def apply(arrays, x):
        return jax.vmap(lambda x, key: eqx.combine(arrays, rest)(x, x, x, CAUSAL, key=key))(x, jax.random.split(KEY, 2))

    return apply, arrays


WITH_DROPOUT = {
    "attention+mask+dropout, linen": lambda: causal(False),
    "attention+mask+dropout, linen, one mask for all": lambda: causal(True),
    "attention+dropout, linen's Dropout": lambda: linen(Layer(), X, **DROPPED),
    "attention+dropout, nnx": nnx_with_dropout,
    "attention+dropout, haiku": haiku_with_dropout,
    "attention+mask+dropout, equinox": equinox_with_dropout,
    "attention+dropout, keras": lambda: keras_attention(keras.layers.MultiHeadAttention(2, 4, dropout=RATE), training=True),
}


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_of_a_framework(name):
    kind, (apply, weights) = name.split(",")[0], WITH_DROPOUT[name]()
    step = jax.grad(scalar(apply), (0, 1))
    assert [row for row in rows(apply, weights, X) if "attention" in row[0]] == [(kind, FUSED)]
    assert [row for row in rows(step, weights, X) if "attention" in row[0]] == [(kind, FUSED), (f"backward {kind}", FUSED)]
    known = jit(step)(weights, X)
    for made in (fuse(step), jax.grad(scalar(fuse(apply)), (0, 1))):
        same(jit(made)(weights, X), known, times=5, floor=0.1)  # the gradient of the keys' bias is 0


def test_a_factor_that_is_learnt():
    """Its gradient is JAX's own: no kernel has it, and none claims the attention of a program that computes it."""
    q, k, v, factor = *(randn(2, 5, 2, 4, seed=i) for i in range(3)), randn(2, 5, 5)

    def plain(q, k, v, factor):
        return mixed(halved(q, k) * factor, v)

    step, args = jax.grad(scalar(plain), (0, 1, 2, 3)), (q, k, v, factor)
    wanted = jit(step)(*args)
    for function in (lambda q, k, v, factor: ops.attention(q, k, v, factor=factor), fuse(plain)):
        same(jit(jax.grad(scalar(function), (0, 1, 2, 3)))(*args), wanted, times=5)
    assert "is read by" in dict(rows(step, *args))["attention"]
    same(jit(fuse(step))(*args), wanted, times=5)


# --- what is no attention: scores without values -----------------------------------------------------------------

SCORES = {
    "softmax alone": lambda q: scores(q, q, lambda s: s),
    "scale": lambda q: scores(q, q),
    "scale and added mask": lambda q: scores(q, q, lambda s: s * 0.3 + CAUSAL),
    "scale and selected mask": lambda q: scores(q, q, lambda s: jnp.where(CAUSAL, s / 3, -1e9)),
    "bf16 scores, f32 softmax": lambda q: scores(*[q.astype("bfloat16")] * 2, lambda s: s.astype("float32") / 3),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    assert recognised(SCORES[name], Q) == ["attention scores"]


def test_scores_near_misses():
    product, capped = rows(lambda q: scores(q, q, lambda s: jnp.tanh(s / 3)), Q)
    assert product == ("matmul", FUSED)
    assert capped[0] == "attention scores"
    assert capped[1].startswith("tanh at ") and "is not a scale, a mask or a softmax" in capped[1]
    _, missed = rows(lambda q: (lambda s: (jax.nn.softmax(s / 3), s / 3))(jnp.einsum("btnh,bsnh->bnts", q, q)), Q)
    assert missed == ("attention scores", "float32[2, 4, 5, 5] is returned by the program")
    assert rows(lambda q: jnp.einsum("btnh,bsnh->bnts", q, q), Q) == [("matmul", FUSED)]


# --- the kernel --------------------------------------------------------------------------------------------------


NATURAL = 160, 8, 32, 1
ALONE = dict(batch=[2, 4], rows=5, keys=5, inner=8, columns=8, scale=1.0, fill=0.0, has_bias=False, has_mask=False, has_factor=False)
ALONE |= dict.fromkeys(("q_strides", "k_strides", "v_strides", "y_strides"), NATURAL)


@pytest.mark.skipif(ffi.unavailable("jaxfuse_attention_fwd") is not None, reason="the native module is not built")
@pytest.mark.parametrize("wrong, sentence", [
    (dict(batch=[2, 0]), "sizes are (2, 0, 5, 5, 8, 8), expected positive numbers: batch, rows, keys, inner, columns"),
    (dict(batch=[-1, -1]), "sizes are (-1, -1, 5, 5, 8, 8), expected positive numbers"),
    (dict(batch=[-1, 3]), "q has shape (2, 5, 4, 8), expected the elements of (2, 3, 5, 8) at q_strides (160, 8, 32, 1)"),
    (dict(batch=[4, -1], rows=1 << 62), "q_strides are (160, 8, 32, 1), expected none below 0, and within the buffer"),
    (dict(rows=6), "q has shape (2, 5, 4, 8), expected the elements of (2, 4, 6, 8) at q_strides (160, 8, 32, 1)"),
    (dict(k_strides=(160, 8, 32)), "k_strides are 3, expected 4"),
    (dict(v_strides=(160, 8, 32, -1)), "v_strides are (160, 8, 32, -1), expected none below 0"),
    (dict(y_strides=(160, 1, 32, 4)), "y has columns 4 elements apart, expected 1"),
    (dict(y_strides=(0, 8, 32, 1), y=(5, 4, 8)), "y has shape (5, 4, 8), expected one matrix for each entry of the batch"),
    (dict(has_mask=True), "operand mask (number 3) is missing"),
    (dict(has_factor=True), "operand factor (number 3) is missing")], ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")
def test_the_kernel_refuses_what_does_not_fit(wrong, sentence):
    attributes = ALONE | wrong
    result = jax.ShapeDtypeStruct(attributes.pop("y", Q.shape), Q.dtype)
    with pytest.raises(Exception) as caught:
        ffi.call("jaxfuse_attention_fwd", [result], Q, K, V, **attributes)
    assert sentence in str(caught.value)


@pytest.mark.skipif(ffi.unavailable("jaxfuse_attention_fwd") is not None, reason="the native module is not built")
@pytest.mark.parametrize("batch", [[-1, 4], [2, -1]])
@pytest.mark.parametrize("shared", ["", "q", "k v"])
def test_the_kernel_finds_a_size_of_the_batch_that_is_not_said(batch, shared):
    """From those of q, k and v that have it; others are repeated along it."""
    d = batch.index(-1)
    lacking = {f"{name}_strides": tuple(0 if i == d else n for i, n in enumerate(NATURAL)) for name in shared.split()}
    operands = [jnp.take(a, jnp.arange(1), (0, 2)[d]) if name in shared else a for name, a in zip("qkv", (Q, K, V))]
    if d == 1:
        lacking = {name: (40, 0, 8, 1) for name in lacking}
    said, found = (ffi.call("jaxfuse_attention_fwd", [jax.ShapeDtypeStruct(Q.shape, Q.dtype)], *operands, **ALONE | lacking | more)[0]
                   for more in ({}, dict(batch=batch)))
    np.testing.assert_array_equal(said, found)
