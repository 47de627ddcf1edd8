"""`jaxfuse.freeze`: what constants fix is computed once, normalisations become part of weights, and the numbers stay."""

import gc
import tomllib
import weakref

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx

import jaxfuse
import spellings
from compare import as_near_to_the_truth, same
from layers import Wide, conv, variables_of
from processes import ROOT, printed_by
from spellings.activations import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("some_kernel")
X = jax.random.normal(jax.random.key(0), (2, 12, 12, 3))


class Network(nn.Module):
    dtype: type = jnp.float32

    @nn.compact
    def __call__(self, x):
        for features in (8, 16):
            x = nn.Conv(features, (3, 3), use_bias=features == 16, dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=True, dtype=self.dtype)(x))
        return nn.Dense(5, dtype=self.dtype)(x.mean((1, 2)))


MODEL = Network()
VARIABLES = variables_of(MODEL, X)


@pytest.fixture(scope="module")
def frozen():
    return jaxfuse.freeze(MODEL.apply, VARIABLES, policy="always")


def test_normalisations_become_part_of_the_weights(frozen):
    same(frozen(X), MODEL.apply(VARIABLES, X), times=3)
    assert [line.split(" took in ")[1].split(" at ")[0] for line in frozen.folds(X)] == ["bias and scale", "bias and scale"]
    report = jaxfuse.explain(frozen, X, policy="always")
    assert [site.pattern for site in report.fused] == ["conv+bias+relu"] * 2 + ["global_average_pool", "dense+bias"]
    assert {site.kernel for site in report.fused} == {"native"}, "what has a packed weight goes by our own loops"
    text = str(jax.make_jaxpr(frozen)(X))
    assert "rsqrt" not in text, "what depends on the constants alone is computed once"


def test_nearer_to_float64_than_the_unfolded(frozen):
    with jax.enable_x64(True):
        exact = Network(jnp.float64).apply(jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), VARIABLES), jnp.asarray(X, jnp.float64))
    as_near_to_the_truth(frozen(X), MODEL.apply(VARIABLES, X), np.asarray(exact))


def test_bf16_is_rounded_once():
    model = Network(jnp.bfloat16)
    made = jaxfuse.freeze(model.apply, VARIABLES, policy="always")
    as_near_to_the_truth(made(X).astype(jnp.float32), model.apply(VARIABLES, X).astype(jnp.float32), MODEL.apply(VARIABLES, X),
                         narrowest="bfloat16")
    kept = {str(array.dtype) for array in made._constants.values() if array.ndim == 4}
    assert kept | {filter_.config.dtype for filter_ in made._packed.values()} == {"bfloat16"}


SCALE = jnp.array([[0.01, 0.02, -0.03, 3]])


@pytest.mark.parametrize("dtype, out, scaled", [
    ("int8", "int32", lambda y: y * 100 + 1), ("int8", "int32", lambda y: y // 7), ("int32", "int32", lambda y: jax.lax.div(y, 7)),
    ("int8", "int32", lambda y: y.astype("float32") * SCALE + 1), ("int8", "float32", lambda y: y * SCALE + 1),
    ("float8_e4m3fn", "float32", lambda y: y * SCALE * 1e-3), ("complex64", "complex64", lambda y: y * (2 + 1j * SCALE) + 1j),
])
def test_a_type_that_cannot_hold_scaled_weights_is_left_alone(dtype, out, scaled):
    """Integers, floats of 8 bits, complex numbers: as quantised networks and spectral layers have them."""
    x, w = (jnp.asarray(np.random.default_rng(seed).integers(-90, 90, shape), dtype) for seed, shape in enumerate([(3, 8), (8, 4)]))
    fn = lambda w, x: scaled(jax.lax.dot(x, w, preferred_element_type=out))
    made = jaxfuse.freeze(fn, w, policy="always")
    assert made.folds(x) == []
    np.testing.assert_allclose(made(x), jax.jit(fn)(w, x), rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-6, 1e4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_any_scale(dtype, scale):
    """Half precision ends at 6e-5 and 65504: there the scale stays apart."""
    x, w = (jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype) for seed, shape in enumerate([(3, 8), (8, 4)]))
    fn = lambda w, x: (x @ w).astype(jnp.float32) * (scale * SCALE) + scale
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64) * (scale * np.asarray(SCALE, np.float64)) + scale
    as_near_to_the_truth(jaxfuse.freeze(fn, w, policy="always")(x), jax.jit(fn)(w, x), exact, narrowest=dtype)


@pytest.mark.parametrize("name, transformed", [
    ("jit", jax.jit), ("vmap", lambda f: jax.vmap(lambda x: f(x[None])[0])),
    ("gradient", lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 2))),
    ("jvp", lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))),
])
def test_it_is_a_function_like_any_other(frozen, name, transformed):
    same(transformed(frozen)(X), transformed(lambda x: MODEL.apply(VARIABLES, x))(X), times=10, floor=0.01)


def test_any_batch_shares_the_constants(frozen):
    frozen(X)
    before = frozen.nbytes
    for batch in (1, 5, 0):
        x = jnp.resize(X, (batch, *X.shape[1:]))
        same(frozen(x), MODEL.apply(VARIABLES, x), times=3)
    assert frozen.nbytes == before


