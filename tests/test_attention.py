"""Attention in programs, in every framework's spelling, forward and with its gradients; and what only looks like it."""

import json

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxfuse
from cases import ATTENTION
from compare import as_float64, distance, pairs
from instruction_sets import LEVELS, errors_at, worst
from jaxfuse.runtime import ffi
from recognition import FUSED, counts, randn, recognised, rows, scalar

keras = pytest.importorskip("keras")
X = randn(2, 5, 8)
Q, K, V = (randn(2, 5, 4, 8, seed=i) for i in range(3))
CAUSAL = jnp.tril(jnp.ones((5, 5), bool))
KEPT = randn(2, 4, 5, 5, seed=7) > -0.5


def product(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k)


def scores(q, k, between=lambda s: s / 3):
    return jax.nn.softmax(between(product(q, k)))


def mixed(p, v):
    return jnp.einsum("bnts,bsnh->btnh", p, v)


def attention(between=lambda s: s / 3, after=lambda p: p):
    return lambda q, k, v: mixed(after(scores(q, k, between)), v)


def by_hand(softmax):
    return lambda q, k, v: mixed(softmax(product(q, k)), v)


def framework(**options):
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)


HITS = {
    "attention": attention(),
    "attention, no scale": attention(lambda s: s),
    "attention, values first": lambda q, k, v: jnp.einsum("bsnh,bnts->bthn", v, scores(q, k)),
    "attention, keys first": lambda q, k, v: mixed(jax.nn.softmax(jnp.einsum("bsnh,btnh->bnts", k, q)), v),
    "attention, one head": lambda q, k, v: jax.nn.softmax(q[:, :, 0] @ k[:, :, 1].swapaxes(1, 2)) @ v[:, :, 2],
    "attention, vmapped": jax.vmap(jax.vmap(lambda q, k, v: jax.nn.softmax(q @ k.T / 3) @ v, 1, 1)),
    "attention, other features": lambda q, k, v: mixed(scores(q, k), v[..., :3]),
    "attention, by hand": by_hand(lambda s: (lambda e: e / e.sum(3)[..., None])(jnp.exp(s - s.max(3)[..., None]))),
    "attention, bf16": attention(lambda s: s.astype("float32") / 3, lambda p: p.astype("bfloat16")),
    "attention, bf16 softmax": attention(),
    "attention, widened": lambda *arrays: attention()(*(a.astype("bfloat16").astype("float32") for a in arrays)),
    "attention, grouped": lambda q, k, v: framework()(q, k[:, :, :2], v[:, :, 2:]),
    "attention, batch of one": lambda *arrays: framework()(*(a[:1] for a in arrays)),
    "attention, mask of heads": attention(after=lambda p: p * jnp.arange(4)[:, None, None]),
    "attention, mask of heads by einsum": attention(after=lambda p: jnp.einsum("bnts,n->bnts", p, jnp.arange(4))),
    "attention, scaled softmax": attention(after=lambda p: p * 0.7),
    "attention+dropout": attention(after=lambda p: p * (KEPT / 0.7)),
    "attention+dropout, selected": attention(after=lambda p: jnp.where(KEPT, p / 0.7, 0)),
    "attention+dropout, turned": attention(after=lambda p: jax.lax.select(~KEPT, jnp.zeros_like(p), p) * 1.5),
    "attention+dropout, of all items": attention(after=lambda p: p * KEPT[0, 0]),
    "attention+dropout, of rows": attention(after=lambda p: p * jnp.arange(5)[:, None]),
    "attention+dropout, bf16": attention(lambda s: s.astype("float32"), lambda p: p.astype("bfloat16") * (KEPT / 0.7).astype("bfloat16")),
    "attention+mask+dropout": attention(lambda s: jnp.where(CAUSAL, s, -1e9), lambda p: jnp.where(KEPT, p / 0.7, 0)),
    "attention+mask+dropout, with a mask of heads": attention(
        lambda s: jnp.where(CAUSAL, s, -1e9), lambda p: jnp.where(KEPT, p / 0.7, 0) * jnp.arange(4)[:, None, None]),
    "attention+bias": attention(lambda s: s * 0.3 + jnp.ones((5, 5))),
    "attention+bias, two": lambda q, k, v: attention(lambda s: s / 3 + q[:, :1, :, :1].swapaxes(1, 2) + jnp.arange(5.0))(q, k, v),
    "attention+bias, given": framework(bias=jnp.ones((2, 4, 5, 5))),
    "attention+mask": attention(lambda s: jnp.where(CAUSAL, s / 3, -1e9)),
    "attention+mask, turned": attention(lambda s: jnp.where(~CAUSAL, -jnp.inf, s / 3)),
    "attention+mask, two": lambda q, k, v: attention(
        lambda s: jnp.where(k[:, None, None, :, 0, 0] > -1, jnp.where(CAUSAL, s, -1e9), -1e9))(q, k, v),
    "attention+mask, causal": framework(is_causal=True),
    "attention+mask, bf16 grouped": lambda q, k, v: framework(is_causal=True)(q, k[:, :, :1], v[:, :, :1]),
    "attention+bias+mask": lambda q, k, v: attention(lambda s: jnp.where(CAUSAL, s + q[0, 0, 0, 0], -1e9))(q, k, v),
}  # fmt: skip


