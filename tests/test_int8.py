"""Convolutions in int8: exact sums of integers, by the reference and by every form of the kernel's product of bytes."""

import dataclasses
import hashlib
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from arrays import array
from compare import same
from conv_oracle import BF16, F32, Case, convolve, random, random_filter
from jaxfuse.ops.activations import NO_ACTIVATION, named
from jaxfuse.ops import conv
from jaxfuse.ops.conv import int8
from jaxfuse.ops.conv.config import ConvConfig
from jaxfuse.ops.conv.conv import forward_attrs
from jaxfuse.ops.conv.packed import unpack
from jaxfuse.runtime import ffi
from processes import printed_by

native = pytest.mark.skipif(ffi.native() is None, reason="no native module")
CASES = {
    "1x1": Case((2, 7, 7, 64), (1, 1, 64, 48)),
    "1x1, odd": Case((1, 9, 7, 13), (1, 1, 13, 27)),
    "1x1, strided": Case((8, 9, 8, 20), (1, 1, 20, 33), strides=2),
    "3x3": Case((8, 9, 10, 32), (3, 3, 32, 40), padding=(1, 1)),
    "3x3, strided, uneven padding": Case((1, 15, 14, 33), (3, 3, 33, 17), strides=(2, 1), padding=[(0, 1), (2, 0)]),
    "stem": Case((2, 23, 24, 3), (7, 7, 3, 24), strides=2, padding=(3, 3)),
    "few features, no padding": Case((1, 8, 9, 5), (2, 3, 5, 7)),
    "dilated": Case((2, 11, 12, 18), (3, 2, 18, 16), padding=[(2, 2), (3, 0)], dilation=(2, 3)),
    "one pixel": Case((1, 1, 1, 70), (1, 1, 70, 33)),
    "padding only": Case((1, 2, 2, 5), (3, 3, 5, 8), strides=3, padding=(4, 4)),
    "OIHW": Case((1, 6, 7, 20), (24, 20, 3, 3), layout=("NHWC", "OIHW", "NHWC")),
    "one input": Case((2, 13, 14, 1), (5, 5, 1, 9), padding=(2, 2)),
    "line": Case((3, 31, 16), (5, 16, 24), strides=3, padding=(2, 1)),
    "volume": Case((1, 4, 5, 6, 7), (2, 3, 2, 7, 19), strides=(1, 2, 2), padding=(1, 1)),
    "long": Case((1, 3, 3, 1100), (3, 3, 1100, 17), padding=(1, 1)),
    "many rows": Case((2, 40, 41, 9), (2, 2, 9, 20), padding=(1, 0)),
}
RANGES = {"from zero": int8.Range(1.0, 0), "around zero": int8.Range(1.0, 128), "uneven": int8.Range(1.0, 37),
          "up to zero": int8.Range(1.0, 255)}
MOST = (int8.SMALL, int8.WHOLE)


def config_of(case, **of):
    return ConvConfig(case.strides, tuple(case.padding), case.dilation, case.groups, *case.specs, (1,) * len(case.strides), **of)