def haiku_network():
    def network(x, is_training=False):
        for _ in range(2):
            x = hk.Conv2D(8, 3, with_bias=False)(x)
            x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
        return hk.Linear(5)(x.mean((1, 2)))

    apply = hk.without_apply_rng(hk.transform_with_state(network))
    params, state = apply.init(jax.random.key(0), X, True)
    return apply.apply, (params, state)


def keras_network():
    layers = [keras.layers.Conv2D(8, 3, use_bias=False), keras.layers.BatchNormalization(), keras.layers.ReLU(),
              keras.layers.Conv2D(8, 3), keras.layers.BatchNormalization(), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(5)]
    model = keras.Sequential(layers)
    model.build(X.shape)
    return model.stateless_call, ([v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables])


@pytest.mark.parametrize("network", [haiku_network, keras_network])
def test_parameters_and_state_of_other_frameworks(network):
    """Both are bound; the state that comes back is constant too."""
    apply, (params, state) = network()
    rng = np.random.default_rng(1)
    params, state = jax.tree.map(lambda a: jnp.asarray(rng.uniform(0.5, 1.5, a.shape), a.dtype), (params, state))
    made = jaxfuse.freeze(apply, params, state, argnums=(0, 1), policy="always")
    same(made(X), apply(params, state, X), times=3)
    assert len(made.folds(X)) == 2


def test_weights_that_were_folded_are_let_go():
    model, x = Wide(), jnp.ones((1, 4, 4, 32))
    variables = variables_of(model, x)
    expected = model.apply(variables, x)
    kernel = weakref.ref(variables["params"]["Conv_0"]["kernel"])
    made = jaxfuse.freeze(model.apply, variables)
    same(made(x), expected, times=3)
    del variables
    gc.collect()
    assert kernel() is None
    same(made(jnp.ones((2, 4, 4, 32)))[:1], expected, times=3)


def test_what_needs_a_weight_that_is_gone_says_so():
    w = jnp.ones((200, 200))

    def apply(w, x):
        return x @ (w * 1.0).T if x.shape[0] == 3 else (x @ w) * jnp.arange(200.0)

    made = jaxfuse.freeze(apply, w)
    made(jnp.ones((2, 200)))
    with pytest.raises(ValueError, match="folded into a layer, and these arguments need it in another way"):
        made(jnp.ones((3, 200)))


def test_a_broadcast_of_constants_is_no_constant():
    made = jaxfuse.freeze(lambda b, x: x + jnp.broadcast_to(b, x.shape), jnp.arange(1000.0))
    same(made(jnp.ones((1000, 1000))), jnp.ones((1000, 1000)) + jnp.arange(1000.0))
    assert made.nbytes == 4000


def test_numbers_flags_and_keywords():
    def apply(p, x, scale, *, train=False):
        return x @ p * scale if train else x @ p + scale

    made, p, x = jaxfuse.freeze(apply, jnp.ones((3, 3))), jnp.ones((3, 3)), jnp.ones((2, 3))
    for scale in (0.5, 2.5):
        same(made(x, scale), apply(p, x, scale))
        same(made(x, scale, train=True), apply(p, x, scale, train=True))
    assert len(made._made) == 2  # a number is traced, a flag is not


HITS = {name: hit for name, hit in spellings.rows("HITS").items() if len(hit.args) > 1 and "with itself" not in name}


@pytest.mark.parametrize("name", HITS)
def test_patterns_are_found_as_by_fuse(name):
    """With all arguments but the first constant. A scale, a bias and a batch norm may have become part of the weight."""
    hit = HITS[name]
    frozen = jaxfuse.freeze(lambda *args: hit.function(*args), *hit.args[1:], argnums=range(1, len(hit.args)), policy="always")
    found = [set(site.pattern.split("+")) for site in jaxfuse.explain(frozen, hit.args[0], policy="always").fused]
    wanted = [set(pattern.split("+")) - {"scale", "bias", "bn"} for pattern in hit.fused]
    assert len(found) == len(wanted) and all(any(parts >= others for parts in found) for others in wanted)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_found_as_by_fuse(name):
    x, w = jax.random.normal(jax.random.key(0), (1, 6, 6, 4)), jax.random.normal(jax.random.key(1), (3, 3, 4, 8))
    for activation in ACTIVATIONS[name]:
        frozen = jaxfuse.freeze(lambda w, x: activation(conv(x, w)), w, policy="always")
        fused = jaxfuse.explain(lambda w, x: activation(conv(x, w)), w, x, policy="always")
        assert [s.pattern for s in jaxfuse.explain(frozen, x, policy="always").fused] == [s.pattern for s in fused.fused]
        same(frozen(x), activation(conv(x, w)), times=3)


def test_other_positions():
    made = jaxfuse.freeze(lambda x, a, y, b: x * a + y * b, 2.0, jnp.float32(3), argnums=(1, 3))
    assert made(jnp.float32(5), jnp.float32(7)) == 31