@pytest.mark.parametrize("name", HITS)
def test_hits(name):
    pattern, function = name.split(",")[0], HITS[name]
    args = [a.astype("bfloat16" if "bf16" in name else "float32") for a in (Q, K, V)]
    assert recognised(function, *args) == [pattern]
    correct(function, *args)
    step = jax.value_and_grad(scalar(function), (0, 1, 2))
    assert recognised(step, *args) == [pattern, f"backward {pattern}"]
    correct(step, *args)
    correct_gradient_of_fused(function, *args)


def correct_gradient_of_fused(function, *args):
    step = jax.grad(scalar(function), (0, 1, 2))
    correct(step, *args, made=jax.jit(jax.grad(scalar(jaxfuse.fuse(function, policy="always")), (0, 1, 2)))(*args))


def correct(function, *args, made=None):
    """The fused program is as close to the truth as the program itself."""
    made, plain = jaxfuse.fuse(function, policy="always")(*args) if made is None else made, jax.jit(function)(*args)
    with jax.enable_x64(True):
        exact = jax.jit(function)(*as_float64(args))
    rounding = 5e-3 if args[0].dtype == jnp.bfloat16 else 2e-6  # of the softmax too, where the program rounds it
    for value, unfused_value, true in pairs(made, plain, exact):
        assert value.dtype == unfused_value.dtype
        assert distance(value, true) <= 1.5 * distance(unfused_value, true) + rounding


