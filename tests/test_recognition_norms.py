"""Layer, RMS, group and instance norm in every framework's spelling; and near-misses."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import jaxfuse
from frameworks import equinox, haiku, keras_layer, linen, nnx_module
from layers import BETA, GAMMA, randn
from recognition import correct, differentiated, fused, norms, rows
from spellings.norm import HITS, X, group_norm, layer_norm, moments

keras = pytest.importorskip("keras")
T = randn(2, 5, 8)


def test_group_norm_of_a_value_that_is_widened_first():
    widened = lambda x, g, b: group_norm(x.astype(jnp.float32), g, b).astype(x.dtype)
    assert fused(widened, X.astype(jnp.bfloat16), GAMMA, BETA) == ["group_norm"]


def test_what_follows_a_norm():
    assert rows(HITS["layer_norm, a sum after it"].function, X, GAMMA, BETA)[1] == (
        "layer_norm+add", "it adds to or scales the normalised value: no kernel yet on cpu")
    assert rows(lambda *args: jax.nn.leaky_relu(layer_norm(*args), 0.2), X, GAMMA, BETA) == [("layer_norm+leaky_relu", "fused")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_norm_of_what_a_layer_makes_that_is_left_to_xla(dtype):
    """The cast to float32 is the norm's, though it follows the layer."""
    x, w = randn(4, 8).astype(dtype), randn(8, 8).astype(dtype)
    report = jaxfuse.explain(lambda x, w: layer_norm((x @ w + x).astype(jnp.float32), 1.0, 0.0).astype(dtype), x, w, policy="never")
    assert [site.pattern for site in report.skipped] == ["dense+add", "layer_norm"]


def test_statistics_along_another_axis_of_equal_length():
    """Without keepdims the mean of each row is subtracted from each column: numbers fit, places do not."""
    crossed = lambda x, g, b: (x - x.mean(-1)) * lax.rsqrt(((x - x.mean(-1)) ** 2).mean(-1) + 1e-5) * g + b
    args = randn(8, 8), GAMMA, BETA
    assert fused(crossed, *args) == []
    ((pattern, reason),) = rows(crossed, *args)
    assert pattern == "norm" and reason.endswith("combines rows of float32[8, 8] with statistics of others")


NO_NORMS = {
    "statistics alone": lambda x: moments(x, -1),
    "l2 normalisation": lambda x: x / jnp.sqrt((x * x).sum(-1, keepdims=True)),
    "l2 loss": lambda x: jnp.sum(x * x),
}


@pytest.mark.parametrize("name", NO_NORMS)
def test_no_norm(name):
    assert rows(NO_NORMS[name], T) == []


# --- frameworks --------------------------------------------------------------------------------------------------


FRAMEWORKS = {
    "layer_norm, linen": lambda x: linen(nn.LayerNorm(), x),
    "layer_norm, linen bf16": lambda x: linen(nn.LayerNorm(dtype=jnp.bfloat16), x),
    "layer_norm, linen slow variance": lambda x: linen(nn.LayerNorm(use_fast_variance=False), x),
    "rms_norm, linen": lambda x: linen(nn.RMSNorm(), x),
    "group_norm, linen": lambda x: linen(nn.GroupNorm(2), x),
    "instance_norm, linen": lambda x: linen(nn.InstanceNorm(), x),
    "layer_norm, nnx": lambda x: nnx_module(lambda rngs: nnx.LayerNorm(8, rngs=rngs)),
    "rms_norm, nnx": lambda x: nnx_module(lambda rngs: nnx.RMSNorm(8, rngs=rngs)),
    "group_norm, nnx": lambda x: nnx_module(lambda rngs: nnx.GroupNorm(8, 2, rngs=rngs)),
    "layer_norm, haiku": lambda x: haiku(lambda: hk.LayerNorm(-1, True, True), x),
    "rms_norm, haiku": lambda x: haiku(lambda: hk.RMSNorm(-1), x),
    "group_norm, haiku": lambda x: haiku(lambda: hk.GroupNorm(2), x),
    "instance_norm, haiku": lambda x: haiku(lambda: hk.InstanceNorm(True, True), x),
    "layer_norm, equinox": lambda x: equinox(eqx.nn.LayerNorm(8), x.ndim - 1),
    "rms_norm, equinox": lambda x: equinox(eqx.nn.RMSNorm(8), x.ndim - 1),
    "layer_norm, keras": lambda x: keras_layer(keras.layers.LayerNormalization(), x),
    "rms_norm, keras": lambda x: keras_layer(keras.layers.RMSNormalization(), x),
    "group_norm, keras": lambda x: keras_layer(keras.layers.GroupNormalization(2), x),
}


@pytest.mark.parametrize("x", [X, T], ids=["images", "tokens"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_norm_of_a_framework(name, x):
    apply, weights = FRAMEWORKS[name](x)
    pattern = name.split(",")[0]
    assert fused(apply, weights, x) == [pattern]
    assert norms(differentiated(apply, weights, x), weights, x) == [pattern, f"backward {pattern}"]


OVER_ALL = {
    "linen": lambda x: linen(nn.LayerNorm(reduction_axes=range(1, x.ndim), feature_axes=range(1, x.ndim)), x),
    "equinox": lambda x: equinox(eqx.nn.LayerNorm(x.shape[1:]), 1),
    "keras": lambda x: keras_layer(keras.layers.LayerNormalization(axis=list(range(1, x.ndim))), x),
}


@pytest.mark.parametrize("x", [X, X[:1], T], ids=["images", "one image", "tokens"])
@pytest.mark.parametrize("name", OVER_ALL)
def test_a_layer_norm_over_all_of_an_example(name, x):
    """Gamma and beta have a number for each of its elements."""
    apply, weights = OVER_ALL[name](x)
    weights = jax.tree.map(lambda a: a + randn(*a.shape, seed=5), weights)
    assert fused(apply, weights, x) == ["layer_norm"]
    step = differentiated(apply, weights, x)
    assert norms(step, weights, x) == ["layer_norm", "backward layer_norm"]
    correct(step, weights, x)


@pytest.mark.parametrize("x", [X.transpose(0, 3, 1, 2), T.transpose(0, 2, 1)], ids=["images", "tokens"])
def test_equinox_group_norm(x):
    """Channels first; also of a single example, without vmap."""
    apply, weights = equinox(eqx.nn.GroupNorm(2, 8), 1)
    assert fused(apply, weights, x) == ["group_norm"]
    assert norms(differentiated(apply, weights, x), weights, x) == ["group_norm", "backward group_norm"]
    assert fused(lambda x: eqx.nn.GroupNorm(2, 8)(x), x[0]) == ["group_norm"]


@pytest.mark.parametrize("module", [nn.LayerNorm(), nn.GroupNorm(2)], ids=["layer norm", "group norm"])
def test_a_norm_with_a_mask_is_no_batch_norm(module):
    mask = jnp.broadcast_to(jnp.arange(X.shape[-1]) % 3 > 0, X.shape)
    apply, variables = linen(module, X, mask=mask)
    ((pattern, reason),) = rows(apply, variables, X)
    assert pattern == "norm" and "leaves elements out of the statistics" in reason
