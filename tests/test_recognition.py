"""Dense layers are recognised, in every framework's spelling."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.export
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import jaxfuse
from compare import same
from frameworks import equinox, haiku, keras_layer, linen, nnx_module
from recognition import recognised, rows
from spellings.dense import B, W, X

keras = pytest.importorskip("keras")


def test_no_row_for_what_is_no_layer():
    """A scalar product, an outer product, and einsum's elementwise products."""
    assert recognised(lambda x: jnp.vdot(x, x) + jnp.outer(x[0, 0], x[0, 0]).sum(), X) == []
    assert recognised(lambda x: jnp.einsum("btk,b->btk", x, x[:, 0, 0]), X) == []


def test_the_row_says_what_and_where():
    (site,) = jaxfuse.explain(lambda x, w, b: jax.nn.relu(x @ w + b), X, W, B).skipped
    assert (site.pattern, site.direction) == ("dense+bias+relu", "forward") and "too small" in site.reason
    assert site.shapes == (X.shape, W.shape) and site.dtypes == ("float32", "float32")
    assert "test_recognition.py:" in site.source


@pytest.mark.filterwarnings("error")
def test_a_small_layer_keeps_no_large_one_from_being_fused():
    """Layers of one input, such as a network's head beside its last layer, are decided one by one."""
    x, large, small = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1024, 512), (512, 4096), (512, 2)))

    def decided(fn):
        report = jaxfuse.explain(fn, x, large, small)
        return {(str(site.operands[1]), site.reason) for site in (*report.fused, *report.skipped)}

    alone = decided(lambda x, large, small: jax.nn.gelu(x @ large)) | decided(lambda x, large, small: jax.nn.gelu(x @ small))
    together = decided(lambda x, large, small: (jax.nn.gelu(x @ large), jax.nn.gelu(x @ small)))
    assert len({reason for _, reason in alone}) == 2 and together == alone


def test_a_product_of_one_element_that_is_compared():
    """As spectral norms do it: the derivative of a comparison of one number is no array."""
    model = nn.SpectralNorm(nn.Dense(16))
    variables = model.init(jax.random.key(0), X, update_stats=False)
    step = jax.grad(lambda variables, x: jnp.sum(model.apply(variables, x, update_stats=False) ** 2))
    assert not any("cannot read" in reason for _, reason in rows(step, variables, X))


def equinox_mlp():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [eqx.nn.Linear(n, m, key=key) for n, m, key in zip((8, 16, 16), (16, 16, 3), keys)]
    return equinox(eqx.nn.Sequential([layers[0], eqx.nn.Lambda(jax.nn.gelu), layers[1], eqx.nn.Lambda(jax.nn.relu), layers[2]]), 2)


def keras_mlp():
    layers = keras.layers.Dense(16, activation=jax.nn.gelu), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)
    return keras_layer(keras.Sequential(layers), X)


FRAMEWORKS = {
    "linen": lambda: linen(nn.Sequential([nn.Dense(16), nn.gelu, nn.Dense(16, dtype=jnp.bfloat16), nn.relu, nn.Dense(3)]), X),
    "nnx": lambda: nnx_module(lambda rngs: nnx.Sequential(
        nnx.Linear(8, 16, rngs=rngs), nnx.gelu, nnx.Linear(16, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 3, rngs=rngs))),
    "haiku": lambda: haiku(lambda: hk.Sequential([hk.Linear(16), jax.nn.gelu, hk.Linear(16), jax.nn.relu, hk.Linear(3)]), X),
    "equinox": equinox_mlp,
    "keras": keras_mlp,
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_dense_layers_of_a_framework(name):
    apply, weights = FRAMEWORKS[name]()
    assert recognised(apply, weights, X) == ["dense+bias+gelu_tanh", "dense+bias+relu", "dense+bias"]


@pytest.mark.parametrize("names", ["b, t", "n, s", "p, q", "i, j", "k, l", "m, h"])  # each has its place in a set
def test_symbolic_shapes_are_read(names):
    def fn(x):
        return jax.nn.relu((x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) @ W)

    spec = jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"{names}, 8"), jnp.float32)
    exported = jax.export.export(jax.jit(jaxfuse.fuse(fn, policy="always")))(spec)
    same(exported.call(X), fn(X))
    reasons = [reason for _, reason in rows(fn, spec)]
    assert not any("cannot be told" in reason for reason in reasons)
