"""A JAX that is newer than those tested, and JAX's own switches that change how a program is written down."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
import layers
from compare import jit
from jaxfuse.patterns.conv import forward as conv
from jaxfuse.runtime import versions
from processes import printed_by

OBJECTS = [name for name in ("jax_custom_jvp3", "jax_custom_vjp3", "jax_remat3") if hasattr(jax.config, name)]


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))  # a rule of the user's own, which is not the derivative


def network(params, x):
    first, second, third = params
    x = jax.nn.relu(layers.conv(x, first))
    x = jax.checkpoint(lambda x: jax.nn.gelu(layers.conv(x, second), approximate=False))(x)
    return jax.nn.silu(layers.conv(doubled(x), third))


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    return [0.1 * jax.random.normal(k, (3, 3, 8, 8)) for k in keys[:3]], jax.random.normal(keys[3], (2, 12, 12, 8))


def loss(params, x):
    return jnp.sum(network(params, x) ** 2)


@pytest.fixture(params=["off", *OBJECTS, "all"])
def switches(request):
    wanted = OBJECTS if request.param == "all" else [request.param]
    before = {name: getattr(jax.config, name) for name in OBJECTS}
    jax.clear_caches()
    for name in OBJECTS:
        jax.config.update(name, name in wanted)
    yield wanted
    for name, value in before.items():
        jax.config.update(name, value)
    jax.clear_caches()


@pytest.mark.parametrize("make", [
    lambda wrap: wrap(network), lambda wrap: wrap(jax.value_and_grad(loss)), lambda wrap: jax.value_and_grad(wrap(loss)),
], ids=["forward", "fused gradient", "gradient of fused"])
def test_custom_rules_and_checkpoints_held_as_objects(switches, make):
    arrays = arguments()
    fused = jit(make(lambda fn: jaxfuse.fuse(fn, policy="always")))(*arrays)
    plain = jit(make(lambda fn: fn))(*arrays)
    for value, expected in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-4 * float(jnp.abs(expected).max()))


def test_sites_are_found_in_objects_too(switches):
    found = [site.pattern for site in jaxfuse.explain(network, *arguments(), policy="always").fused]
    assert found == ["conv+relu", "conv+gelu", "conv+silu"]


def test_what_cannot_be_read_is_left_alone_with_the_reason(monkeypatch):
    def match(graph, anchor, claimed, unprofitable):
        raise KeyError("window_strides")
        yield

    monkeypatch.setattr(conv, "match", match)
    arrays = arguments()
    with pytest.warns(versions.UnreadWarning, match="cannot read what follows conv_general_dilated at .*KeyError.*please report"):
        fused = jaxfuse.fuse(network, policy="always")(*arrays)
    np.testing.assert_array_equal(fused, jax.jit(network)(*arrays))
    with pytest.warns(versions.UnreadWarning):
        report = jaxfuse.explain(network, *arrays, policy="always")
    assert not report.fused
    assert "KeyError: 'window_strides'" in report.skipped[0].reason


def test_a_newer_jax_gives_one_warning_that_says_how_to_go_on(monkeypatch):
    versions.warn_if_newer.cache_clear()
    monkeypatch.setattr(versions, "TESTED", ("0.9",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            jaxfuse.explain(network, *arguments())
    text = [str(w.message) for w in caught if issubclass(w.category, versions.UnreadWarning)]
    assert len(text) == 1 and re.search(r"newer than .*\(0\.9\).*pip install --upgrade", text[0])
    versions.warn_if_newer.cache_clear()


def test_a_tested_jax_gives_no_warning():
    printed_by("-W", "error", "-c", "import jax, jaxfuse; jaxfuse.fuse(lambda x: x + 1)(1.0)")
