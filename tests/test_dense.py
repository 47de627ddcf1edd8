"""Dense layers found in programs: what is fused computes what was there, forward and in whole differentiated programs."""

import jax
import jax.numpy as jnp
import pytest

import jaxfuse
from jaxfuse import ops
from jaxfuse.ops import activations, matrices
from jaxfuse.runtime import ffi
from compare import as_float64, distance, pairs
from attributes import attributes
from recognition import randn, rows, scalar

X, W, V, B = randn(2, 5, 8), randn(8, 16), randn(8, 16, seed=1), randn(16)
R, U = randn(2, 5, 16, seed=2), randn(16, 8, seed=3)


def attention(x, w, dropped=lambda p: p):
    q, k, v = (jnp.einsum("btk,knh->btnh", x, (w * c).reshape(8, 2, 8)) for c in (1.0, 0.5, 0.25))
    scores = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", q, k) / 3.0)
    return jnp.einsum("bnqk,bknh->bqnh", dropped(scores), v)


def scores_and_values(x, w):
    return attention(x, w, lambda p: jnp.where(jnp.tril(jnp.ones((5, 5), bool)), p, 0.1))  # no dropout


def two_layers(x, w, b, r, u):
    return jax.nn.relu(jax.nn.gelu(x @ w + b, approximate=False) @ u + x)


# the program, its arguments, and the rows that must be fused: forward, and of its gradient
PROGRAMS = {
    "alone": (lambda x, w: x @ w, (X, W), ["dense"], ["dense_grad"]),
    "bias": (lambda x, w, b: x @ w + b, (X, W, B), ["dense+bias"], ["dense_grad+bias_grad"]),
    "bias, residual": (
        lambda x, w, b, r: r + (x @ w + b), (X, W, B, R), ["dense+bias+add"], ["dense_grad+bias_grad"]),
    "bias, residual, tanh": (
        lambda x, w, b, r: jnp.tanh(x @ w + b + r), (X, W, B, R), ["dense+bias+add+tanh"], ["tanh_grad+dense_grad+bias_grad"]),
    "two layers": (two_layers, (X, W, B, R, U), ["dense+bias+gelu", "dense+add+relu"],
                   ["gelu_grad+dense_grad+bias_grad", "relu_grad+dense_grad"]),
    "bias twice": (lambda x, w, b: jax.nn.silu(x @ w + b - 2 * b), (X, W, B), ["dense+bias+silu"], ["silu_grad+dense_grad+bias_grad"]),
    "weight first": (
        lambda x, w, b: jax.vmap(jax.vmap(lambda x: w.T @ x + b))(x), (X, W, B), ["dense+bias"], ["dense_grad"]),
    "transposed result": (
        lambda x, w, b: jnp.einsum("btk,knh->bnth", x, w.reshape(8, 2, 8)) + b.reshape(2, 1, 8), (X, W, B), ["dense+bias"], ["dense_grad"]),
    "heads": (
        lambda x, w, b: jax.nn.gelu(jnp.einsum("btk,knh->btnh", x, w.reshape(8, 2, 8)) + b.reshape(2, 8)), (X, W, B),
        ["dense+bias+gelu_tanh"], ["gelu_tanh_grad+dense_grad+bias_grad"]),
    "gate": (lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), (X, W, V), ["dense+silu+gate"],
             ["dense_grad", "silu_grad+dense_grad"]),
    "three": (lambda x, w, v, b: ((x @ w + b) / 4, x @ v + b, x @ (w * v) + b), (X, W, V, B), ["dense+bias x3"],
              ["dense_grad+bias_grad"] * 3),
    "attention": (attention, (X, W), ["attention", "dense x3"], ["attention"] + ["dense_grad"] * 3),
    "scores and values": (
        scores_and_values, (X, W), ["attention scores", "dense x3", "matmul"], ["dense_grad"] * 3 + ["matmul_grad"] * 2),
    "float32 result": (
        lambda x, w, b: jnp.tanh(
            jax.lax.dot_general(x, w, (((2,), (0,)), ((), ())), preferred_element_type=jnp.promote_types(x.dtype, jnp.float32)) + b),
        (X, W, B), ["dense+bias+tanh"], ["tanh_grad+dense_grad+bias_grad"]),
    "with itself": (lambda x, r: (jnp.tanh(jnp.einsum("tk,sk->ts", x[0], x[0])), jnp.einsum("btk,btk->bt", r, r)), (X / 4, R / 4),
                    ["dense+tanh", "matmul"], ["tanh_grad+dense_grad", "matmul_grad"]),
    "scanned": (
        lambda x, w, b: jax.lax.scan(lambda c, x: (c, jnp.tanh(x @ w + b)), 0.0, x)[1], (X, W, B), ["dense+bias+tanh"], []),
}  # fmt: skip