class NnxNetwork(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.norm, self.drop = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.drop(self.conv(x))))


def nnx_network():
    model = NnxNetwork(nnx.Rngs(0))
    model.norm.mean[...] = jnp.arange(8.0)
    model.eval()
    return model


def equinox_network():
    model = eqx.nn.Sequential([eqx.nn.Conv2d(3, 8, 3, key=jax.random.key(2)), eqx.nn.Lambda(jax.nn.relu)])
    return eqx.nn.inference_mode(model)


def closure():
    w = jax.random.normal(jax.random.key(3), (3, 3, 3, 8))
    gamma = jnp.arange(1.0, 9.0)

    def apply(x):
        return conv(x, w) * gamma

    return apply


@pytest.mark.parametrize("made, x, folds", [
    (nnx_network, X, 1), (equinox_network, jnp.moveaxis(X[0], -1, 0), 0), (closure, X, 1)], ids=["nnx", "equinox", "closure"])
def test_modules_and_closures_bind_their_own_arrays(made, x, folds):
    model = made()
    frozen = jaxfuse.freeze(model, policy="always")
    same(frozen(x), model(x), times=3)
    assert len(frozen.folds(x)) == folds


@pytest.mark.parametrize("broken, words", [
    (lambda: jaxfuse.freeze(MODEL.apply, VARIABLES, policy="sometimes"), "unknown policy"),
    (lambda: jaxfuse.freeze(MODEL.apply, VARIABLES, argnums=(0, 1)), "expected 1 positions"),
    (lambda: jaxfuse.freeze(MODEL.apply, VARIABLES, 2, argnums=(1, 0)), "ascending order"),
])
def test_what_does_not_fit_is_an_error(broken, words):
    with pytest.raises(ValueError, match=words):
        broken()


def test_infinities_and_nans_of_weights_stay():
    w = jnp.ones((4, 3)).at[0, 0].set(jnp.nan).at[0, 1].set(jnp.inf)

    def apply(w, x):
        return (x @ w) * jnp.asarray([2.0, 3.0, 4.0]) + 1

    x = jnp.ones((2, 4))
    np.testing.assert_array_equal(jaxfuse.freeze(apply, w)(x), apply(w, x))


# --- files


@pytest.fixture(scope="module")
def artefact(frozen, tmp_path_factory):
    path = tmp_path_factory.mktemp("frozen") / "network.jaxfuse"
    (batch,) = jax.export.symbolic_shape("b")
    frozen.save(path, jax.ShapeDtypeStruct((batch, *X.shape[1:]), X.dtype))
    return path


LOAD = """
import sys, numpy as np, jaxfuse
loaded = jaxfuse.load(sys.argv[1])
for x, y in (np.load(file).values() for file in sys.argv[2:]):
    assert np.abs(loaded(x) - y).max() <= 1e-4 * np.abs(y).max()
print("loaded")
"""


def test_a_file_is_loaded_where_the_model_is_not(artefact, tmp_path):
    for batch in (1, 3):
        x = np.resize(X, (batch, *X.shape[1:]))
        np.savez(tmp_path / f"{batch}.npz", x=x, y=MODEL.apply(VARIABLES, x))
    assert printed_by("-c", LOAD, artefact, *tmp_path.glob("*.npz")) == "loaded\n"


@pytest.mark.parametrize("spoil, words", [
    (lambda data: b"PK" + data[2:], "is no frozen function"),
    (lambda data: data[:10], "truncated or altered"),
    (lambda data: data[: len(data) // 2], "truncated or altered"),
    (lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:], "truncated or altered"),
    (lambda data: data.replace(b'"format": 2', b'"format": 9'), "of format 9, and this version of jaxfuse reads 2"),
    (lambda data: data.replace(b'"format": 2', b'"format": 1'), "save it again"),
    (lambda data: b"", "is no frozen function"),
])
def test_a_file_that_is_spoiled(artefact, tmp_path, spoil, words):
    (tmp_path / "spoiled").write_bytes(spoil(artefact.read_bytes()))
    with pytest.raises(jaxfuse.ArtefactError, match=words):
        jaxfuse.load(tmp_path / "spoiled")


def test_a_call_of_another_size_says_how_to_save_for_any(frozen, tmp_path):
    frozen.save(tmp_path / "one.jaxfuse", X[:1])
    with pytest.raises(ValueError, match="Shape mismatch") as caught:
        jaxfuse.load(tmp_path / "one.jaxfuse")(X[:2])
    assert "was saved for float32[1, " in caught.value.__notes__[-1] and "symbolic_shape" in caught.value.__notes__[-1]


def test_a_function_that_was_given_no_variables_says_what_is_bound():
    with pytest.raises(TypeError) as caught:
        jaxfuse.freeze(lambda variables, x: x @ variables)(X)
    assert caught.value.__notes__[-1] == "jaxfuse: nothing is bound; freeze(fn, variables) binds the first argument"


def test_what_a_file_needs_is_installed_with_the_package():
    """Where only the tests brought it, `save` failed for users."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "flatbuffers" in pyproject["project"]["dependencies"]