def integers(case, range_, most, seed=0):
    """(x, w): all of the range, and the largest weight in each feature, whose scale is then 1."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-range_.zero, 256 - range_.zero, case.x)
    w = np.moveaxis(rng.integers(-most, most + 1, case.w), case.specs.rhs_spec[0], -1)
    w.reshape(-1, w.shape[-1])[rng.integers(w[..., 0].size)] = most
    return x, np.moveaxis(w, -1, case.specs.rhs_spec[0])


def computed(made, x, w, *rest):
    """By a program of its own: the kernel is chosen when it is compiled."""
    return np.asarray(jax.jit(lambda *args: int8.OP(made, *args)[0])(x, *int8.pack(made, w), *rest))


def check_sums(case, range_, most):
    """To the last bit."""
    x, w = integers(case, range_, most)
    made = int8.config_of(config_of(case), case.w, range_, most)
    y = computed(made, array(x, F32), w)
    np.testing.assert_array_equal(y, np.float32(convolve(case, x, w)))
    return y


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", CASES)
def test_sums_are_exact(name):
    case, i = CASES[name], list(CASES).index(name)
    for (range_, most), j in zip(itertools.product(RANGES.values(), MOST), range(8)):
        if j % 4 == i % 4:
            check_sums(case, range_, most)


def check_extremes(most):
    """Pairs of bytes whose products, added in 16 bits, would not fit."""
    case = Case((1, 5, 8, 600), (1, 1, 600, 20))
    for sign in (1, -1):
        made = int8.config_of(config_of(case), case.w, RANGES["from zero"], most)
        y = computed(made, jnp.full(case.x, 255.0), np.full(case.w, sign * most))
        np.testing.assert_array_equal(y, np.float32(sign * 600 * 255 * most))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("most", MOST)
def test_nothing_saturates(most):
    check_extremes(most)


def quantised(case, dtype=F32, activation="none", most=int8.SMALL, range_=None):
    x, w = random(case.x, dtype), random_filter(case, dtype)
    found = range_ or int8.Range.of(float(x.min()), float(x.max()))
    features = case.y[case.specs.out_spec[1]]
    config = config_of(case, has_bias=True, has_residual=True, activation=named(activation) if activation != "none" else NO_ACTIVATION)
    return int8.config_of(config, case.w, found, most), x, w, random(features, dtype, 3), random(case.y, dtype, 4)


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


@pytest.mark.parametrize("low, high, zero", [(0, 5, 0), (2, 5, 0), (-5, 0, 255), (-5, -1, 255), (-1, 1, 127), (-1, 3, 64), (0, 0, 0),
                                             (0, 1e-40, 0), (-3e38, 3e38, 128)])
def test_ranges(low, high, zero):
    """Zero is one of the 256 numbers, and both ends are within half a step of one."""
    found = int8.Range.of(low, high)
    assert found.zero == zero and np.float32(found.step) == found.step and np.isfinite(found.step)
    for end in (low, high):
        assert -found.zero - 0.51 <= end / found.step <= 255 - found.zero + 0.51


@pytest.mark.usefixtures("kernel")
def test_numbers_are_rounded_to_the_nearest_even_and_kept_within_the_range():
    case = Case((1, 16, 1), (1, 1, 1))
    made = int8.config_of(config_of(case), case.w, int8.Range(0.5, 100), int8.SMALL)
    given = [0.25, 0.75, -0.25, -0.75, 0.3, 77.4, 77.6, 1e30, -50, -50.6, -1e30, np.inf, -np.inf, np.nan, 0.0, 1e-42]
    want = [0.0, 1, 0, -1, 0.5, 77.5, 77.5, 77.5, -50, -50, -50, 77.5, -50, 0, 0, 0]
    np.testing.assert_array_equal(computed(made, jnp.array(given, F32).reshape(case.x), np.ones(case.w)).reshape(-1), want)


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
    _, w = integers(case, RANGES["uneven"], int8.WHOLE)
    made = int8.config_of(config_of(case), case.w, RANGES["uneven"], int8.WHOLE)
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


# --- the kernel


def refused(match, *operands, y=None, **attrs):
    """The target by itself, called with what does not fit."""
    case = CASES["3x3"]
    made, x, w, *_ = quantised(case)
    made = dataclasses.replace(made, filter=dataclasses.replace(made.filter, conv=config_of(case)))
    packed, scale, offset = int8.pack(made, w)
    given = dict(x=x, packed=packed, offset=offset, scale=scale) | dict(operands)
    attrs = forward_attrs(made.scaled) | made.range._asdict() | dict(filter_shape=case.w, most=made.most) | attrs
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxfuse_conv_int8: .*{match}"):
        ffi.call("jaxfuse_conv_int8", y or jax.ShapeDtypeStruct(case.y, F32), *given.values(), **attrs)


@native
def test_refusals_say_what_and_why():
    refused("packed has shape .*, expected", ("packed", jnp.zeros(64, jnp.uint8)))
    refused("packed has dtype", ("packed", jnp.zeros(64)))
    refused("offset has dtype float32, expected int32", ("offset", jnp.zeros(40)))
    refused("offset has shape .*, expected .*40", ("offset", jnp.zeros(41, jnp.int32)))
    refused("scale has shape .*, expected .*40", ("scale", jnp.zeros(4)))
    refused("x has dtype int32", ("x", jnp.zeros(CASES["3x3"].x, jnp.int32)))
    refused("y has shape", y=jax.ShapeDtypeStruct((8, 9, 10, 41), F32))
    refused("w has shape .*", filter_shape=(3, 3, 31, 40))
    refused("sums of .* products, expected at most 65536", ("x", jnp.zeros((8, 9, 10, 1 << 13))), filter_shape=(3, 3, 1 << 13, 40))
    refused("step is 0, expected a positive number", step=0.0)
    refused("step is .*, expected a positive number", step=float("nan"))
    refused("zero is 256, expected 0 to 255", zero=256)
    refused("most is 128, expected 1 to 127", most=128)
    refused("transposed, grouped or not channels last", lhs_spec=(0, 2, 1, 3), out_spec=(0, 2, 1, 3))


def run_all() -> str:
    """A digest of what this process computes: of sums, which are compared with numpy's too, and of what follows them."""
    digest = hashlib.sha256()
    for case, range_, most in itertools.product(CASES.values(), RANGES.values(), MOST):
        digest.update(check_sums(case, range_, most).tobytes())
    for most in MOST:
        check_extremes(most)
    for case, dtype in itertools.product(CASES.values(), (F32, BF16)):
        made, x, w, bias, residual = quantised(case, dtype, "relu")
        digest.update(np.asarray(computed(made, x, w, bias, residual), np.float32).tobytes())
    return digest.hexdigest()


@native
def test_every_form_gives_the_same_bits():
    """Those that this CPU has."""
    levels = ["portable", "avx2", "avx512"]
    found = {}
    for level in levels[: levels.index(ffi.native().info()["simd"]) + 1]:
        form, found[level] = printed_by(__file__, JAXFUSE_SIMD=level).split()
        assert form.startswith(level)
    assert len(set(found.values())) == 1, found


@native
def test_any_number_of_threads_gives_the_same_bits():
    assert len({printed_by(__file__, OMP_NUM_THREADS=str(n)) for n in (1, 3)}) == 1


if __name__ == "__main__":
    print(ffi.native().info()["int8"], run_all())
