"""Networks as users write them: every convolution and batch norm in a fused site, values and gradients unchanged."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from test_patterns import patterns, randn

DTYPES = [jnp.float32, jnp.bfloat16]


class Bottleneck(nn.Module):
    features: int
    strides: int = 1
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, train):
        def norm(name):
            return nn.BatchNorm(use_running_average=not train, dtype=self.dtype, name=name)

        y = nn.Conv(self.features, (1, 1), use_bias=False, dtype=self.dtype)(x)
        y = nn.relu(norm("norm1")(y))
        y = nn.Conv(self.features, (3, 3), self.strides, use_bias=False, dtype=self.dtype)(y)
        y = nn.relu(norm("norm2")(y))
        y = norm("norm3")(nn.Conv(4 * self.features, (1, 1), use_bias=False, dtype=self.dtype)(y))
        if x.shape != y.shape:
            x = nn.Conv(4 * self.features, (1, 1), self.strides, use_bias=False, dtype=self.dtype)(x)
            x = norm("norm4")(x)
        return nn.relu(x + y)


class SmallNet(nn.Module):
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(8, (3, 3), dtype=self.dtype)(x))
        x = Bottleneck(4, 2, self.dtype)(x, train)
        x = Bottleneck(4, 1, self.dtype)(x, train)
        x = nn.relu6(nn.Conv(16, (3, 3), feature_group_count=16, dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2)))


@pytest.fixture(scope="module", params=DTYPES, ids=["f32", "bf16"])
def network(request):
    dtype = request.param
    model, x = SmallNet(dtype), randn(4, 16, 16, 3, dtype=dtype)
    variables = model.init(jax.random.key(0), x, False)
    noise = jax.tree.map(lambda v: v + 0.1 * jnp.abs(randn(*v.shape, seed=9)), variables["batch_stats"])
    return model, {"params": variables["params"], "batch_stats": noise}, x


def close(a, b, tolerance):
    jax.tree.map(lambda u, v: np.testing.assert_allclose(
        np.asarray(u, np.float32), np.asarray(v, np.float32), rtol=tolerance, atol=tolerance), a, b)


def test_flax_inference(network):
    model, variables, x = network
    apply = lambda variables, x: model.apply(variables, x, False)
    fused, skipped = patterns(apply, variables, x)
    assert sorted(fused) == sorted(
        ["dense+bias", "conv+bias+relu", "conv+bias+relu6"] + 4 * ["conv+bn+relu"] + ["conv+bn"] + 2 * ["conv+bn+add+relu"])
    assert not skipped
    tolerance = 1e-4 if x.dtype == jnp.float32 else 5e-2
    close(jax.jit(jaxfuse.fuse(apply, policy="always"))(variables, x), apply(variables, x), tolerance)


def test_flax_training(network):
    model, variables, x = network

    def loss(params, stats, x):
        logits, updates = model.apply({"params": params, "batch_stats": stats}, x, True, mutable=["batch_stats"])
        return jnp.sum(jnp.sin(logits.astype(jnp.float32))), updates["batch_stats"]

    args = variables["params"], variables["batch_stats"], x
    fused, skipped = patterns(loss, *args)
    assert sorted(fused) == sorted(
        7 * ["conv"] + ["dense+bias", "conv+bias+relu", "conv+bias+relu6"] + 4 * ["bn+relu"] + ["bn"] + 2 * ["bn+add+relu"])
    assert not skipped

    def gradients(f):
        return jax.jit(jax.value_and_grad(f, has_aux=True))(*args)

    if x.dtype == jnp.float32:
        close(gradients(jaxfuse.fuse(loss, policy="always")), gradients(loss), 2e-3)
    else:
        (value, stats), grads = gradients(jaxfuse.fuse(loss, policy="always"))
        (expected, expected_stats), _ = gradients(loss)
        close((value, stats), (expected, expected_stats), 0.15)
        assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))


def test_sources_are_the_users_lines(network):
    model, variables, x = network
    report = jaxfuse.explain(lambda v, x: model.apply(v, x, False), variables, x, policy="always")
    assert all("test_networks.py:" in site.source for site in report.fused)
    assert len({site.source for site in report.fused}) > 4
