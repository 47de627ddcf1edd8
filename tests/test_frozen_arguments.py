"""`jaxfuse.freeze`: what a frozen function depends on beside its arrays, whose arrays it keeps, and what its file says of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse

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
