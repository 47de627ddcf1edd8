"""Convolutions in int8, by the kernel and by the reference: exact sums of integers, and what becomes of them."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from compare import same
from conv_oracle import BF16, F32, Case, convolve, random_filter
from int8_oracle import CASES, NARROW, RANGES, check_extremes, check_sums, computed, config_of, integers, quantised
from jaxfuse.ops import conv
from jaxfuse.ops.activations import named
from jaxfuse.ops.conv import int8
from jaxfuse.ops.conv.packed import unpack


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", CASES)
def test_sums_are_exact(name):
    case, i = CASES[name], list(CASES).index(name)
    for (range_, narrow), j in zip(itertools.product(RANGES.values(), NARROW), range(8)):
        if j % 4 == i % 4:
            check_sums(case, range_, narrow)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("narrow", NARROW)
def test_nothing_saturates(narrow):
    check_extremes(narrow)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [F32, BF16, jnp.float16])
@pytest.mark.parametrize("activation", ["none", "relu", "relu6", "silu"])
def test_what_follows_the_sums(activation, dtype):
    """Scale, bias, residual and activation, as of the convolution of the rounded numbers."""
    case = CASES["3x3"]
    made, x, w, bias, residual = quantised(case, dtype, activation)
    y = computed(made, x, w, bias, residual)
    v, scale, _ = int8.pack(made, w)
    sums = convolve(case, np.float64(int8.centered(made, x)), np.float64(unpack(made.filter, v)))
    exact = sums * np.float64(scale) + np.float64(bias) + np.float64(residual)
    assert y.dtype == dtype
    same(y, made.conv.activation.value(jnp.float32(exact)).astype(dtype))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", ["1x1, odd", "3x3", "few features, no padding", "one pixel", "line", "volume", "long"])
def test_the_mean_error_of_a_rounded_filter_is_taken_away(name):
    """Where each input is its mean, sums are those of the exact filter but for half a unit; those of the kernel and of the reference are
    the same, and so are those with derivatives."""
    case = Case(CASES[name].x, CASES[name].w)  # without padding, whose pixels are 0
    mean = [float(3 * i % 7) - 2 for i in range(case.x[-1])]
    made = int8.config_of(config_of(case, activation=named("silu")), case.w, RANGES["uneven"], narrow=True)
    x, w = jnp.broadcast_to(jnp.array(mean), case.x), np.array(random_filter(case, F32))
    filters = int8.pack(made, w, mean)
    y = jax.jit(lambda x: int8.OP(made, x, *filters)[0])(x)
    exact = convolve(case, np.float64(x), np.float64(w))
    half = 0.51 * np.float64(filters[1])
    assert (np.abs(y - exact / (1 + np.exp(-exact))) <= 1.1 * half + 1e-5 * np.abs(exact)).all()  # silu's slope is at most 1.1
    same(y, int8.OP.forward.reference(made, x, *filters)[0])
    same(jax.vjp(lambda x: int8.OP(made, x, *filters)[0], x)[0], y, times=2)


@pytest.mark.parametrize("low, high, zero", [(0, 5, 0), (2, 5, 0), (-5, 0, 255), (-5, -1, 255), (-1, 1, 127), (-1, 3, 64), (0, 0, 0),
                                             (0, 1e-40, 0), (-3e38, 3e38, 128)])
def test_ranges(low, high, zero):
    """Zero is one of the 256 numbers, and both ends are within half a step of one."""
    found = int8.Range.of(low, high)
    assert found.zero == zero and np.float32(found.step) == found.step and np.isfinite(found.step)
    for end in (low, high):
        assert -found.zero - 0.51 <= end / found.step <= 255 - found.zero + 0.51


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("times", [1, 5])
def test_numbers_are_rounded_to_the_nearest_even_and_kept_within_the_range(times):
    """Several vectors at once, and what is left."""
    case = Case((1, 16 * times, 1), (1, 1, 1))
    made = int8.config_of(config_of(case), case.w, int8.Range(0.5, 100), narrow=True)
    given = [0.25, 0.75, -0.25, -0.75, 0.3, 77.4, 77.6, 1e30, -50, -50.6, -1e30, np.inf, -np.inf, np.nan, 0.0, 1e-42]
    want = [0.0, 1, 0, -1, 0.5, 77.5, 77.5, 77.5, -50, -50, -50, 77.5, -50, 0, 0, 0]
    x = jnp.array(given * times, F32).reshape(case.x)
    np.testing.assert_array_equal(computed(made, x, np.ones(case.w)).reshape(-1), want * times)


@pytest.mark.usefixtures("kernel")
def test_filters_of_zeros():
    case = CASES["1x1"]
    made, x, w, bias, residual = quantised(case)
    w = np.array(w)
    w[..., 5] = 0
    y = computed(made, x, w, bias, residual)
    np.testing.assert_array_equal(y[..., 5], bias[5] + residual[..., 5])


@pytest.mark.usefixtures("kernel")
def test_no_images():
    case = CASES["3x3"]
    made, x, w, bias, residual = quantised(case)
    assert computed(made, x[:0], w, bias, residual[:0]).shape == (0, *case.y[1:])


@pytest.mark.parametrize("name", CASES)
def test_a_filter_is_in_its_panels(name):
    case = CASES[name]
    _, w = integers(case, RANGES["uneven"], narrow=False)
    made = int8.config_of(config_of(case), case.w, RANGES["uneven"], narrow=False)
    packed, scale, offset = int8.pack(made, w)
    np.testing.assert_array_equal(unpack(made.filter, packed), w)
    np.testing.assert_array_equal(scale, np.ones_like(scale))
    np.testing.assert_array_equal(offset, -37 * w.sum(tuple(d for d in range(w.ndim) if d != case.specs.rhs_spec[0])))


@pytest.mark.usefixtures("kernel")
def test_vmap_and_jit():
    case = CASES["3x3"]
    made, x, w, bias, residual = quantised(case, activation="relu")
    filters = int8.pack(made, w)
    want = jax.jit(lambda x, residual: int8.OP(made, x, *filters, bias, residual)[0])(x, residual)
    one = lambda x, residual: int8.OP(made, x[None], *filters, bias, residual[None])[0][0]
    np.testing.assert_array_equal(jax.jit(jax.vmap(one))(x, residual), want)


@pytest.mark.usefixtures("kernel")
def test_gradients_pass_straight_through():
    """Those of the convolution by the rounded filter, at the rounded x."""
    case = CASES["3x3"]
    made, x, w, bias, residual = quantised(case, activation="relu")
    filters = int8.pack(made, w)
    near = jnp.asarray(unpack(made.filter, filters[0]) * filters[1] / made.range.step)
    floats = lambda x: conv(x, near, bias, residual, activation="relu", padding=case.padding)
    rounded = int8.centered(made, x) * np.float32(made.range.step)
    value, pullback = jax.vjp(lambda x: int8.OP(made, x, *filters, bias, residual)[0], x)
    want, pullback_of_floats = jax.vjp(floats, rounded)
    same((value, pullback(value)), (want, pullback_of_floats(want)), times=2)
    same(value, computed(made, x, w, bias, residual), times=2)
    same(jax.jvp(lambda x: int8.OP(made, x, *filters, bias, residual)[0], (x,), (x,))[1], jax.jvp(floats, (rounded,), (x,))[1], times=2)


def changed(**of):
    return dataclasses.replace(config_of(CASES["3x3"]), **of)


X, W = jax.ShapeDtypeStruct(CASES["3x3"].x, F32), jax.ShapeDtypeStruct(CASES["3x3"].w, F32)


@pytest.mark.parametrize("config, x, w, words", [
    (changed(lhs_dilation=(2, 2)), X, W, "transposed or grouped"),
    (changed(feature_group_count=2), X, W, "transposed or grouped"),
    (changed(padding=((-1, 1), (1, 1))), X, W, "negative padding"),
    (changed(lhs_spec=(0, 1, 2, 3)), X, W, "channels last"),
    (changed(has_scale=True), X, W, "a scale that is no constant"),
    (changed(out_dtype="float32"), X, W, "another dtype than x's"),
    (changed(precision=(lax.Precision.HIGHEST,) * 2), X, W, "precision .* is asked for"),
    (changed(), X, jax.ShapeDtypeStruct((3, 3, 1 << 13, 40), F32), "sums of 73728 products, at most 65536"),
    (changed(), jax.ShapeDtypeStruct(X.shape, "float64"), W, "dtypes float64"),
])
def test_what_is_no_int8(config, x, w, words):
    assert re.search(words, int8.refuse(config, x, w) or "")
