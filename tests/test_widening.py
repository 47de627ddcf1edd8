"""bfloat16 in and float32 out: `preferred_element_type=float32`, and a cast right after the product with a bias, a residual or an
activation in float32. The kernel rounds nothing; a cast that is on its way to bfloat16 again, or alone, is XLA's."""

import functools

import jax
import jax.numpy as jnp
import pytest

from compare import distance, jit
from layers import GAMMA, B, R, W, X, conv
from recognition import fuse, patterns

BF16 = jnp.bfloat16
XN, WN = X.astype(BF16), W.astype(BF16)
wide = functools.partial(conv, preferred_element_type=jnp.float32)


def cast(x, w):
    return conv(x, w).astype(jnp.float32)


HITS = {
    "conv": lambda x, w, b, r: wide(x, w),
    "conv+bias": lambda x, w, b, r: wide(x, w) + b,
    "conv+bias+relu": lambda x, w, b, r: jax.nn.relu(wide(x, w) + b),
    "conv+bn+add+silu": lambda x, w, b, r: jax.nn.silu(wide(x, w) * GAMMA + b + r),
    "conv+bias+gelu, cast": lambda x, w, b, r: jax.nn.gelu(cast(x, w) + b, approximate=False),
    "conv+bias, cast": lambda x, w, b, r: cast(x, w) + b,
    "conv+bn+add+relu, cast": lambda x, w, b, r: jax.nn.relu(cast(x, w) * GAMMA + b + r),
    "conv+bias+relu, a pointwise": lambda x, w, b, r: jax.nn.relu(wide(x, w[:1, :1]) + b),
    "conv+bias+relu, depthwise": lambda x, w, b, r: jax.nn.relu(wide(x, w[:, :, :1], feature_group_count=4) + b),
    "conv+bias+relu, strided": lambda x, w, b, r: jax.nn.relu(wide(x, w, window_strides=(2, 2)) + b),
    "conv+bias, from bfloat16 and back": lambda x, w, b, r: (cast(x, w) + b).astype(BF16),
    "conv+bias+relu, cast last": lambda x, w, b, r: jax.nn.relu(conv(x, w) + b.astype(BF16)).astype(jnp.float32),
}


def rounds_nothing(fn, x, w, *rest):
    """It is as near to the float32 program as the program itself."""
    made, known = jit(fuse(fn))(x, w, *rest), jit(fn)(x, w, *rest)
    true = jit(fn)(x.astype(jnp.float32), w.astype(jnp.float32), *rest)
    assert made.dtype == known.dtype and distance(made, true) <= max(1e-6, 1.1 * distance(known, true))


@pytest.mark.parametrize("name", HITS)
def test_hit(name):
    assert patterns(HITS[name], XN, WN, B, R) == ([name.split(",")[0]], [])
    rounds_nothing(HITS[name], XN, WN, B, R)


@pytest.mark.parametrize("name", ["conv+bn+add+silu", "conv+bn+add+relu, cast"])
def test_gradients(name):
    def gradients(fn):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(fn(*args))), (0, 1, 2, 3))

    fn = HITS[name]
    made, step, known = (jit(f)(XN, WN, B, R) for f in (gradients(fuse(fn)), fuse(gradients(fn)), gradients(fn)))
    true = jit(gradients(fn))(XN.astype(jnp.float32), WN.astype(jnp.float32), B, R)
    for one, other, plain, narrow in zip(made, step, true, known, strict=True):
        assert one.dtype == other.dtype == narrow.dtype
        assert max(distance(one, plain), distance(other, plain)) <= max(2**-7, distance(narrow, plain))  # the cotangent is bfloat16


# name -> (function, pattern skipped, words of the reason, what is fused all the same)
MISSES = {
    "float16 is wanted": (lambda x, w, b, r: conv(x, w, preferred_element_type=jnp.float16), "conv", "dtypes bfloat16", []),
    "a cast alone": (lambda x, w, b, r: cast(x, w), None, "", ["conv"]),
    "on its way to statistics": (lambda x, w, b, r: (lambda y: (y + b).mean())(cast(x, w)), None, "", ["conv"]),
    "a narrow residual": (lambda x, w, b, r: jax.nn.relu(cast(x, w) + r.astype(BF16)), "conv+add+relu", "another dtype", ["conv"]),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_miss(name):
    fn, pattern, words, still = MISSES[name]
    fused, skipped = patterns(fn, XN, WN, B, R)
    assert fused == still and [p for p, _ in skipped] == [pattern] * bool(pattern)
    assert not skipped or words in skipped[0][1]


@pytest.mark.parametrize("spelling", ["preferred", "cast"])
def test_dense(spelling):
    def fn(x, w, b):
        if spelling == "cast":
            z = (x @ w).astype(jnp.float32)
        else:
            z = jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return jax.nn.gelu(z + b)

    x, w = X.reshape(-1, 16).astype(BF16), W.reshape(16, 18)[:, :8].astype(BF16)
    assert patterns(fn, x, w, B) == (["dense+bias+gelu_tanh"], [])
    rounds_nothing(fn, x, w, B)
