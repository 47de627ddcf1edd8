"""Dense layers beside the one contract: what is computed once, in parts, and not rounded; refusals; zeros."""

import jax
import jax.numpy as jnp
import pytest

import jaxfuse
from jaxfuse import ops
from jaxfuse.ops import activations, matrices
from jaxfuse.runtime import ffi
from attributes import attributes
from layers import randn
from recognition import correct, scalar
from spellings.dense import PROGRAMS, R, W, X, scores_and_values


def test_scores_are_not_rounded_before_the_softmax():
    """What XLA does with a bfloat16 product of its own."""
    x, w = X.astype("bfloat16"), W.astype("bfloat16")
    made = str(jax.make_jaxpr(jaxfuse.fuse(scores_and_values, policy="always"))(x, w))
    scores, before_softmax = "f32[2,2,5,5] = jaxfuse_dense", "bf16[2,2,5,5] = convert_element_type"
    assert made.index(scores) < made.index(before_softmax)
    assert made.count("out_dtype='float32'") == 1


@pytest.mark.parametrize("name", PROGRAMS)
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
    correct(jnp.matmul, randn(*x), randn(*w, seed=1))


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
