"""Networks as users write them: every convolution and batch norm in a fused site, values and gradients unchanged."""

import jax
import jax.numpy as jnp
import pytest

from compare import jit, same
from layers import SmallNet, randn
from recognition import explain, fuse, patterns, same_as_unfused

DTYPES = [jnp.float32, jnp.bfloat16]


@pytest.fixture(scope="module", params=DTYPES, ids=["f32", "bf16"])
def network(request):
    dtype = request.param
    model, x = SmallNet(dtype), randn(4, 16, 16, 3, dtype=dtype)
    variables = model.init(jax.random.key(0), x, False)
    noise = jax.tree.map(lambda v: v + 0.1 * jnp.abs(randn(*v.shape, seed=9)), variables["batch_stats"])
    return model, {"params": variables["params"], "batch_stats": noise}, x


def test_flax_inference(network):
    model, variables, x = network
    apply = lambda variables, x: model.apply(variables, x, False)
    fused, skipped = patterns(apply, variables, x)
    assert sorted(fused) == sorted(
        ["dense+bias", "conv+bias+relu", "conv+bias+relu6"] + 4 * ["conv+bn+relu"] + ["conv+bn"] + 2 * ["conv+bn+add+relu"])
    assert not skipped
    same_as_unfused(apply, variables, x, times=5)


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
        return jit(jax.value_and_grad(f, has_aux=True))(*args)

    made, known = gradients(fuse(loss)), gradients(loss)
    if x.dtype == jnp.float32:
        same(made, known, times=50, floor=1e-3)
    else:
        same(made[0], known[0], narrowest=x.dtype, times=25)
        assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(made[1]))


def test_sources_are_the_users_lines(network):
    model, variables, x = network
    report = explain(lambda v, x: model.apply(v, x, False), variables, x)
    assert all("layers.py:" in site.source for site in report.fused)
    assert len({site.source for site in report.fused}) > 4
