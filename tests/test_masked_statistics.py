"""Statistics with a mask: one of ones, which the program fixes, masks nothing; one that is data is left alone."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from test_patterns import BETA, GAMMA, Z, check_values, patterns

OVER = (0, 1, 2)


def normalised(x, mean, var, gamma, beta):
    return jax.nn.relu((x - mean) * jax.lax.rsqrt(var + 1e-5) * gamma + beta)


def masked(mask):
    def fn(x, gamma, beta):
        where = mask(x)
        return normalised(x, jnp.mean(x, OVER, where=where), jnp.var(x, OVER, where=where), gamma, beta)

    return fn


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        return nn.relu(nn.BatchNorm(use_running_average=False)(x, mask=mask))


def linen(mask):
    variables = Norm().init(jax.random.key(0), Z, None)
    return lambda x, gamma, beta: Norm().apply(variables, gamma * x + beta, mask(x), mutable=["batch_stats"])


HITS = {
    "True": masked(lambda x: True),
    "ones": masked(lambda x: jnp.ones(x.shape, bool)),
    "of each pixel": masked(lambda x: jnp.ones((*x.shape[:3], 1), bool)),
    "Flax, None": linen(lambda x: None),
    "Flax, ones": linen(lambda x: jnp.ones(x.shape, bool)),
}


@pytest.mark.parametrize("name", HITS)
def test_hit(name):
    assert patterns(HITS[name], Z, GAMMA, BETA) == (["bn+relu"], [])


@pytest.mark.parametrize("name", ["of each pixel", "Flax, ones"])
def test_values(name):
    check_values(HITS[name], Z, GAMMA, BETA, tolerance=2e-4)


def test_in_a_train_step():
    step = jax.grad(lambda *args: jnp.sum(jnp.sin(HITS["ones"](*args))), (0, 1, 2))
    report = jaxfuse.explain(step, Z, GAMMA, BETA, policy="always")
    assert sorted((site.direction, site.pattern) for site in report.fused) == [("backward", "bn+relu"), ("forward", "bn+relu")]
    made, known = jaxfuse.fuse(step, policy="always")(Z, GAMMA, BETA), jax.jit(step)(Z, GAMMA, BETA)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), made, known)


MISSES = {
    "data": masked(lambda x: x > 0),
    "an example left out": masked(lambda x: (jnp.arange(4) < 3).reshape(4, 1, 1, 1)),
    "one masked square": lambda x, gamma, beta: normalised(
        x, x.mean(OVER), jnp.mean((x - x.mean(OVER)) ** 2, OVER, where=x > 1), gamma, beta),
    "Flax, data": linen(lambda x: x > 0),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_miss(name):
    fused, skipped = patterns(MISSES[name], Z, GAMMA, BETA)
    assert fused == [] and all("leaves elements out" in reason or "not made into a mean" in reason for _, reason in skipped)
