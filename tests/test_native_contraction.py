"""Convolutions by the contraction of our own, whatever was measured: every geometry, with every instruction set's loops."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_oracle import (
    BF16, CASES, F32, Case, backward, check_backward, check_forward, forward, multiplies_padding, random, random_filter)

import jaxfuse
from jaxfuse.ops import conv
from jaxfuse.ops.conv import packed
from jaxfuse.ops.conv.config import ConvConfig
from jaxfuse.runtime import ffi
from processes import printed_at

pytestmark = pytest.mark.skipif(ffi.native() is None, reason="the native module is not built")

MORE = {  # tiles that are not full, in rows, in columns, in steps of a pair; more than one block of rows; filters as panels
    "one pixel": Case((1, 1, 1, 70), (1, 1, 70, 33)),
    "odd everything": Case((3, 11, 13, 37), (3, 5, 37, 45), strides=2, padding=[(2, 0), (1, 3)]),
    "many rows": Case((2, 40, 41, 9), (2, 2, 9, 20), padding=(1, 0)),
    "long": Case((1, 3, 3, 700), (3, 3, 700, 17), padding=(1, 1)),
    "padding only": Case((1, 2, 2, 5), (3, 3, 5, 8), strides=3, padding=(4, 4)),
    "holes": Case((1, 15, 14, 6), (3, 3, 6, 40), strides=2, padding=(3, 2), dilation=3),
    "grouped, strided": Case((2, 9, 8, 24), (3, 3, 8, 60), strides=2, padding=(1, 1), groups=3),
    "volume": Case((2, 4, 5, 6, 7), (2, 3, 2, 7, 19), strides=(1, 2, 2), padding=(1, 1)),
    "line": Case((3, 31, 16), (5, 16, 24), strides=3, padding=(2, 1)),
    "whole lines of the cache": Case((3, 9, 7, 64), (3, 3, 64, 40), padding=(1, 1)),
    "padded more on one side": Case((2, 8, 11, 32), (2, 3, 32, 70), padding=[(0, 1), (2, 0)]),
    "holes, as large": Case((2, 12, 10, 64), (3, 3, 64, 33), padding=(2, 2), dilation=2),
    "line as long": Case((3, 31, 32), (5, 32, 24), padding=(2, 2)),
    "rows longer than a task's": Case((2, 7, 9, 9000), (1, 1, 9000, 72)),
    "parts of rows": Case((2, 5, 7, 544), (1, 1, 544, 20)),
    "parts of taps": Case((1, 5, 7, 544), (1, 3, 544, 20), padding=[(0, 0), (1, 1)]),
    "fewer rows than a register": Case((1, 3, 5, 34), (1, 1, 34, 18)),
    "few channels, features first": Case((2, 12, 12, 3), (32, 7, 7, 3), strides=2, padding=(3, 3), layout=("NHWC", "OHWI", "NHWC")),
}
TRANSPOSED = [((2, 7, 6, 16), (4, 4, 16, 24), (2, 2)), ((1, 9, 5, 7), (3, 3, 7, 40), (3, 2)), ((2, 8, 12), (5, 12, 17), (3,))]


def check_transposed(x_shape, w_shape, strides, dtype):
    x, w = random(x_shape, dtype), random(w_shape, dtype, 1)
    n = len(strides)
    places = "DHW"[3 - n :]
    names = (f"N{places}C", f"{places}IO", f"N{places}C")
    padding = [(k - 1, k - 1) for k in w_shape[:n]]
    y = jax.jit(lambda x, w: conv(x, w, lhs_dilation=strides, padding=padding, dimension_numbers=names))(x, w)
    with jax.enable_x64(True):
        want = jax.lax.conv_general_dilated(
            jnp.asarray(np.float64(x)), jnp.asarray(np.float64(w)), (1,) * n, padding, strides, dimension_numbers=names)
        error = np.max(np.abs(np.float64(y) - np.float64(want))) / np.max(np.abs(np.float64(want)))
    assert error < (1e-6 if dtype == F32 else 8e-3), (x_shape, error)


def config_of(case):
    return ConvConfig(case.strides, tuple(case.padding), case.dilation, case.groups, *case.specs, (1,) * len(case.strides))


def check_packed(case, dtype):
    """By a packed filter, and by one that is transformed too, as by the filter itself; with infinities in x too."""
    config = config_of(case)
    x, w = random(case.x, dtype), random_filter(case, dtype)
    if packed.refuse(config, x, w):
        return
    for winograd in {False, packed.fits_winograd(config, x, w)}:
        made = packed.config_of(config, x, w, winograd)
        filters = packed.pack(made, w)
        np.testing.assert_array_equal(packed.unpack(made, filters[0]), w)
        for given in (x, x.at[0, -1].set(jnp.inf)):  # both sides err
            y, wanted = np.float64(jax.jit(functools.partial(packed.OP, made))(given, *filters)[0]), np.float64(forward(case, given, w))
            np.testing.assert_array_equal(np.isfinite(y), np.isfinite(wanted))
            scale = np.max(np.abs(wanted), where=np.isfinite(wanted), initial=1e-30)
            assert np.max(np.abs(y - wanted), where=np.isfinite(wanted), initial=0) <= (2e-6 if dtype == F32 else 8e-3) * scale


def check_neighbours(case, dtype):
    """A NaN reaches the outputs that read it, and no others."""
    pixel = [-1] * len(case.x)
    pixel[case.specs.lhs_spec[0]], pixel[case.specs.lhs_spec[1]] = 0, slice(None)
    x, w = random(case.x, dtype).at[tuple(pixel)].set(jnp.nan), random_filter(case, dtype)
    known = convolved(case, jnp.ones(case.w, F32), jnp.isnan(x).astype(F32)) > 0
    np.testing.assert_array_equal(np.isnan(np.float64(forward(case, x, w))), known)
    config = config_of(case)
    if not packed.refuse(config, x, w):
        made = packed.config_of(config, x, w, False)
        y = jax.jit(functools.partial(packed.OP, made))(x, *packed.pack(made, w))[0]
        np.testing.assert_array_equal(np.isnan(np.float64(y)), known)


def check_float32_filter():
    """One that meets bfloat16 is rounded as a cast rounds it, and to the same y."""
    for case in (CASES["3x3"], CASES["1x1, odd"], MORE["long"], MORE["odd everything"]):
        x, w = random(case.x, BF16), random_filter(case, F32)
        assert (np.asarray(forward(case, x, w)) == np.asarray(forward(case, x, w.astype(BF16)))).all()


def convolved(case, w, x):
    return jax.lax.conv_general_dilated(
        x, w, case.strides, case.padding, rhs_dilation=case.dilation, dimension_numbers=case.specs, feature_group_count=case.groups)


def check_filters_that_are_not_finite():
    """Over padding a tap contributes nothing, nor to the gradient of x."""
    of_one_pixel = Case((4, 1, 1, 64), (5, 5, 64, 64), strides=2, padding=(2, 2))  # its dx has one phase of two, with the even taps
    others = Case((1, 4, 5, 16), (3, 3, 16, 16), padding=(1, 1)), MORE["odd everything"], MORE["holes"], MORE["padding only"]
    for case, column in ((of_one_pixel, 0), *((case, 1) for case in others)):
        x, dy, filter_ = random(case.x), jnp.ones(case.y, F32), random_filter(case)
        which = jnp.zeros_like(filter_).at[0, column, 0, 0].set(1)
        w = jnp.where(which > 0, jnp.inf, filter_)
        meetings, pullback = jax.vjp(functools.partial(convolved, case, which), jnp.ones_like(x))  # XLA's own are with padding too
        np.testing.assert_array_equal(np.isfinite(forward(case, x, w)), meetings == 0)
        np.testing.assert_array_equal(np.isfinite(backward(case, x, w, dy, dy, "none")["dx"]), pullback(dy)[0] == 0)
    for dtype, channels in itertools.product((F32, BF16), (16, 32)):
        case = Case((1, 3, 3, channels), (3, 3, channels, 16), padding=(1, 1))
        x = random(case.x, dtype)
        w = random_filter(case, dtype).at[0, 0, 0, 0].set(jnp.inf)
        y = np.float64(forward(case, x, w))
        assert not np.isfinite(y[0, 1:, 1:, 0]).any() and np.isfinite(y[..., 1:]).all()
        assert multiplies_padding(dtype) or np.isfinite(y[0, 0]).all() and np.isfinite(y[0, :, 0]).all()
        line = Case((1, 6, 3), (3, 3, 16), padding=(1, 1))  # of few channels: its taps lie beside each other
        y = np.float64(forward(line, random(line.x, dtype), random_filter(line, dtype).at[0, 0, 0].set(jnp.inf)))
        assert not np.isfinite(y[0, 1:, 0]).any() and np.isfinite(y[..., 1:]).all()
        assert multiplies_padding(dtype) or np.isfinite(y[0, 0]).all()


def check_threads():
    """The same bits on any number of them."""
    cases = CASES["3x3"], MORE["odd everything"], MORE["many rows"], MORE["long"]
    found = []
    for threads in (1, 2, 3, 16):
        jaxfuse.set_num_threads(threads)
        for case, dtype in itertools.product(cases, (F32, BF16)):
            x, w, dy = random(case.x, dtype), random_filter(case, dtype), random(case.y, dtype, 2)
            found.append((forward(case, x, w), backward(case, x, w, dy, dy, "none")))
    for i, result in enumerate(found):
        jax.tree.map(np.testing.assert_array_equal, result, found[i % (2 * len(cases))])


def check_dense():
    """A layer and its gradients, by a weight whose columns or whose rows lie side by side."""
    def layer(x, w, b):
        return jax.nn.gelu(x @ w + b)

    def layer_of_rows(x, w, b):
        return jax.nn.gelu(x @ w.T + b)

    for rows, inner, columns in ((1, 5, 7), (33, 70, 200), (130, 3072, 65), (1100, 20, 130)):
        x, w, b = random((rows, inner)), random((inner, columns), seed=1) / np.sqrt(inner), random((columns,), seed=2)
        for function, weight in ((layer, w), (layer_of_rows, w.T)):
            fused = jaxfuse.fuse(function, policy="always")
            assert [site.kernel for site in jaxfuse.explain(function, x, weight, b, policy="always").sites] == ["native"]
            near = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6 * np.sqrt(inner))
            near(jax.jit(fused)(x, weight, b), function(x, weight, b))
            losses = [lambda *args, f=f: jnp.sum(f(*args) ** 2) / rows for f in (fused, function)]
            jax.tree.map(near, *(jax.jit(jax.grad(loss, (0, 1, 2)))(x, weight, b) for loss in losses))
            found = np.isnan(fused(x.at[-1, 3].set(jnp.nan), weight, b))
            assert found[-1].all() and not found[:-1].any()


def is_computed(case) -> bool:
    """In other layouts than the contraction's by oneDNN."""
    last = len(case.x) - 1
    fits = case.specs.lhs_spec[1] == case.specs.out_spec[1] == last and last in case.specs.rhs_spec[:2]
    return fits or ffi.no_onednn() is None


COMPUTED = [case for case in (*CASES.values(), *MORE.values()) if is_computed(case)]


def run_all() -> int:
    count = 0
    for dtype in (F32, BF16):
        for case in COMPUTED:
            check_forward(case, dtype)
            check_backward(case, dtype)
            check_packed(case, dtype)
            check_neighbours(case, dtype)
            count += 1
        for shapes in TRANSPOSED:
            check_transposed(*shapes, dtype)
    check_float32_filter()
    check_filters_that_are_not_finite()
    check_threads()
    check_dense()
    return count


@pytest.mark.costly
@pytest.mark.parametrize("level", ["avx512_amx", "avx512", "avx2", "portable"])
def test_every_geometry(level):
    count = json.loads(printed_at(level, __file__, JAXFUSE_CONTRACTION="always"))
    assert count == 2 * len(COMPUTED)


if __name__ == "__main__":
    print(json.dumps(run_all()))
