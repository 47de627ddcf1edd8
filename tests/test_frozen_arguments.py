"""`jaxfuse.freeze`: what a frozen function depends on beside its arrays, whose arrays it keeps, and what its file says of them."""

import copy
import enum
import pickle
import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from jaxfuse.frozen import constants
from jaxfuse.runtime import dispatch

X = jnp.arange(4.0) - 1
BATCH = jnp.linspace(-2, 2, 16).reshape(2, 8)


def test_the_size_of_a_named_axis():
    frozen = jaxfuse.freeze(lambda w, x: x * w / jax.lax.psum(1, "i"), jnp.ones(()))
    for size in (4, 8):
        np.testing.assert_allclose(jax.vmap(frozen, axis_name="i")(jnp.ones(size)), np.full(size, 1 / size), rtol=1e-6)


def test_a_setting_of_jax_between_two_calls():
    frozen = jaxfuse.freeze(lambda w, x: x * w, jnp.ones(4))
    frozen(X)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(frozen(X), X)


def test_arrays_that_their_owner_writes_to():
    bound, closed_over = np.ones(4, np.float32), np.ones(4, np.float32)
    for frozen, array in ((jaxfuse.freeze(lambda w, x: x * w, bound), bound), (jaxfuse.freeze(lambda x: x * closed_over), closed_over)):
        frozen(X)
        array[:] = 5
        np.testing.assert_array_equal(frozen(X), X)


def test_a_bound_argument_behind_one_that_is_left_out():
    function = lambda a, b=None, w=None: a + (0 if b is None else 100 * b) + (0 if w is None else w)
    frozen = jaxfuse.freeze(function, jnp.ones(()), argnums=2)
    np.testing.assert_array_equal(frozen(X, X), function(X, X, 1))
    with pytest.raises(TypeError, match="give those before it by position"):
        frozen(X)


def test_flags_and_strings_of_a_saved_function(tmp_path):
    def function(w, x, train, y, mode="sum"):
        z = x * w * (2 if train else 1)
        return z + y if mode == "sum" else z - y

    frozen = jaxfuse.freeze(function, jnp.ones(4))
    frozen.save(tmp_path / "f", X, True, 10 * X, mode="difference")
    loaded = jaxfuse.load(tmp_path / "f")
    np.testing.assert_array_equal(loaded(X, True, 10 * X, mode="difference"), -8 * X)
    for arguments, options in (((X, False, 10 * X), dict(mode="difference")), ((X, True, 10 * X), dict(mode="sum"))):
        with pytest.raises(jaxfuse.ArtefactError, match="saved for .*True.*, and is called with"):
            loaded(*arguments, **options)


def test_a_layer_of_another_flag_has_no_range_of_this_one():
    def function(w, x, large):
        return jax.nn.relu((100 * x if large else x) @ w)

    frozen = jaxfuse.freeze(function, jnp.eye(8), policy="always", int8=[(BATCH, False), (BATCH, None)])
    np.testing.assert_allclose(frozen(BATCH, True), jax.nn.relu(100 * BATCH), rtol=1e-5)
    assert [site.reason for site in frozen.int8_sites(BATCH, True)] in (["no example came through it"], [])


def test_an_array_of_the_batchs_size(tmp_path):
    frozen = jaxfuse.freeze(lambda w, x: jnp.concatenate([jnp.zeros((x.shape[0], 2)), x @ w], 1), jnp.eye(8))
    (batch,) = jax.export.symbolic_shape("n")
    frozen.save(tmp_path / "f", jax.ShapeDtypeStruct((batch, 8), jnp.float32))
    np.testing.assert_allclose(jaxfuse.load(tmp_path / "f")(BATCH)[:, 2:], BATCH, rtol=1e-6)