# the program, how the reason begins, and what it has; "fused" is right
NEAR_MISSES = {
    "capped": (attention(lambda s: jnp.tanh(s / 3)), "tanh at ", "is not a scale, a bias or a mask"),
    "scaled after the bias": (attention(lambda s: (s + jnp.ones((5, 5))) / 3), "div at ", "scales what a bias or a mask was applied to"),
    "bias after the mask": (
        attention(lambda s: jnp.where(CAUSAL, s, -9.0) + jnp.arange(5.0)), "add at ", "adds a bias to masked scores"),
    "subtracted": (attention(lambda s: s - jnp.arange(5.0)), "sub at ", "subtracts from the scores: add what is negative instead"),
    "stopped": (attention(lambda s: jax.lax.stop_gradient(s)), "stop_gradient at ", "is not a scale, a bias or a mask"),
    "at most": (
        by_hand(lambda s: (lambda e: e / e.sum(3, keepdims=True))(jnp.exp(s - jnp.maximum(9.0, s.max(3, keepdims=True))))),
        "reduce_max at ", "is not the beginning of a softmax"),
    "mask of an array": (
        attention(lambda s: jnp.where(CAUSAL, s, jnp.arange(5.0))), "select_n at ", "gives masked scores something else than one number"),
    "two numbers": (
        attention(lambda s: jnp.where(CAUSAL.T, jnp.where(CAUSAL, s, -9.0), -8.0)), "select_n at ",
        "a mask with another number, -8, than the one before, -9"),
    "dropped to another number": (attention(after=lambda p: jnp.where(KEPT, p, 0.1)), "select_n at ", "is between the softmax and"),
    "squared softmax": (attention(after=lambda p: p * p), "mul at ", "is between the softmax and the product"),
    "shifted softmax": (attention(after=lambda p: p + 1.0), "add at ", "is between the softmax and the product"),
    "softmax of rows": (
        lambda q, k, v: mixed(jax.nn.softmax(product(q, k), 2), v), "dot_general at ", "does not sum over the softmax's axis alone"),
    "no sum": (by_hand(lambda s: jnp.exp(s - s.max(3, keepdims=True))), "exp at ", "is not divided by its sum"),
    "sums of columns": (
        by_hand(lambda s: (lambda e: e / e.sum(2, keepdims=True))(jnp.exp(s - s.max(3, keepdims=True)))),
        "exp at ", "is not divided by its sum"),
    "sums of rows for columns": (
        by_hand(lambda s: (lambda e: e / e.sum(3)[:, :, None])(jnp.exp(s - s.max(3, keepdims=True)))),
        "exp at ", "is not divided by its sum"),
    "maxima of rows for columns": (
        by_hand(lambda s: (lambda e: e / e.sum(3, keepdims=True))(jnp.exp(s - s.max(3)[:, :, None]))),
        "reduce_max at ", "is not the beginning of a softmax"),
    "values without features": (
        lambda q, k, v: jnp.einsum("bnts,bsn->btn", scores(q, k), v[..., 0]), "the values", "have 0 axes of their own"),
    "softmax returned": (lambda q, k, v: (lambda p: (p, mixed(p, v)))(scores(q, k)), "float32[2, 4, 5, 5] is read by dot_general", ""),
    "scores read": (
        lambda q, k, v: (lambda s: (s.mean(), mixed(jax.nn.softmax(s), v)))(product(q, k)), "what is inside is read by reduce_sum", ""),
    "keys of several axes": (
        lambda q, k, v: jnp.einsum("btmns,bsmh->btnh", jax.nn.softmax(jnp.einsum("btnh,bsmh->btmns", q, k)), v),
        "dot_general at ", "does not sum over the softmax's axis alone"),
    "another precision": (
        lambda q, k, v: mixed(jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)), v),
        "precision ", "the kernel computes in its operands' dtype"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    function, start, part = NEAR_MISSES[name]
    found = dict(rows(function, Q, K, V))
    assert found["attention"].startswith(start) and part in found["attention"], found
    correct(function, Q, K, V)
    if "precision" not in name:  # XLA has no gradient of it on the CPU
        correct_gradient_of_fused(function, Q, K, V)


def test_along_the_other_axis():
    """Queries and keys are told by the softmax."""
    function = lambda q, k, v: jnp.einsum("bnts,btnh->bsnh", jax.nn.softmax(product(q, k), 2), v)
    assert recognised(function, Q, K, V) == ["attention"]
    correct(function, Q, K, V)


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
    correct(step, Q, K, V)


def test_some_gradients_only():
    for wanted in (0, 1, 2, (0, 2)):
        step = jax.grad(scalar(HITS["attention+mask"]), wanted)
        assert recognised(step, Q, K, V) == ["attention+mask", "backward attention+mask"]
        correct(step, Q, K, V)


def test_gradient_of_a_bias():
    def loss(q, k, v, heads, relative):
        return jnp.sum(jnp.sin(attention(lambda s: s + heads[:, None, None] * jnp.arange(5) + relative)(q, k, v)))

    step, args = jax.grad(loss, (0, 1, 2, 3, 4)), (Q, K, V, randn(4), randn(1, 1, 5, 5))
    assert [row for row in recognised(step, *args) if "attention" in row] == ["attention+bias", "backward attention+bias"]
    correct(step, *args)


def test_inside_loops_and_remat():
    def layers(q, k, v):
        layer = HITS["attention+mask"]  # whose number JAX takes out of the loop
        return jax.lax.scan(lambda q, kv: (q + layer(q, *kv), None), q, (jnp.stack([k, v]), jnp.stack([v, k])))[0]

    remat = jax.checkpoint(HITS["attention+mask"])  # its backward pass has no product with the values, so its products are alone
    assert recognised(layers, Q, K, V) == ["attention+mask"]
    assert recognised(jax.grad(scalar(layers), (0, 1, 2)), Q, K, V) == ["attention+mask", "backward attention+mask"]
    assert rows(jax.grad(scalar(remat), (0, 1, 2)), Q, K, V)[0] == ("attention+mask", FUSED)
    for function in (layers, remat):
        correct(function, Q, K, V)
        correct(jax.grad(scalar(function), (0, 1, 2)), Q, K, V)


