"""Layers that are scanned over: the forward scan and the one that autodiff makes of it have the sites of one layer's step."""

import collections

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax import lax

import jaxfuse
from layers import conv, randn
from recognition import same_as_unfused

LAYERS = 0.2 * randn(3, 3, 3, 8, 8), 1 + 0.1 * randn(3, 8)
X = randn(2, 8, 8, 8)
pytestmark = pytest.mark.usefixtures("some_kernel")


def layer(x, parameters):
    w, g = parameters
    y = conv(x, w)
    mean, var = y.mean((0, 1, 2)), y.var((0, 1, 2))
    return jax.nn.relu((y - mean) * lax.rsqrt(var + 1e-5) * g + g + x), mean


def with_statistics(layers, x):
    y, means = lax.scan(layer, x, layers)
    return y + means.sum()


def shared(layers, x):
    """The parameters are constants of the loop."""
    w, g = layers
    return lax.scan(lambda x, _: layer(x, (w[0], g[0])), x, length=3)[0]


def with_states(layers, x):
    """What is stacked up is read by more than the backward scan."""
    def step(x, p):
        y = jax.nn.relu(conv(x, p[0]) + p[1])
        return y, y

    return lax.scan(step, x, layers)[1].sum(0)


def nested(layers, x):
    """Two steps of each layer: a loop in the loop."""
    return lax.scan(lambda x, p: (lax.scan(lambda x, _: (layer(x, p)[0], None), x, length=2)[0], None), x, layers)[0]


PROGRAMS = {
    "plain": lambda layers, x: lax.scan(layer, x, layers)[0],
    "biased": lambda layers, x: lax.scan(lambda x, p: (jax.nn.relu(conv(x, p[0]) + p[1]), None), x, layers)[0],
    "backwards": lambda layers, x: lax.scan(layer, x, layers, reverse=True)[0],
    "in_a_loop": lambda layers, x: lax.map(lambda x: PROGRAMS["plain"](layers, x), x.reshape(2, 1, *X.shape[1:])),
    "rematerialised": lambda layers, x: lax.scan(jax.checkpoint(layer), x, layers)[0],
    "mapped": lambda layers, x: jax.vmap(lambda x: PROGRAMS["plain"](layers, x[None]))(x),
    **{f.__name__: f for f in (with_statistics, shared, with_states, nested)},
}


def step_of(fn):
    return jax.value_and_grad(lambda layers, x: jnp.sin(fn(layers, x)).sum(), (0, 1))


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients(name):
    same_as_unfused(step_of(PROGRAMS[name]), LAYERS, X, times=50)


@pytest.mark.parametrize("name, sites", [
    ("plain", {"conv": 2, "bn+add+relu": 2}), ("with_statistics", {"conv": 2, "bn+add+relu": 2}),
    ("biased", {"conv+bias+relu": 2}), ("backwards", {"conv": 2, "bn+add+relu": 2}), ("nested", {"conv": 2, "bn+add+relu": 2})])
def test_sites(name, sites):
    """Those of the layer alone, forward and backward. JAX has made a plain maximum of the relu by then: the same values."""
    report = jaxfuse.explain(step_of(PROGRAMS[name]), LAYERS, X, policy="always")
    found = collections.Counter(site.pattern.replace("maximum0", "relu") for site in report.fused)
    assert found == sites, report
    assert sum(site.direction == "backward" for site in report.fused) == len(sites)


def test_less_is_saved():
    """Autodiff stacks up what it reads of every layer; of a fused layer that is x, its convolution and a mask of bits."""
    def stacked(step):
        scans = [eqn for eqn in _equations(jax.make_jaxpr(step)(LAYERS, X).jaxpr) if eqn.primitive.name == "scan"]
        return sum(v.aval.size * v.aval.dtype.itemsize for v in scans[0].outvars[1:])

    step = step_of(PROGRAMS["plain"])
    assert stacked(jaxfuse.fuse(step, policy="always")) < 0.6 * stacked(step)


def test_a_scan_that_nothing_fused_reads_stays():
    step = step_of(lambda layers, x: lax.scan(lambda x, g: (jnp.sin(x) * g, None), x, layers[1])[0])
    text = [str(jax.make_jaxpr(f)(LAYERS, X)).count("scan[") for f in (step, jaxfuse.fuse(step, policy="always"))]
    assert text[0] == text[1] == 2


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for body in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _equations(body)
