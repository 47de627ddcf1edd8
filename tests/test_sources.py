"""A site's source is the user's line: through jits that are traced once, loops, gradients, and frameworks' frames.

Lines are named by the comment at their end. A model that a package defines is at the user's line that calls it.
"""

import os
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxfuse

LINES = pathlib.Path(__file__).read_text().splitlines()
X = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
W = jax.ShapeDtypeStruct((3, 3, 3, 3), jnp.float32)


def sources(fn, *args):
    """The comments of the lines where the sites are, all of them in this file."""
    report = jaxfuse.explain(fn, *args, policy="always")
    found = {tuple(site.source.rsplit(":", 1)) for site in (*report.fused, *report.skipped)}
    assert {pathlib.Path(file).name for file, _ in found} == {"test_sources.py"}
    return {LINES[int(line) - 1].split("  # ")[1] for _, line in found}


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))  # conv


def scan(x, w):
    return lax.scan(lambda c, _: (jax.checkpoint(conv)(c, w), None), x, None, length=2)[0]


def gradient(fn):
    return jax.grad(lambda x, w: fn(x, w).sum(), (0, 1))


PROGRAMS = {
    "plain": conv,
    "jit": jax.jit(conv),
    "scan": scan,
    "vmap": lambda x, w: jax.vmap(lambda v: conv(v[None], w))(x),
    "cond": lambda x, w: lax.cond(x.sum() > 0, conv, lambda x, w: x, x, w),
    "gradient": gradient(conv),
    "gradient of scan": gradient(scan),
    "gradient of jit": gradient(jax.jit(conv)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_line_of_the_convolution(name):
    assert sources(PROGRAMS[name], X, W) == {"conv"}


def test_a_jit_of_a_package_is_at_the_line_that_calls_it_now():
    """It was traced when it was first called, from another line."""
    package = {"conv": lax.conv_general_dilated}
    text = "import jax\n@jax.jit\ndef library(x, w):\n    return conv(x, w, (1, 1), 'SAME')\n"
    exec(compile(text, os.path.join("site-packages", "package", "layers.py"), "exec"), package)
    library = package["library"]
    x, w = jnp.ones((2, 3, 8, 8)), jnp.ones((3, 3, 3, 3))
    library(x, w)  # first
    assert sources(lambda x, w: library(library(x, w), w), x, w) == {"second"}  # second


def test_flax_linen():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(8, (3, 3))(x))  # linen 1
            return nn.Conv(8, (3, 3))(x)  # linen 2

    net = Net()
    variables = jax.eval_shape(net.init, jax.random.key(0), X)
    assert sources(net.apply, variables, X) == {"linen 1", "linen 2"}
    assert sources(jax.grad(lambda v, x: net.apply(v, x).sum()), variables, X) == {"linen 1", "linen 2"}


def test_flax_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv, self.norm = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return nnx.relu(self.norm(self.conv(x)))  # nnx

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    assert sources(lambda state, x: nnx.merge(graph, state)(x), state, X) == {"nnx"}


def test_haiku():
    hk = pytest.importorskip("haiku")

    def own(x):
        return jax.nn.relu(hk.Conv2D(8, 3)(x))  # own haiku

    def packaged(x):
        return hk.nets.ResNet18(10)(x, is_training=True)  # packaged haiku

    for net, line in ((own, "own haiku"), (packaged, "packaged haiku")):
        transformed = hk.transform_with_state(net)
        params, state = jax.eval_shape(transformed.init, jax.random.key(0), X)
        assert sources(lambda params, state, x: transformed.apply(params, state, None, x), params, state, X) == {line}


def test_equinox():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        conv: eqx.nn.Conv2d

        def __call__(self, x):
            return jax.nn.relu(self.conv(x))  # equinox

    net = Net(eqx.nn.Conv2d(3, 8, 3, key=jax.random.key(0)))
    x = jnp.ones((2, 3, 8, 8))
    for wrap in (lambda f: f, eqx.filter_jit):
        assert sources(wrap(lambda net, x: jax.vmap(net)(x)), net, x) == {"equinox"}


def test_keras(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    model = keras.applications.MobileNet(weights=None, input_shape=(32, 32, 3), classes=10)
    trainable, rest = [[v.value for v in some] for some in (model.trainable_variables, model.non_trainable_variables)]

    def predict(trainable, rest, x):
        return model.stateless_call(trainable, rest, x)[0]  # keras

    assert sources(predict, trainable, rest, X) == {"keras"}


def test_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
    model = transformers.FlaxResNetForImageClassification(config, input_shape=(1, 32, 32, 3))

    def predict(params, x):
        return model(x.transpose(0, 3, 1, 2), params=params).logits  # transformers

    assert sources(predict, model.params, X) == {"transformers"}
