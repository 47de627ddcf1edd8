"""`freeze(…, int8=examples)`: which layers are int8, how far off they are, and that all else stays as it was."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from compare import distance, same
from jaxfuse.commands.demo import digits, training
from jaxfuse.frozen import int8 as frozen_int8
from jaxfuse.ops.conv import int8
from jaxfuse.runtime import platforms
from jaxfuse.tuning.policy import not_in_int8
from jaxfuse.tuning.rules import int8 as rule
from processes import printed_by

pytestmark = pytest.mark.usefixtures("some_kernel")
X = jax.random.normal(jax.random.key(0), (4, 12, 12, 3))


class Network(nn.Module):
    dtype: type = jnp.float32

    @nn.compact
    def __call__(self, x, scale=1.0):
        x = nn.relu(nn.Conv(16, (3, 3), 2, dtype=self.dtype)(x))  # int8 1
        y = nn.relu(nn.Conv(16, (3, 3), dtype=self.dtype)(x))  # int8 2
        x = nn.relu(nn.Conv(16, (1, 1), dtype=self.dtype)(y) + x)  # int8 3
        x = nn.Conv(16, (3, 3), feature_group_count=16, dtype=self.dtype)(x)  # depthwise
        return nn.Dense(10, dtype=self.dtype)(x * scale)  # dense


MODEL = Network()
VARIABLES = MODEL.init(jax.random.key(1), X)


def frozen_with(*examples, policy="always", model=MODEL, **options):
    return jaxfuse.freeze(model.apply, VARIABLES, policy=policy, int8=examples, **options)


@pytest.fixture(scope="module")
def frozen():
    return frozen_with(X, 2 * X[:1])


def kinds(made, *args):
    return ["int8" if not site.reason else "float" for site in made.int8_sites(*args)]


def test_layers_are_int8_and_near(frozen):
    assert 1e-4 < distance(frozen(X), MODEL.apply(VARIABLES, X)) < 0.05
    same(frozen.in_floats(X), MODEL.apply(VARIABLES, X))
    assert kinds(frozen, X) == ["int8", "int8", "int8", "float", "int8"]
    assert all(1e-4 < site.error < 0.03 for site in frozen.int8_sites(X) if not site.reason)
    program = str(jax.make_jaxpr(frozen)(X))
    assert program.count("jaxfuse_conv_int8[") == 4


def test_each_says_what_it_is(frozen):
    rows = list(map(str, frozen.int8_sites(X)))
    operands = r"float32\[4, 12, 12, 3\] float32\[3, 3, 3, 16\]"
    assert re.fullmatch(rf"conv {operands} at \S*test_freeze_int8.py:\d+: int8, error \d\.\d\d%", rows[0])
    assert "in floats: a filter is not packed for a transposed or grouped convolution" in rows[3] and "error" not in rows[3].split(":")[-1]
    lines = open(__file__).read().splitlines()
    comments = [lines[int(site.source.split(":")[1]) - 1].split("# ")[1] for site in frozen.int8_sites(X)]
    assert comments == ["int8 1", "int8 2", "int8 3", "depthwise", "dense"]
    assert [site.kernel for site in jaxfuse.explain(frozen, X, policy="always").fused]  # as floats


def test_without_examples_nothing_is_int8():
    made = jaxfuse.freeze(MODEL.apply, VARIABLES, policy="always")
    assert made.int8_sites(X) == [] and "int8" not in str(jax.make_jaxpr(made)(X))


def test_a_layer_that_is_too_far_off_stays():
    made = frozen_with(X, int8_error=1e-5)
    same(made(X), MODEL.apply(VARIABLES, X))
    assert kinds(made, X) == ["float"] * 5
    assert str(made.int8_sites(X)[0]).split(": ", 2)[1].startswith("in floats")
    assert {site.reason for site in made.int8_sites(X) if site.error} == {"more than int8_error=1e-05"}


@pytest.mark.parametrize("narrow", [True, False])
def test_what_rounding_the_weights_adds_on_average_is_taken_away(narrow, monkeypatch):
    """Inputs behind a relu have means: the errors of the layers that read them are larger without."""
    def errors():
        made = frozen_with(X, *X[:2, None])  # of several sizes
        return np.array([site.error for site in made.int8_sites(X)[1:3]])

    monkeypatch.setattr(frozen_int8, "narrow", lambda: narrow)
    found = errors()
    pack = int8.pack
    monkeypatch.setattr(int8, "pack", lambda config, w, mean: pack(config, w))
    assert (found < 0.97 * errors()).all()


def test_wide_examples_make_it_worse():
    """The range is that of all of them."""
    narrow, wide = frozen_with(X), frozen_with(X, X.at[0, 0, 0, 0].set(100.0))
    assert wide.int8_sites(X)[0].error != narrow.int8_sites(X)[0].error
    assert distance(wide(X), MODEL.apply(VARIABLES, X)) > 1.2 * distance(narrow(X), MODEL.apply(VARIABLES, X))


@pytest.mark.parametrize("name, transformed", [
    ("jit", jax.jit), ("vmap", lambda f: jax.vmap(lambda x: f(x[None])[0])), ("fuse", lambda f: jaxfuse.fuse(lambda x: f(x) * 1.0)),
    ("remat", jax.checkpoint)])
def test_it_is_int8_wherever_it_is_called(frozen, name, transformed):
    same(transformed(frozen)(X), frozen(X), floor=0.01)


def test_gradients_are_near_those_of_the_floats(frozen):
    smooth = lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(X)
    found, wanted = smooth(frozen), smooth(lambda x: MODEL.apply(VARIABLES, x))
    assert np.isfinite(found).all() and distance(found, wanted) < 0.3


def test_any_batch_shares_the_constants(frozen):
    frozen(X)
    before = frozen.nbytes
    for batch in (1, 7, 0):
        x = jnp.resize(X, (batch, *X.shape[1:]))
        assert frozen(x).shape == (batch, 6, 6, 10) and (kinds(frozen, x)[0] == "int8" or batch == 0)
    np.testing.assert_array_equal(frozen(X)[:1], frozen(X[:1]))
    assert frozen.nbytes == before


def test_floats_stay_for_what_needs_them(frozen):
    """Another signature, whose layers are the same; what no example came through, as with another flag, stays in floats."""
    assert kinds(frozen, X, 2.0) == kinds(frozen, X)
    assert distance(frozen(X, 2.0), MODEL.apply(VARIABLES, X, 2.0)) < 0.05

    def branches(w, x, *, deep=False):
        y = jax.nn.relu(x @ w["a"])
        return y @ w["b"] if deep else y

    w, x = {"a": jnp.eye(32), "b": 2 * jnp.eye(32)}, jnp.ones((8, 32))
    made = jaxfuse.freeze(branches, w, policy="always", int8=[x])
    assert kinds(made, x) == ["int8"]
    assert [site.reason for site in made.int8_sites(x, deep=True)] == ["no example came through it"] * 2
    assert distance(made(x, deep=True), 2 * x) < 1e-6


def test_a_weight_of_two_layers_has_the_range_of_each():
    def twice(w, x):
        return jnp.tanh(x @ w) @ w

    w, x = jax.random.normal(jax.random.key(2), (48, 48)) / 20, 5 * jax.random.normal(jax.random.key(3), (16, 48))
    made = jaxfuse.freeze(twice, w, policy="always", int8=[x])
    assert kinds(made, x) == ["int8", "int8"] and distance(made(x), twice(w, x)) < 0.05
    names = [name for name in made._constants if name.startswith("int8 ")]
    assert len(names) == 2


SHAPES = {  # dense layers: x, w, what is computed, whether it is int8
    "rows": ((16, 40), (40, 24), lambda w, x: x @ w, True),
    "a vector": ((40,), (40, 24), lambda w, x: x @ w, True),
    "sequences": ((3, 5, 40), (40, 24), lambda w, x: x @ w, True),
    "transposed": ((16, 40), (24, 40), lambda w, x: jnp.einsum("bi,oi->bo", x, w), True),
    "heads": ((3, 5, 40), (40, 4, 6), lambda w, x: jnp.einsum("bti,ihd->bthd", x, w), True),
    "of heads": ((3, 5, 4, 6), (4, 6, 24), lambda w, x: jnp.einsum("bthd,hdo->bto", x, w), True),
    "bias, residual, relu": ((16, 24), (24, 24), lambda w, x: jax.nn.relu(x @ w + jnp.arange(24.0) + x), True),
    "batched": ((3, 5, 40), (3, 40, 24), lambda w, x: x @ w, False),
    "columns": ((40, 16), (40, 24), lambda w, x: x.T @ w, None),
}


@pytest.mark.parametrize("name", SHAPES)
def test_dense_layers(name):
    x_shape, w_shape, apply, wanted = SHAPES[name]
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in (x_shape, w_shape))
    made = jaxfuse.freeze(apply, w, policy="always", int8=[x])
    assert distance(made(x), apply(w, x)) < 0.05
    (site,) = made.int8_sites(x)
    assert wanted is None or bool(site.reason) != wanted, site
    same(jax.vmap(made)(jnp.stack([x, -x])), jnp.stack([made(x), made(-x)]))


def test_bfloat16():
    model = Network(jnp.bfloat16)
    made = frozen_with(X, model=model)
    assert kinds(made, X)[:2] == ["int8", "int8"] and made(X).dtype == jnp.bfloat16
    assert distance(made(X).astype(jnp.float32), MODEL.apply(VARIABLES, X)) < 0.05


def test_what_was_not_measured_stays_in_floats(monkeypatch):
    """By the policy "measured"; and by a rule, small layers."""
    monkeypatch.setattr(rule, "form", lambda: "some_vnni")
    made = frozen_with(X, policy="measured")
    reasons = [site.reason for site in made.int8_sites(X)]
    assert any("int8 was not measured on a CPU like this one (some_vnni); policy=\"always\"" in reason for reason in reasons), reasons
    assert "int8" not in kinds(made, X)
    monkeypatch.setattr(frozen_int8, "not_in_int8", lambda policy, products: rule.expects_no_gain(products))
    monkeypatch.setattr(rule, "SMALLEST", dict(some_vnni=100_000))
    made = frozen_with(X)
    assert kinds(made, X) == ["float", "int8", "float", "float", "float"]
    assert "too small to gain: 62208 products, measured faster from 100000" == made.int8_sites(X)[0].reason
    assert not rule.narrow()


def test_another_platform_has_no_kernel(monkeypatch):
    monkeypatch.setattr(platforms, "current", lambda: "cuda")
    assert "int8" not in kinds(frozen_with(X), X)
    assert not_in_int8("always", 1 << 30) == "no kernel yet on cuda"


def test_an_architecture_with_no_module_says_so(monkeypatch):
    monkeypatch.setattr(rule.ffi, "native", lambda: None)
    assert rule.expects_no_gain(1 << 30) == "the native module has no int8" and rule.narrow()


@pytest.mark.parametrize("form, whole, words", [
    ("avx2", True, ""), ("avx2", False, "slower for most layers on a CPU like this one (avx2, half by half)"), ("avx512_vnni", False, "")])
def test_where_it_was_measured(form, whole, words, monkeypatch):
    monkeypatch.setattr(rule, "form", lambda: form)
    monkeypatch.setattr(rule.tuned, "computes_whole_vectors", lambda: whole)
    reason = rule.expects_no_gain(2_000_000)
    assert words in reason and bool(words) == bool(reason)
    assert "too small to gain" in rule.expects_no_gain(1_999_999) or words


@pytest.mark.parametrize("examples, words", [
    ([], "int8 has no example"),
    (X, r"int8 is of type \w+, expected a list of examples: int8=\[x\]"),
    (7, "int8 is of type int, expected a list"),
    ([X[..., :2]], "example 0 of int8 does not fit the function's arguments"),
    ([X, (X, 1.0, 2.0)], "example 1 of int8 does not fit the function's arguments"),
    ([X, X.at[0, 0, 0, 0].set(jnp.nan)], "example 1 of int8 has a NaN or an infinity"),
    ([X.at[0, 0, 0, 0].set(jnp.inf)], "example 0 of int8 has a NaN or an infinity"),
    ([X[:0]], r"example 0 of int8 has an empty array of shape \(0, 12, 12, 3\)"),
])
def test_examples_that_do_not_fit(examples, words):
    with pytest.raises(ValueError, match=words):
        jaxfuse.freeze(MODEL.apply, VARIABLES, policy="always", int8=examples)


@pytest.mark.parametrize("error", [0, -1.0, float("nan")])
def test_an_error_that_none_would_have(error):
    with pytest.raises(ValueError, match="int8_error is .*, expected a positive number"):
        frozen_with(X, int8_error=error)


def test_examples_that_overflow():
    x = jnp.full((8, 32), 1e30)
    with pytest.raises(ValueError, match=r"in the examples of int8 a layer reads a NaN or an infinity: dense float32\[8, 32\]"):
        jaxfuse.freeze(lambda w, x: (x * x) @ w, jnp.ones((32, 32)), policy="always", int8=[x])


def test_examples_may_come_from_a_generator_and_be_of_several_shapes():
    made = frozen_with(*(X[:n] for n in (1, 2, 2)))
    assert kinds(made, X).count("int8") == 4
    same(jaxfuse.freeze(MODEL.apply, VARIABLES, policy="always", int8=((X[:n], 1.0) for n in (1, 2, 2)))(X), made(X))


def test_weights_that_are_not_finite_stay():
    w = jnp.ones((32, 32)).at[0, 0].set(jnp.inf)
    made = jaxfuse.freeze(lambda w, x: x @ w, w, policy="always", int8=[jnp.ones((8, 32))])
    assert kinds(made, jnp.ones((8, 32))) == ["float"]
    np.testing.assert_array_equal(made(jnp.ones((8, 32)))[:, 0], np.full(8, np.inf))


LOAD = """
import sys, numpy as np, jaxfuse
given = np.load(sys.argv[2])
assert np.abs(jaxfuse.load(sys.argv[1])(given["x"]) - given["y"]).max() <= 1e-5 * np.abs(given["y"]).max()
print("loaded")
"""


@pytest.mark.parametrize("level", [None, "portable"])
def test_a_file_of_any_batch_gives_the_same_on_another_cpu(frozen, tmp_path, level):
    """The quantised weights are in it, and no others of these layers; its numbers are those of this process."""
    (batch,) = jax.export.symbolic_shape("b")
    frozen.save(tmp_path / "network", jax.ShapeDtypeStruct((batch, *X.shape[1:]), X.dtype))
    np.savez(tmp_path / "given.npz", x=X[:3], y=frozen(X[:3]))
    assert printed_by("-c", LOAD, tmp_path / "network", tmp_path / "given.npz", JAXFUSE_SIMD=level) == "loaded\n"


@pytest.mark.costly
def test_digits():
    """A network that has learned to read them reads them alike."""
    data = digits.load(16)
    trainer = training.Trainer(lambda f: f, data, 60)
    *_, variables = trainer.run(trainer.params)
    examples = [data.train_images[i : i + 32] for i in range(0, 128, 32)]
    made = jaxfuse.freeze(training.MODEL.apply, variables, policy="always", int8=examples)
    assert kinds(made, data.test_images).count("int8") == 11
    labels, wanted = (np.argmax(f(data.test_images), -1) for f in (made, lambda x: training.MODEL.apply(variables, x)))
    assert np.mean(labels == wanted) > 0.97 and np.mean(wanted == data.test_labels) > 0.9