def test_a_value_that_overflows_between_two_scales():
    function = lambda w, a, b, x: ((x @ w) * a).astype(jnp.float16).astype(jnp.float32) * b
    bound = jnp.eye(8), jnp.full(8, 1e5), jnp.full(8, 1e-5)
    frozen = jaxfuse.freeze(function, *bound, argnums=(0, 1, 2), policy="always")
    np.testing.assert_array_equal(jnp.isfinite(frozen(BATCH)), jnp.isfinite(jax.jit(function)(*bound, BATCH)))


def test_a_key_among_the_constants(tmp_path):
    frozen = jaxfuse.freeze(lambda key, x: x + jax.random.normal(key, (300, 300)).sum(), jax.random.key(0))
    frozen.save(tmp_path / "f", X)
    np.testing.assert_allclose(jaxfuse.load(tmp_path / "f")(X), frozen(X), rtol=1e-6)


def test_what_a_nested_jit_closes_over_is_kept_once_for_all_batches():
    table, key = np.ones((4, 4), np.float32), jax.random.key(0)
    nested = jax.jit(lambda x: x @ jnp.tanh(jnp.asarray(table)) + jax.random.normal(key, (4,)))
    frozen = jaxfuse.freeze(lambda w, x: nested(x * w), jnp.ones(4))
    kept = []
    for x in (X[None], jnp.stack([X, X])):
        np.testing.assert_allclose(frozen(x), nested(x), rtol=1e-6)
        kept.append(frozen.nbytes)
    assert kept[0] == kept[1]


def test_every_bit_of_a_files_header_counts(tmp_path):
    """Of one that still reads as a header too."""
    frozen = jaxfuse.freeze(lambda w, b, x: x @ w + b, jnp.arange(16.0).reshape(4, 4), jnp.ones(4), argnums=(0, 1), policy="never")
    frozen.save(tmp_path / "f", X)
    data = (tmp_path / "f").read_bytes()
    digits = [i for i in range(16, data.index(b"sha256")) if data[i : i + 1].isdigit()]
    assert len(digits) > 10
    for i in digits:
        (tmp_path / "altered").write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        with pytest.raises(jaxfuse.ArtefactError):
            jaxfuse.load(tmp_path / "altered")
    (tmp_path / "altered").write_bytes(data[:8] + (100000).to_bytes(8, "little") + 100000 * b"[")
    with pytest.raises(jaxfuse.ArtefactError, match="truncated or altered"):
        jaxfuse.load(tmp_path / "altered")


W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
LARGE = jnp.asarray(np.random.default_rng(1).normal(size=(256, 256)), jnp.float32)  # what is smaller is kept anyway


def test_programs_within_programs_close_over_arrays():
    """Of one text, and told apart by the arrays alone."""
    tables = [np.linspace(1, i, 8).astype(np.float32) for i in (2, 3)]

    def function(w, x, which):
        part = jax.checkpoint(jax.jit(lambda w, table=tables[which == "second"]: jnp.sin(w) * table))
        return x @ part(w), jax.lax.map(lambda row: row @ jax.jit(lambda w: w * tables[which == "second"])(w), x)

    frozen = jaxfuse.freeze(function, W)
    for which in ("first", "second"):
        for made, known in zip(frozen(BATCH, which), function(W, BATCH, which)):
            np.testing.assert_allclose(made, known, rtol=1e-5, atol=1e-6)


def test_what_nested_functions_close_over_is_kept():
    array = np.ones(8, np.float32)
    inner = jax.jit(lambda x: x * array)
    frozen = jaxfuse.freeze(lambda w, x: inner(x @ w), W)
    kept = frozen(BATCH)
    array[:] = 5
    np.testing.assert_array_equal(frozen(BATCH), kept)
    np.testing.assert_allclose(frozen(BATCH[:1]), kept[:1], rtol=1e-6)