def fused(function, *args):
    return sorted(row.removeprefix("backward ") for row, reason in rows(function, *args) if reason == "fused")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_forward(name, dtype):
    function, args, expected, _ = PROGRAMS[name]
    args = [a.astype(dtype) for a in args]
    assert fused(function, *args) == sorted(expected)
    compare(function, args)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_differentiated_program(name, dtype):
    function, args, expected, gradients = PROGRAMS[name]
    args = [a.astype(dtype) for a in args]
    step = jax.grad(scalar(function), tuple(range(len(args))))
    if name != "scanned":
        assert fused(step, *args) == sorted(expected + gradients)
    compare(step, args)


def test_scores_are_not_rounded_before_the_softmax():
    """What XLA does with a bfloat16 product of its own."""
    x, w = X.astype("bfloat16"), W.astype("bfloat16")
    made = str(jax.make_jaxpr(jaxfuse.fuse(scores_and_values, policy="always"))(x, w))
    scores, before_softmax = "f32[2,2,5,5] = jaxfuse_dense", "bf16[2,2,5,5] = convert_element_type"
    assert made.index(scores) < made.index(before_softmax)
    assert made.count("out_dtype='float32'") == 1


def compare(function, args):
    """The fused program with the truth."""
    got, plain = jaxfuse.fuse(function, policy="always")(*args), jax.jit(function)(*args)
    with jax.enable_x64(True):
        exact = jax.jit(function)(*as_float64(args))
    rounding = {"bfloat16": 2e-3, "float16": 3e-4}.get(args[0].dtype.name, 1e-6)
    for value, unfused, true in pairs(got, plain, exact):
        assert value.dtype == unfused.dtype
        assert distance(value, true) <= (2 if value.dtype == jnp.float16 else 1.5) * distance(unfused, true) + rounding


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "scanned"])
def test_no_contraction_is_computed_twice(name):
    function, args, *_ = PROGRAMS[name]
    step = jax.grad(scalar(function), tuple(range(len(args))))
    text = str(jax.make_jaxpr(jaxfuse.fuse(step, policy="always"))(*args))
    plain = str(jax.make_jaxpr(step)(*args)).count("dot_general[")
    products = text.count("jaxfuse_dense[") + 2 * text.count("jaxfuse_dense_backward[")
    products += 2 * text.count("jaxfuse_attention[") + 4 * text.count("jaxfuse_attention_backward[")
    assert text.count("dot_general[") == 0 and products == plain


@pytest.mark.parametrize("x, w", [
    ((2200, 1000), (1000, 20)), ((5, 600, 800), (5, 800, 6)), ((3, 700), (700, 130)), ((2, 9, 5000), (2, 5000, 130)),
    ((3, 70_000), (70_000, 5))])
def test_products_that_are_computed_in_parts(x, w):
    """Rows, items and sums, more than the kernel works on at a time."""
    compare(jnp.matmul, (randn(*x), randn(*w, seed=1)))


def test_a_gradient_from_a_value_that_does_not_tell_it_is_refused():
    attrs = matrices.matrices((5, 8), (8, 16), (((1,), (0,)), ((), ()))).attributes()
    attrs |= attributes("silu") | dict(by_value=True, want_dx=False, want_dw=True, want_db=False, want_dresidual=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match="silu is not a function of its value"):
        ffi.call("jaxfuse_dense_bwd", [W], X[0], R[0], R[0], **attrs)[0].block_until_ready()


@pytest.mark.parametrize("name", ["relu", "elu", "tanh", "silu", "gelu", "hard_tanh"])
def test_the_sign_of_a_zero(name):
    """Through the kernel's activation as through JAX's: tanh(0) is 0, not -0."""
    y = ops.dense(jnp.zeros((2, 8)), W, activation=name, alpha=1.0)
    plain = activations.named(name, 1.0).value(jnp.zeros((2, 16)))
    assert (y == plain).all() and (jnp.signbit(y) == jnp.signbit(plain)).all()
