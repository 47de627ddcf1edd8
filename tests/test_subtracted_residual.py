"""`r - conv(x)`, as networks have it that predict noise, is r + (-1)·conv(x): one site. Of `conv(x) - r` the sign of r would
be a pass of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from test_patterns import B, BETA, GAMMA, R, W, X, Z, ZR, check_values, conv, patterns
from test_spellings import normalised

HITS = {
    "conv+scale+add": lambda x, w, b, r: r - conv(x, w),
    "conv+bias+scale+add": lambda x, w, b, r: r - (conv(x, w) + b),
    "conv+scale+bias": lambda x, w, b, r: b - conv(x, w),
    "conv+scale+add+relu": lambda x, w, b, r: jax.nn.relu(r - conv(x, w)),
    "conv+bias+scale+add+silu": lambda x, w, b, r: jax.nn.silu(r - (b + conv(x, w))),
    "conv+bias+scale+add+tanh, in NCHW": lambda x, w, b, r: jnp.tanh(r.transpose(0, 3, 1, 2) - (b + conv(x, w)).transpose(0, 3, 1, 2)),
}


@pytest.mark.parametrize("name", HITS)
def test_hit(name):
    fused, skipped = patterns(HITS[name], X, W, B, R)
    assert (fused, skipped) == ([name.split(",")[0] + "+transpose" * ("NCHW" in name)], [])
    check_values(HITS[name], X, W, B, R, tolerance=1e-4)



# name -> (function, pattern skipped, words of the reason, what is fused all the same)
MISSES = {
    "the residual is subtracted": (lambda x, w, b, r: jax.nn.relu(conv(x, w) + b - r), "conv+bias+sub", "change its sign", ["conv+bias"]),
    "from a row": (lambda x, w, b, r: r[:1] - conv(x, w), "conv+bias", "varies along axis 1", ["conv"]),
    "a sum is subtracted": (lambda x, w, b, r: R[::-1] - (conv(x, w) + r), "conv+add+scale", "scales the sum", ["conv+add"]),
    "from itself": (lambda x, w, b, r: (lambda y: y - y)(conv(x, w)), None, None, ["conv"]),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_miss(name):
    fn, pattern, words, still = MISSES[name]
    fused, skipped = patterns(fn, X, W, B, R)
    assert fused == still and [p for p, _ in skipped] == [pattern] * bool(pattern)
    assert not pattern or words in skipped[0][1]
    np.testing.assert_allclose(jaxfuse.fuse(fn, policy="always")(X, W, B, R), fn(X, W, B, R), rtol=1e-4, atol=1e-4)


def steps(fn, *args):
    step = jax.grad(lambda *args: jnp.sum(jnp.sin(fn(*args))), tuple(range(len(args))))
    report = jaxfuse.explain(step, *args, policy="always")
    assert not report.skipped
    made, known = jaxfuse.fuse(step, policy="always")(*args), jax.jit(step)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3), made, known)
    return sorted((site.direction, site.pattern) for site in report.fused)


def test_in_a_train_step():
    assert steps(lambda x, w, b, r: jax.nn.relu(r - (conv(x, w) + b)), X, W, B, R) == [
        ("backward", "conv+bias+scale+add+relu"), ("forward", "conv+bias+scale+add+relu")]


def test_batch_norm_in_a_train_step():
    assert steps(lambda x, gamma, beta, r: jax.nn.relu(r - normalised(x, gamma, beta)), Z, GAMMA, BETA, ZR) == [
        ("backward", "bn+add+relu"), ("forward", "bn+add+relu")]