def test_weights_that_a_nested_function_donates_stay():
    half = jax.jit(lambda w: w * 0.5, donate_argnums=0)
    placed = jax.jit(lambda w: w * 0.5, donate_argnums=0, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for nested in (half, placed):
        w = W + 0
        np.testing.assert_allclose(jaxfuse.freeze(lambda w, x: x @ nested(w), w)(BATCH), BATCH @ W / 2, rtol=1e-5, atol=1e-5)
        assert not w.is_deleted()


def test_the_arguments_that_are_left_have_their_names():
    frozen = jaxfuse.freeze(lambda w, a, b: a * w + b, jnp.ones(4))
    a, b = X + 1, X + 2
    jax.jit(frozen, donate_argnames="a")(a, b)
    assert a.is_deleted() and not b.is_deleted()
    doubled = jaxfuse.freeze(lambda w, x, twice: 2 * x if twice else x, X)
    np.testing.assert_array_equal(jax.jit(doubled, static_argnames="twice")(X, True), 2 * X)


@pytest.mark.parametrize("policy", ["never", "always"])
def test_the_first_call_is_traced(policy):
    """What its owner may write to is copied then, and scales become part of weights."""
    scale, w = np.linspace(1, 2, 8).astype(np.float32), np.asarray(W)
    frozen = [lambda: jaxfuse.freeze(lambda w, x: jnp.sin(x @ w * scale), w, policy=policy),
              lambda: jaxfuse.freeze(lambda x: jnp.sin(x @ w * scale), policy=policy)]
    for make in frozen:
        for transformed in (jax.jit, jax.vmap, lambda f: lambda x: jax.grad(lambda x: f(x).sum())(x) * 0 + f(x)):
            function = make()
            np.testing.assert_allclose(transformed(function)(BATCH), np.sin(BATCH @ W * scale), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(function(BATCH), np.sin(BATCH @ W * scale), rtol=1e-5, atol=1e-5)
        jax.eval_shape(make(), BATCH)
        np.testing.assert_allclose(jax.jit(lambda x: make()(x))(BATCH), np.sin(BATCH @ W * scale), rtol=1e-5, atol=1e-5)


def test_a_weight_that_the_first_call_does_not_read():
    frozen = jaxfuse.freeze(lambda params, x, head: x @ params[head], {"a": LARGE, "b": 2 * LARGE})
    x = jnp.ones((1, 256))
    np.testing.assert_allclose(2 * frozen(x, "a"), frozen(x, "b"), rtol=1e-6)


def test_a_narrow_weight_does_not_take_in_the_scale_of_wide_outputs():
    w, x, scale = W.astype(jnp.bfloat16), BATCH, jnp.linspace(0.5, 2, 8)
    frozen = jaxfuse.freeze(lambda w, x: (x @ w) * scale, w)
    assert not frozen.folds(x)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64) * np.asarray(scale, np.float64)
    np.testing.assert_allclose(frozen(x), exact, rtol=1e-5, atol=1e-5)


def test_each_call_draws_anew():
    frozen = jaxfuse.freeze(lambda w, x: x * w + jax.lax.rng_uniform(0.0, 1.0, (4,)), jnp.ones(4))
    assert (frozen(X) != frozen(X)).all()


def test_weights_whose_program_makes_nan_and_leaves_it():
    with jax.debug_nans(True):
        made = jaxfuse.freeze(lambda w, x: x @ jnp.where(w > 0, jnp.sqrt(w), 0), W)(BATCH)
    np.testing.assert_allclose(made, BATCH @ np.sqrt(np.maximum(W, 0)), rtol=1e-5, atol=1e-5)


def test_weights_without_values():
    def function(w, x):
        return jaxfuse.freeze(lambda w, x: x @ w, w)(x).sum()

    for transformed, w in ((jax.jit, W), (jax.grad, W), (lambda f: jax.vmap(f, (0, None)), jnp.stack([W, W]))):
        with pytest.raises(ValueError, match="weights are being traced"):
            transformed(function)(w, BATCH)


class Mode(enum.Enum):
    double = 2
    single = 1


def halved(x):
    return x / 2


def test_flags_of_a_saved_function_are_told_apart(tmp_path):
    class Opaque:
        def __repr__(self):
            return "Opaque()"

    frozen = jaxfuse.freeze(lambda w, x, mode, last: last(x * w * getattr(mode, "value", 1)), jnp.ones(4))
    frozen.save(tmp_path / "f", X, Mode.double, halved)
    loaded = jaxfuse.load(tmp_path / "f")
    np.testing.assert_array_equal(loaded(X, Mode.double, halved), X)
    with pytest.raises(ValueError, match=r"was saved for .*Mode\.double.*, and is called with .*Mode\.single"):
        loaded(X, Mode.single, halved)
    for flag in (Opaque(), lambda x: x):
        with pytest.raises(ValueError, match="no file can tell from another: bind it before"):
            frozen.save(tmp_path / "f", X, flag, halved)


def test_what_freeze_is_given_in_error():
    with pytest.raises(TypeError, match="fn is of type dict"):
        jaxfuse.freeze({"w": X})
    with pytest.raises(ValueError, match="argnums is 1, and nothing is bound"):
        jaxfuse.freeze(lambda x, w: x * w, argnums=1)
    with pytest.raises(ValueError, match="Non-hashable static") as raised:
        jaxfuse.freeze(jax.jit(lambda w, x, n: x * w * n, static_argnames="n"), X)(X, n=2)
    assert any("functools.partial(fn, name=number)" in note for note in raised.value.__notes__)
    np.testing.assert_array_equal(jaxfuse.freeze(lambda x, w: x - w, X, argnums=np.int64(1))(X), X - X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jaxfuse.freeze(lambda w, x: x @ w, W)(np.ones((2, 8))).dtype == jnp.float32


GIVEN = {"numpy": np.asarray, "jax": jnp.asarray, "on a device": lambda x: jax.device_put(x, jax.devices()[0])}


@pytest.mark.parametrize("of", GIVEN.values(), ids=GIVEN)
def test_arrays_that_are_given_again(of):
    """A call that is found without types is that of these types, shapes and settings alone."""
    frozen = jaxfuse.freeze(lambda w, x: x * w + (1 if x.dtype == jnp.float32 else 2), jnp.full((), 3.0))
    for _ in range(2):
        for x in (X, X[:2], X.astype(jnp.int16), X.astype(jnp.bfloat16)):
            given, expected = of(x), np.asarray(3 * x + (1 if x.dtype == jnp.float32 else 2))
            np.testing.assert_array_equal(frozen(given), expected)
            np.testing.assert_array_equal(frozen(x=given), expected)
        with jax.enable_x64(True):
            assert frozen(np.asarray(X, np.float64)).dtype == np.float64
        assert frozen(np.asarray(X, np.float64)).dtype == np.float32


def test_which_constants_are_written_into_the_program(monkeypatch):
    sizes = (7, 1000, 300, 50, 400)
    made = [jnp.ones(n) for n in sizes] + [jax.device_put(jnp.ones(9), jax.devices()[0]), jax.random.key(0)]
    monkeypatch.setattr(constants, "LARGE", 4 * 400)
    for most, written in ((1 << 20, [7, 50, 300, 400]), (4 * 357, [7, 50, 300]), (4 * 356, [7, 50]), (0, [])):
        monkeypatch.setattr(constants, "WRITTEN", most)
        assert [made[i].size for i in constants._written(made)] == written
        run = constants.bind(lambda values, x: x + sum(v.sum() for v in values[:-1]) + jax.random.key_data(values[-1]).sum(), made)
        assert run(X).tolist() == (X + sum(sizes) + 9).tolist()
    assert constants._written([]) == []


@pytest.mark.usefixtures("some_kernel")
def test_a_loaded_function_runs_on_the_thread_that_calls_it(tmp_path, monkeypatch):
    """As the frozen one: XLA sees no operations of its custom calls, and it is not asked to."""
    monkeypatch.setattr(dispatch, "WORTH_A_THREAD", 1)
    w = 0.1 * jax.random.normal(jax.random.key(0), (64, 64))
    frozen = jaxfuse.freeze(lambda w, x: jax.nn.relu(x @ w), w, policy="always")
    frozen.save(tmp_path / "f.jaxfuse", jnp.ones((8, 64)))
    loaded = jaxfuse.load(tmp_path / "f.jaxfuse")
    counted = [jax.jit(f).lower(jnp.ones((8, 64))).compile().cost_analysis().get("flops", 0) for f in (loaded, jaxfuse.fuse(frozen))]
    assert counted[0] < 1000 < counted[1], counted


@pytest.mark.parametrize("function", [
    lambda w, x: (x @ w).mean((1, 2)),
    lambda w, x: (x @ w)[:, -1] / x.shape[1],
    lambda w, x: jnp.where(jnp.arange(x.shape[1])[:, None, None] < x.shape[1] // 2, x @ w, 0),
    lambda w, x: x @ (w * x.shape[0]),
    lambda w, x: jax.image.resize(x, (*x.shape[:1], 8, 8, 3), "bilinear") @ w,
], ids=["a mean", "the last", "a mask", "a weight", "a new size"])
def test_a_size_that_is_not_known_as_a_number(function, tmp_path):
    """It is no constant, though it is computed from nothing."""
    w = jax.random.normal(jax.random.key(0), (3, 5))
    frozen = jaxfuse.freeze(function, w)
    b, h = jax.export.symbolic_shape("b, h")
    frozen.save(tmp_path / "f.jaxfuse", jax.ShapeDtypeStruct((b, h, h, 3), jnp.float32))
    for shape in ((2, 4, 4, 3), (1, 7, 7, 3)):
        x = jax.random.normal(jax.random.key(1), shape)
        np.testing.assert_allclose(jaxfuse.load(tmp_path / "f.jaxfuse")(x), function(w, x), rtol=1e-5, atol=1e-5)


def test_numpys_arrays_share_the_program_of_jaxs():
    frozen = jaxfuse.freeze(lambda w, x: x * w, jnp.ones(4))
    for x in (X, np.asarray(X), np.asarray(X, np.float64)):
        np.testing.assert_array_equal(frozen(x), X)
        np.testing.assert_array_equal(frozen(x=x), X)
    assert "2 programs" in repr(frozen)


@pytest.mark.usefixtures("some_kernel")
@pytest.mark.parametrize("int8", [False, True])
def test_where_nothing_is_moved_unasked(int8, tmp_path):
    """The arguments are on the device, and so is what freeze computes."""
    w, x, scale = jnp.ones((3, 3, 32, 32)), jnp.ones((1, 16, 16, 32)), jnp.full(32, 2.0)
    conv = lambda p, x: jax.lax.conv_general_dilated(x, p[0], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) * p[1]
    jaxfuse.freeze(conv, (w, scale), policy="always")(x)  # so that nothing is compiled below that has constants
    with jax.transfer_guard("disallow"):
        frozen = jaxfuse.freeze(conv, (w, scale), policy="always", int8=[x] if int8 else None)
        y = frozen(x)
        frozen.save(tmp_path / "f.jaxfuse", x)
        assert (jaxfuse.load(tmp_path / "f.jaxfuse")(x) == y).all()


def test_copies_and_pickles():
    frozen = jaxfuse.freeze(lambda w, x: x * w, jnp.ones(4))
    for _ in range(2):
        assert copy.copy(frozen) is copy.deepcopy([frozen])[0] is frozen
        with pytest.raises(TypeError, match="freeze of <lambda>.* cannot be pickled; .*frozen.save"):
            pickle.dumps(frozen)
        frozen(X)


def test_a_file_of_64_bits(tmp_path):
    with jax.enable_x64(True):
        jaxfuse.freeze(lambda w, x: x * w, jnp.ones(4, jnp.float64)).save(tmp_path / "f.jaxfuse", X)
        assert jaxfuse.load(tmp_path / "f.jaxfuse")(X).dtype == jnp.float64
    with pytest.raises(ValueError, match=r"f.jaxfuse has constants of float64, .*jax.enable_x64\(True\)"):
        jaxfuse.load(tmp_path / "f.jaxfuse")
