"""Weights that `jaxfuse.freeze` packs: filters, and those of dense layers as filters of one tap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from compare import same
from jaxfuse.tuning import tuned
from layers import Wide, variables_of

pytestmark = pytest.mark.usefixtures("some_kernel")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_filters_are_packed(dtype):
    """And transformed for Winograd, where that is chosen; what autodiff, vmap and a fuse around it need is unpacked."""
    model, x = Wide(), jax.random.normal(jax.random.key(2), (1, 16, 16, 32), dtype)
    variables = jax.tree.map(lambda a: a.astype(dtype), variables_of(model, x))
    made = jaxfuse.freeze(model.apply, variables, policy="always")
    near = dict(times=3) if dtype == jnp.float32 else dict(times=3, floor=0.01)
    same(made(x), model.apply(variables, x), **near)
    kinds = sorted(name.split()[0] for name in made._constants if name.startswith(("packed", "transformed")))
    assert kinds == (["packed", "transformed"] if dtype == jnp.float32 else ["packed"])
    before = made.nbytes
    same(jaxfuse.fuse(lambda x: made(x) + 1)(x), model.apply(variables, x) + 1, **near)
    wanted = jax.grad(lambda x: jnp.sum(model.apply(variables, x) ** 2))(x)
    for f in (made, jax.jit(made)):
        same(jax.grad(lambda x: jnp.sum(f(x) ** 2))(x), wanted, times=10, floor=0.02)
    same(jax.vmap(made, in_axes=1, out_axes=1)(x[:, None])[:, 0], model.apply(variables, x), **near)
    assert made.nbytes == before


DENSE = {  # the product, the shape of its weight
    "matrix": (lambda x, w: x @ w, (24, 40)),
    "transposed": (lambda x, w: x @ w.T, (40, 24)),
    "heads": (lambda x, w: jnp.einsum("btc,chd->bthd", x, w), (24, 4, 10)),
    "two axes contracted": (lambda x, w: jnp.einsum("bthd,hdc->btc", x.reshape(*x.shape[:2], 4, 6), w), (4, 6, 40)),
    "two axes contracted, behind the others": (lambda x, w: jnp.einsum("bthd,chd->btc", x.reshape(*x.shape[:2], 4, 6), w), (40, 4, 6)),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("product, shape", DENSE.values(), ids=DENSE)
def test_weights_of_dense_layers_are_packed(product, shape, dtype, tmp_path):
    """As filters of one tap; what autodiff, vmap and a fuse around it need is unpacked."""
    keys = jax.random.split(jax.random.key(3), 3)
    w, x = jax.random.normal(keys[0], shape, dtype) / 5, jax.random.normal(keys[1], (2, 7, 24), dtype)
    y = jax.eval_shape(product, x, w)
    b = jax.random.normal(keys[2], y.shape[2:], dtype)

    def layer(weights, x, residual):
        w, b = weights
        return jax.nn.relu(product(x, w) + b + residual)

    made, residual = jaxfuse.freeze(layer, (w, b), policy="always"), jnp.ones(y.shape, dtype)
    near = dict(times=3) if dtype == jnp.float32 else dict(times=3, floor=0.01)
    same(made(x, residual), layer((w, b), x, residual), **near)
    assert [name.split()[0] for name in made._constants if name.startswith("packed")] == ["packed"]
    wanted = jax.grad(lambda x: jnp.sum(layer((w, b), x, residual) ** 2))(x)
    same(jax.grad(lambda x: jnp.sum(made(x, residual) ** 2))(x), wanted, times=10, floor=0.02)
    same(jax.vmap(made)(x[:, None], residual[:, None])[:, 0], layer((w, b), x, residual), **near)
    assert all(a.dtype == jnp.uint8 or a.size < w.size for a in made._constants.values()), "the weight is there once, packed"
    (batch,) = jax.export.symbolic_shape("b")
    made.save(tmp_path / "layer", *[jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype) for a in (x, residual)])
    for some in (x, x[:1]):
        same(jaxfuse.load(tmp_path / "layer")(some, residual[: len(some)]), layer((w, b), some, residual[: len(some)]), **near)


@pytest.mark.parametrize("rows, dtype, is_packed", [
    (1, jnp.float32, True), (512, jnp.float32, True), (520, jnp.float32, "whole"), (600, jnp.bfloat16, True), (2, jnp.float16, False)])
@pytest.mark.parametrize("vectors", ["whole", "halved"])
def test_dense_layers_of_few_rows_are_packed(rows, dtype, is_packed, vectors, monkeypatch):
    """By the figures of AVX-512; in float32 more rows where the CPU takes its vectors at once."""
    monkeypatch.setattr(tuned, "computes_whole_vectors", lambda: vectors == "whole")
    w = jnp.ones((40, 24), dtype)
    made = jaxfuse.freeze(lambda w, x: x @ w + 1, w)
    same(made(jnp.ones((rows, 40), dtype)), jnp.full((rows, 24), 41, dtype))
    assert any(name.startswith("packed") for name in made._constants) == (is_packed in (True, vectors))
    by_heads = jaxfuse.freeze(lambda w, x: jnp.einsum("hbk,hkn->hbn", x, w), jnp.ones((2, 40, 24), dtype))
    assert not by_heads._packed and by_heads(jnp.ones((2, rows, 40), dtype)).shape == (2, rows, 24)


@pytest.mark.parametrize("size, padding, is_packed", [(1, 0, True), (1, 1, False), (2, 0, False)])
def test_convolutions_of_one_pixel_are_dense_layers(size, padding, is_packed):
    """Too small to gain, were they none: as squeeze-and-excitation has them."""
    def function(w, x):
        y = jax.lax.conv_general_dilated(x, w, (1, 1), [(padding, padding)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.sigmoid(y + 1)

    w, x = jnp.full((1, 1, 6, 24), 0.1), jnp.ones((2, size, size, 6))
    made = jaxfuse.freeze(function, w)
    same(made(x), function(w, x))
    assert any(name.startswith("packed") for name in made._constants) == is_packed


def test_packed_filters_in_a_file_for_any_batch(tmp_path):
    model, x = Wide(), jax.random.normal(jax.random.key(2), (3, 16, 16, 32))
    variables = variables_of(model, x)
    made = jaxfuse.freeze(model.apply, variables)
    (batch,) = jax.export.symbolic_shape("b")
    made.save(tmp_path / "network", jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype))
    assert made._packed
    for some in (x, x[:1]):
        same(jaxfuse.load(tmp_path / "network")(some), model.apply(variables, some), times=3)


def test_rows_of_any_axes_meet_one_packed_weight():
    keys = jax.random.split(jax.random.key(5), 2)
    w, x = jax.random.normal(keys[0], (24, 40)) / 5, jax.random.normal(keys[1], (2, 3, 1, 2, 1, 24))
    made = jaxfuse.freeze(lambda w, x: jax.nn.relu(x @ w), w, policy="always")
    for some in (x, x[0], x[0, 0], x[:, :, 0, 0, 0], x[:, 0, 0, 0, 0], x[0, 0, 0, 0, 0]):
        same(made(some), jax.nn.relu(some @ w), times=3)
    assert len([name for name in made._constants if name.startswith("packed")]) == 1


@pytest.mark.parametrize("side, channels, features", [(14, 64, 256), (7, 128, 512), (13, 40, 100)])
def test_panels_of_few_tiles(side, channels, features):
    """By Winograd's: threads take them as they come, line by line. The same bits each time, with any number of them."""
    keys = jax.random.split(jax.random.key(0), 2)
    w = jax.random.normal(keys[0], (3, 3, channels, features)) / (3 * channels**0.5)
    x, before = jax.random.normal(keys[1], (1, side, side, channels)), jaxfuse.get_num_threads()

    def conv(w, x):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    made = jaxfuse.freeze(conv, w, policy="always")
    wanted = made(x)
    same(wanted, conv(w, x), times=3)
    try:
        for threads in (1, 2, 3, 7, 16):
            jaxfuse.set_num_threads(threads)
            for _ in range(20):
                np.testing.assert_array_equal(made(x), wanted)
    finally:
        jaxfuse.set_num_threads(before)
    assert any(name.startswith("transformed") for name in made._constants)
