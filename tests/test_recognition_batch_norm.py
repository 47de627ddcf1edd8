"""Batch norm in inference, with no convolution before it, in every framework's spelling; and near-misses."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import jaxfuse
from jaxfuse.runtime.reasons import XLA_DOES_THIS
from frameworks import linen, nnx_module
from layers import randn
from recognition import recognised, rows

keras = pytest.importorskip("keras")
X, GAMMA, BETA = randn(2, 6, 6, 8), randn(8), randn(8, seed=1)


def batch_norm(x, mean, var, g, b):
    return (x - mean) * (lax.rsqrt(var + 1e-5) * g) + b


INFERENCE = {
    "bn inference": lambda x, v, g, b: batch_norm(x, b, v, g, b),
    "bn inference+relu": lambda x, v, g, b: jax.nn.relu(batch_norm(x, b, v, g, b)),
    "bn inference+add+relu": lambda x, v, g, b: jax.nn.relu(jnp.sin(x) + batch_norm(x, b, v, g, b)),
    "bn inference+relu, channels first": lambda x, v, g, b: jax.nn.relu(
        batch_norm(x.transpose(0, 3, 1, 2), *[a[:, None, None] for a in (b, v, g, b)])
    ),
    "bn inference+relu, folded": lambda x, v, g, b: (lambda f: jax.nn.relu(x * f + (b - b * f)))(g / jnp.sqrt(v + 1e-3)),
}


@pytest.mark.parametrize("name", INFERENCE)
def test_batch_norm_inference(name):
    assert rows(INFERENCE[name], X, jnp.abs(BETA), GAMMA, BETA) == [(name.split(",")[0], XLA_DOES_THIS)]


def test_batch_norm_inference_near_misses():
    def returned(x, v, g, b):
        y = batch_norm(x, b, v, g, b)
        return jax.nn.relu(y), y

    args = X, jnp.abs(BETA), GAMMA, BETA
    assert rows(returned, *args) == [("bn inference+relu", "float32[2, 6, 6, 8] is returned by the program")]
    ((pattern, reason),) = rows(lambda x, v, g, b: batch_norm(x, b, v, g, 0) + b[:6, None], *args)
    assert pattern == "bn inference+bias" and "varies along axis 2" in reason


def test_a_convolutions_row_speaks_for_its_norm():
    """Where the convolution is left alone, too, there is one row."""

    def fn(x, k, v, g, b):
        return jax.nn.relu(batch_norm(lax.conv(x, k, (1, 1), "SAME") + b[:, None, None], *[a[:, None, None] for a in (b, v, g, b)]))

    (site,) = jaxfuse.explain(fn, X[:1, :4, :4].transpose(0, 3, 1, 2), randn(8, 8, 1, 1), jnp.abs(BETA), GAMMA, BETA).skipped
    assert site.pattern == "conv+bn+relu" and "too small to gain" in site.reason


def haiku_bn():
    net = hk.transform_with_state(lambda x, train: hk.BatchNorm(True, True, 0.9)(x, train))
    return lambda variables, x: net.apply(*variables, None, x, False)[0], net.init(jax.random.key(0), X, True)


def keras_bn():
    layer = keras.layers.BatchNormalization()
    layer.build(X.shape)
    weights = [[v.value for v in layer.trainable_variables], [v.value for v in layer.non_trainable_variables]]
    return lambda weights, x: layer.stateless_call(*weights, x, training=False)[0], weights


FRAMEWORKS = {
    "linen": lambda: linen(nn.BatchNorm(use_running_average=True, dtype=jnp.bfloat16), X),
    "nnx": lambda: nnx_module(lambda rngs: nnx.BatchNorm(8, use_running_average=True, rngs=rngs)),
    "haiku": haiku_bn,
    "keras": keras_bn,
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_batch_norm_inference_of_a_framework(name):
    apply, weights = FRAMEWORKS[name]()
    assert recognised(lambda weights, x: jax.nn.relu(apply(weights, x)), weights, X) == ["bn inference+relu"]