# --- frameworks --------------------------------------------------------------------------------------------------


def linen_attention():
    model = nn.SelfAttention(2, dtype=jnp.bfloat16)
    variables = model.init(jax.random.key(0), X)
    return lambda v, x: model.apply(v, x, mask=nn.make_causal_mask(x[..., 0])), variables


def nnx_attention():
    graph, state = nnx.split(nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)))
    return lambda state, x: nnx.merge(graph, state)(x), state


def haiku_attention():
    net = hk.without_apply_rng(
        hk.transform(lambda x: hk.MultiHeadAttention(2, 4, w_init=hk.initializers.Constant(0.1))(x, x, x, mask=CAUSAL[None, None])))
    return net.apply, net.init(jax.random.key(0), X)


def keras_attention():
    layer = keras.layers.MultiHeadAttention(2, 4)
    layer.build(X.shape, X.shape)
    state = [v.value for v in layer.non_trainable_variables]
    return (lambda w, x: layer.stateless_call(w, state, x, x, use_causal_mask=True)[0]), [v.value for v in layer.trainable_variables]


def equinox_attention():
    arrays, rest = eqx.partition(eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0)), eqx.is_array)
    return lambda arrays, x: jax.vmap(lambda x: eqx.combine(arrays, rest)(x, x, x, CAUSAL))(x), arrays


@pytest.mark.parametrize(
    "make", [linen_attention, nnx_attention, haiku_attention, keras_attention, equinox_attention], ids=lambda f: f.__name__)
def test_layer_of_a_framework(make):
    apply, weights = make()
    kind = "attention" if make is nnx_attention else "attention+mask"
    dense = "dense" if make is equinox_attention else "dense+bias"
    assert counts(apply, weights, X) == {f"{dense} x3": 1, kind: 1, dense: 1}
    found = rows(jax.grad(scalar(apply), (0, 1)), weights, X)
    assert [row for row in found if "attention" in row[0]] == [(kind, FUSED), (f"backward {kind}", FUSED)]


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


@pytest.mark.skipif(ffi.unavailable("jaxfuse_attention_fwd") is not None, reason="the native module is not built")
@pytest.mark.parametrize("wrong, sentence", [
    (dict(batch=[2, 0]), "sizes are (2, 0, 5, 5, 8, 8), expected positive numbers: batch, rows, keys, inner, columns"),
    (dict(rows=6), "q has shape (2, 5, 4, 8), expected the elements of (2, 4, 6, 8) at q_strides (160, 8, 32, 1)"),
    (dict(k_strides=(160, 8, 32)), "k_strides are 3, expected 4"),
    (dict(v_strides=(160, 8, 32, -1)), "v_strides are (160, 8, 32, -1), expected none below 0"),
    (dict(y_strides=(160, 1, 32, 4)), "y has columns 4 elements apart, expected 1"),
    (dict(y_strides=(0, 8, 32, 1), y=(5, 4, 8)), "y has shape (5, 4, 8), expected one matrix for each item of the batch"),
    (dict(has_mask=True), "operand mask (number 3) is missing"),
    (dict(has_factor=True), "operand factor (number 3) is missing")], ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")
def test_the_kernel_refuses_what_does_not_fit(wrong, sentence):
    strides = dict.fromkeys(("q_strides", "k_strides", "v_strides", "y_strides"), (160, 8, 32, 1))
    right = dict(batch=[2, 4], rows=5, keys=5, inner=8, columns=8, scale=1.0, fill=0.0, has_bias=False, has_mask=False, has_factor=False)
    attributes = right | strides | wrong
    result = jax.ShapeDtypeStruct(attributes.pop("y", Q.shape), Q.dtype)
    with pytest.raises(Exception) as caught:
        ffi.call("jaxfuse_attention_fwd", [result], Q, K, V, **attributes)
    assert sentence in str(caught.value)


LIMITS = dict(float32=3e-6, bfloat16=1.5e-2, float16=3e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set(level):
    errors = errors_at(level, __file__, "jaxfuse_attention_fwd")
    assert {dtype: error < limit for (dtype, limit), error in zip(LIMITS.items(), errors)} == dict.fromkeys(LIMITS, True)


if __name__ == "__main__":
    print(json.dumps([worst(ATTENTION, dtype) for dtype in LIMITS]))
