"""Statistics of `y.reshape(-1, C)`, applied to y, which was not reshaped, or to the reshaped value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from test_patterns import BETA, GAMMA, Z, ZR, check_values, fast_moments, patterns


def slow(flat):
    return flat.mean(0), flat.var(0)


def fast(flat):
    return fast_moments(flat, (0,))


def wide(flat):
    return fast(flat.astype(jnp.float32))


def centered(flat):
    mean = flat.mean(0)
    return mean, ((flat - mean) ** 2).mean(0)


def of(moments, shape=(-1, 8)):
    def fn(x, gamma, beta, r):
        mean, var = moments(x.reshape(shape))
        return jax.nn.relu((x - mean) * jax.lax.rsqrt(var + 1e-5) * gamma + beta + r), mean, var

    return fn


def both_flat(x, gamma, beta, r):
    flat = x.reshape(-1, 8)
    mean, var = fast(flat)
    return jax.nn.relu(((flat - mean) * jax.lax.rsqrt(var + 1e-5) * gamma + beta).reshape(x.shape) + r)


HITS = {"slow": of(slow), "fast": of(fast), "wide": of(wide), "centered": of(centered), "flat": both_flat}


@pytest.mark.parametrize("name", HITS)
def test_hit(name):
    assert patterns(HITS[name], Z, GAMMA, BETA, ZR) == (["bn+add+relu"], [])


@pytest.mark.parametrize("name", ["slow", "fast"])
def test_values(name):
    check_values(HITS[name], Z, GAMMA, BETA, ZR, tolerance=1e-4)


@pytest.mark.parametrize("name", HITS)
def test_in_a_train_step(name):
    def loss(*args):
        out = HITS[name](*args)
        return jnp.sum(jnp.sin(out[0] if isinstance(out, tuple) else out) * ZR)

    step, args = jax.value_and_grad(loss, (0, 1, 2, 3)), (Z, GAMMA, BETA, ZR)
    report = jaxfuse.explain(step, *args, policy="always")
    assert sorted((site.direction, site.pattern) for site in report.fused) == [("backward", "bn+add+relu"), ("forward", "bn+add+relu")]
    assert not report.skipped
    made, known = jaxfuse.fuse(step, policy="always")(*args), jax.jit(step)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), made, known)


def channels_first(x, gamma, beta, r):
    """A view of which the channels are the middle."""
    x = x.transpose(0, 3, 1, 2)
    flat = x.reshape(4, 8, -1)
    mean, var = flat.mean((0, 2)), flat.var((0, 2))
    up = lambda v: v[:, None, None]
    return jax.nn.relu((x - up(mean)) * up(jax.lax.rsqrt(var + 1e-5) * gamma) + up(beta))


def test_channels_first():
    fused, skipped = patterns(channels_first, Z, GAMMA, BETA, ZR)
    assert [name.split("+transpose")[0] for name in fused] == ["bn+relu"] and not skipped
    check_values(channels_first, Z, GAMMA, BETA, ZR, tolerance=1e-4)


def other_order(x, gamma, beta, r):
    """The reshaped value's columns are not the channels."""
    mean, var = fast(x.transpose(0, 3, 1, 2).reshape(-1, 8))
    return jax.nn.relu((x - mean) * jax.lax.rsqrt(var + 1e-5) * gamma + beta + r)


def half_of_the_channels(x, gamma, beta, r):
    mean, var = fast(x.reshape(-1, 4))
    return jax.nn.relu((x - jnp.tile(mean, 2)) * jax.lax.rsqrt(jnp.tile(var, 2) + 1e-5) * gamma + beta + r)


@pytest.mark.parametrize("fn", [other_order, half_of_the_channels])
def test_near_miss(fn):
    fused, skipped = patterns(fn, Z, GAMMA, BETA, ZR)
    assert fused == [] and "nothing normalises it" in dict(skipped)["bn"]
