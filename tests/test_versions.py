"""A JAX that is newer than those tested, and JAX's own switches that change how a program is written down."""

import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
import layers
from compare import jit, same
from jaxfuse import planner
from jaxfuse.patterns.conv import forward as conv
from jaxfuse.program import graph, plan
from jaxfuse.runtime import private, versions
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


def looped(params, x):
    """A layer, then two of the same in a loop."""
    y = jax.nn.relu(layers.conv(x, params[0]))
    return jax.lax.scan(lambda y, w: (jax.nn.relu(layers.conv(y, w)), None), y, jnp.stack(params[1:]))[0]


def nameless(eqn):
    """A scan's parameters as no known JAX calls them."""
    params = known_params(eqn)
    return {f"the_{name}": value for name, value in params.items()} if eqn.primitive.name == "scan" else params


known_params = private.params_of


@pytest.mark.parametrize("module, name, renamed", [(graph, "params_of", nameless), (private, "with_params", None)],
                         ids=["parameters of a loop", "a loop over another body"])
@pytest.mark.parametrize("make", [lambda f: f, lambda f: jax.grad(lambda params, x: jnp.sum(f(params, x) ** 2))],
                         ids=["forward", "gradient"])
def test_a_loop_that_cannot_be_read_runs_as_it_did(monkeypatch, module, name, renamed, make):
    monkeypatch.setattr(module, name, renamed)  # None: what is called there raises TypeError; nameless: KeyError where it is read
    arrays, function = arguments(), make(looped)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fused = jaxfuse.fuse(function, policy="always")(*arrays)
        report = jaxfuse.explain(function, *arrays, policy="always")
    same(fused, jax.jit(function)(*arrays), floor=1e-3)
    assert "conv+relu" in [site.pattern for site in report.fused]  # the layer outside of the loop
    if renamed:
        assert any("cannot read the body of scan" in str(w.message) for w in caught)
        assert any("cannot read the body of scan" in site.reason for site in report.skipped)


def unreadable(closed, outer=None):
    raise AttributeError("'Jaxpr' object has no attribute 'eqns'")


def test_a_program_that_cannot_be_read_runs_as_it_did(monkeypatch):
    monkeypatch.setattr(planner, "Graph", unreadable)
    arrays = arguments()
    with pytest.warns(versions.UnreadWarning, match="cannot read this program.*no attribute 'eqns'.*please report this"):
        fused = jaxfuse.fuse(network, policy="always")(*arrays)
    np.testing.assert_array_equal(fused, jax.jit(network)(*arrays))
    with pytest.warns(versions.UnreadWarning):
        assert "cannot read this program" in jaxfuse.explain(network, *arrays).skipped[0].reason
    with pytest.warns(versions.UnreadWarning), pytest.raises(jaxfuse.FusionError, match="cannot read this program"):
        jaxfuse.fuse(network, policy="always", strict=True)(*arrays)


def test_what_a_newer_jax_cannot_write_down_runs_as_it_did(monkeypatch):
    monkeypatch.setattr(plan, "evaluate", None)
    arrays = arguments()
    with pytest.raises(TypeError, match="not callable"):  # under a JAX that was tested it is a defect, and says so
        jaxfuse.fuse(network, policy="always")(*arrays)
    monkeypatch.setattr(versions, "is_newer", lambda: True)
    with pytest.warns(versions.UnreadWarning, match="how to write down"):
        fused = jaxfuse.fuse(network, policy="always")(*arrays)
    np.testing.assert_array_equal(fused, jax.jit(network)(*arrays))


# Run with names that private modules of JAX have no more.
WITHOUT = """
import importlib, sys
found = importlib.import_module

class Without:
    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        if name in sys.argv[1:]:
            raise AttributeError(name)
        return getattr(self.module, name)

import jax
importlib.import_module = lambda name, *rest, **kw: (Without if name.startswith("jax._src.") else lambda m: m)(found(name, *rest, **kw))

import jaxfuse, jax.numpy as jnp, numpy as np
from jax.experimental import checkify

def loss(w, x):
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.sum(jax.nn.relu((y - y.mean((0, 1, 2))) * jax.lax.rsqrt(y.var((0, 1, 2)) + 1e-5)) ** 2)

w, x = 0.1 * jax.random.normal(jax.random.key(0), (3, 3, 4, 8)), jax.random.normal(jax.random.key(1), (2, 8, 8, 4))
step = jax.value_and_grad(loss)
fused = jaxfuse.fuse(step, policy="always")
assert len(jaxfuse.explain(step, w, x, policy="always").fused) > 2
for made in (fused(w, x), jax.jit(fused)(w, x), jaxfuse.fuse(jax.jit(step), policy="always")(w, x)):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), made, step(w, x))
for off in (False, True):
    with jax.disable_jit(off):
        y = jaxfuse.ops.max_pool(x, (2, 2), strides=(2, 2))
        np.testing.assert_allclose(fused(w, x)[0], loss(w, x), rtol=1e-4)
assert y.shape == (2, 4, 4, 4)
frozen = jaxfuse.freeze(loss, w)
assert abs(frozen(x) - loss(w, x)) < 1e-3 * abs(loss(w, x))
checkify.checkify(fused)(w, x)
jax.export.export(jax.jit(fused))(w, x)
print("fused")
"""
PRIVATE = sorted(set(re.findall(r'_named\("[\w.]+", "(\w+)"', pathlib.Path(private.__file__).read_text())))


@pytest.mark.costly
@pytest.mark.parametrize("gone", [PRIVATE, *[[name] for name in PRIVATE]], ids=lambda gone: gone[0] if len(gone) == 1 else "all")
def test_private_names_of_jax_that_have_gone(gone):
    assert len(PRIVATE) > 8
    assert printed_by("-c", WITHOUT, *gone).strip() == "fused"


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
