"""What becomes of NaN, infinity and denormals in every op, forward and backward: the promises of docs/numbers.md."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from cases import CASES
from compare import fused as compiled, jit, kinds, pairs, unfused, with_cotangents
from jaxfuse.runtime import ffi

DTYPES = ["float32", "bfloat16"]
VALUES = [np.nan, np.inf, -np.inf]
SELECTED = """
    batch_norm-relu batch_norm-relu6 batch_norm-residual_relu batch_norm-residual_gelu batch_norm-residual batch_norm-silu
    batch_norm-one_channel batch_norm-channels_first batch_norm-given_statistics_residual
    dense-alone dense-three_axes_bias_gelu dense-bias_residual_silu dense-odd_sizes_relu dense-one_row dense-batched
    dense-attention_scores dense-many_rows dense-float32_result
    max_pool-3x3_overlapping max_pool-2x2_stride2 max_pool-3d_asymmetric
    global_average_pool-images global_average_pool-many_places
    layer_norm-tokens layer_norm-residual layer_norm-residual_sum_gelu rms_norm-residual_sum_silu
    group_norm-images_silu group_norm-channels_first_relu
    lstm-sequence lstm-plain_odd_reverse gru-sequence gru-resets_first
    attention-plain attention-bias attention-causal attention-bias_and_mask_of_items attention-dropout attention-grouped
    attention-many_keys
""".split()
CONVOLUTIONS = [
    name for name, case in CASES.items()
    if case.op == "conv" and not case.refused and "scale" not in case.shapes and "activation_" not in name
]


def planted(array, value):
    """With the value in its middle."""
    flat = np.array(array).reshape(-1)
    flat[flat.size // 2] = value
    return jnp.asarray(flat.reshape(array.shape))


def each_planting(arrays, cotangents):
    """(what, value, arrays, cotangents) with a value in one of them."""
    for value in VALUES:
        for name in arrays:
            yield name, value, arrays | {name: planted(arrays[name], value)}, cotangents
        for i, cotangent in enumerate(cotangents):
            yield f"cotangent {i}", value, arrays, (*cotangents[:i], planted(cotangent, value), *cotangents[i + 1 :])


def saturates(case, dtype, name, value):
    """An infinite weight in a loop makes gates 0 and states 0, or not, by the rounding of the steps before, which is bf16's unfused."""
    return case.op in ("lstm", "gru") and dtype == "bfloat16" and name == "w_h" and np.isinf(value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SELECTED)
def test_the_same_elements_as_unfused(name, dtype):
    case = CASES[name]
    fused = compiled(case)
    for what, value, *args in each_planting(*with_cotangents(case, case.inputs(dtype))):
        if saturates(case, dtype, what, value):
            continue
        got, want = fused(*args), unfused(case)(*args)
        for made, plain in pairs(got, want):
            np.testing.assert_array_equal(np.isfinite(made), np.isfinite(plain), f"{what}: {value}")
        same = (got, want) if np.isnan(value) else (got[0], want[0])
        for made, plain in pairs(*same):
            np.testing.assert_array_equal(kinds(made), kinds(plain), f"{what}: {value}")


def convolution(case):
    """The bare one as a function of x and w, by XLA and fused."""
    options = {name: value for name, value in case.options.items() if name not in ("activation", "alpha", "residual_last")}
    bare = dataclasses.replace(case, shapes={name: case.shapes[name] for name in "xw"}, options=options)
    return lambda x, w: bare.unfused(dict(x=x, w=w))[0], lambda x, w: bare.fused(dict(x=x, w=w))[0], options


def everywhere(reached, axes):
    """Along all axes but these."""
    return np.broadcast_to(reached.any(tuple(d for d in range(reached.ndim) if d not in axes), keepdims=True), reached.shape)


def reached_by(plain, specs, bad_x, bad_w, bad_g):
    """For y, dx and dw: where a bad number meets data, and where it meets data, padding, or holes between them."""
    ones = [np.ones_like(bad) for bad in (bad_x, bad_w, bad_g)]
    x, w, g = ones

    def terms(x, w, g):
        y, pull = jax.vjp(plain, x, w)
        return y, *pull(g)

    through_x, through_w, through_g = (
        [np.asarray(v) > 0.5 for v in jit(terms)(*spoiled)] for spoiled in ((bad_x, w, g), (x, bad_w, g), (x, w, bad_g)))
    least = through_x[0] | through_w[0], through_w[1] | through_g[1], through_x[2] | through_g[2]
    (image, filter_, out) = specs
    most = (
        through_x[0] | everywhere(through_w[0], out[1:2]),
        everywhere(through_w[1], image[1:2]) | through_g[1],
        everywhere(through_x[2], filter_[:2]) | everywhere(through_g[2], filter_[:1]),
    )
    return zip(least, most)


@functools.cache
def geometry(name):
    case = CASES[name]
    plain, fused, options = convolution(case)
    spatial = len(case.shapes["x"]) - 2
    letters = "DHW"[3 - spatial :]
    names = options.get("dimension_numbers", (f"N{letters}C", f"{letters}IO", f"N{letters}C"))
    return plain, fused, lax.conv_dimension_numbers(case.shapes["x"], case.shapes["w"], names)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_reach_what_they_read(name, dtype):
    """At least what a number meets by the definition; at most what it meets where padding is multiplied too."""
    plain, fused, specs = geometry(name)
    arrays = {key: value for key, value in CASES[name].inputs(dtype).items() if key in "xw"}
    g = jnp.ones(jax.eval_shape(plain, **arrays).shape, dtype)
    run = jax.jit(lambda x, w, g: (fused(x, w), *jax.vjp(fused, x, w)[1](g)))
    for what, value, spoiled, (dy,) in each_planting(arrays, (g,)):
        bad = [np.float32(~np.isfinite(np.float32(v))) for v in (spoiled["x"], spoiled["w"], dy)]
        for i, (got, (least, most)) in enumerate(zip(run(spoiled["x"], spoiled["w"], dy), reached_by(plain, specs, *bad))):
            reached = ~np.isfinite(np.float32(got))
            assert reached[least].all(), f"{what}: {value}: {('y', 'dx', 'dw')[i]}"
            if i == 0 or dtype == "float32":  # in bf16 gradients oneDNN may spread it to a neighbour
                assert most[reached].all(), f"{what}: {value}: {('y', 'dx', 'dw')[i]}"
            if np.isnan(value):
                assert np.isnan(np.float32(got)[least]).all()


def test_an_infinite_scale_of_a_convolution():
    """Its channel alone; where it is differentiated, the scale goes into the filter, and infinities of both signs meet."""
    case = CASES["conv-scale_bias_residual"]
    arrays, cotangents = with_cotangents(case, case.inputs())
    arrays |= dict(scale=planted(arrays["scale"], np.inf))
    want = kinds(case.unfused(arrays)[0])
    np.testing.assert_array_equal(kinds(jax.jit(case.fused)(arrays)[0]), want)
    (y,), _ = compiled(case)(arrays, cotangents)
    bound = {name: array for name, array in arrays.items() if name != "x"}
    frozen = jaxfuse.freeze(lambda bound, x: case.unfused(bound | dict(x=x))[0], bound)(arrays["x"])
    for made in (y, frozen):
        assert (kinds(made)[want > 0] > 0).all() and not kinds(made)[..., np.arange(8) != 4].any()


def test_dropout_that_keeps_nothing_of_a_row_of_nan():
    """The one exception of docs/numbers.md: 0 where a program selects, NaN by our factor of 0. Other rows do not change."""
    kept = np.arange(16).reshape(4, 4) % 3 > 0
    kept[2] = False

    def attention(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / 2)
        return jnp.einsum("bhts,bshd->bthd", jnp.where(kept, p / 0.75, 0), v)

    q, k, v = (jax.random.normal(jax.random.key(i), (1, 4, 2, 4)) for i in range(3))
    q = q.at[0, 1:3].set(jnp.nan)
    assert [site.pattern for site in jaxfuse.explain(attention, q, k, v, policy="always").fused] == ["attention+dropout"]
    for function, rows in ((attention, [1]), (jaxfuse.fuse(attention, policy="always"), [1, 2])):
        y = np.asarray(jax.jit(function)(q, k, v))
        assert [*np.flatnonzero(np.isnan(y).any((0, 2, 3)))] == [*np.flatnonzero(np.isnan(y).all((0, 2, 3)))] == rows


@pytest.mark.skipif(ffi.unavailable("jaxfuse_conv_packed") is not None, reason=str(ffi.unavailable("jaxfuse_conv_packed")))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_filter_that_is_not_finite_over_padding(dtype):
    """A NaN in a corner of it gives NaN along the image's edges too, where it meets padding; in no other feature."""
    x, w = (jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(((1, 9, 9, 16), (3, 3, 16, 24))))
    w = w.at[0, 0, 5, 7].set(jnp.nan)
    convolution = lambda w, x: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    frozen = jaxfuse.freeze(convolution, w, policy="always")
    y = np.float32(frozen(x))
    assert [name for name in frozen._constants if name.startswith("packed")]
    assert np.isnan(y[..., 7]).all() and np.isfinite(np.delete(y, 7, -1)).all()


# Max pools, which add nothing up, have a test of their own.
ARITHMETIC = [*CONVOLUTIONS, "batch_norm-given_statistics", *(name for name in SELECTED if CASES[name].op != "max_pool")]
TINY = float(jnp.finfo("float32").tiny)


def denormal(array):
    array = np.float64(array)
    return (array != 0) & (np.abs(array) < TINY)


def with_denormals(case, dtype):
    """x or q, bias, residual and the cotangents are denormals: in one call, and zeros in another."""
    arrays, cotangents = with_cotangents(case, case.inputs(dtype))
    tiny = lambda v: jnp.asarray((np.float64(v) * 1e-39).astype(v.dtype))
    small = arrays | {name: tiny(arrays[name]) for name in ("x", "q", "bias", "residual") if name in arrays}
    args = small, tuple(tiny(c) for c in cotangents)
    assert denormal(small["q" if case.op == "attention" else "x"]).any()
    return args, jax.tree.map(lambda v: jnp.asarray(np.where(denormal(v), 0, np.asarray(v)).astype(v.dtype)), args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_denormals_are_zeros(name, dtype):
    """Arithmetic takes them for zeros and makes none; what is handed on unchanged, as a residual's gradient, may be one."""
    case = CASES[name]
    fused = compiled(case)
    args, flushed = with_denormals(case, dtype)
    for made, plain, zero in pairs(fused(*args), unfused(case)(*args), fused(*flushed)):
        np.testing.assert_array_equal(denormal(made), denormal(plain))
        np.testing.assert_array_equal(np.where(denormal(made), 0, np.float32(made)), np.float32(zero))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in SELECTED if CASES[name].op == "max_pool"])
def test_max_pool_of_denormals(name, dtype):
    """Zeros when they are compared, with each other and with numbers of any size: which one is taken, and its gradient, are those
    of zeros, where of equals the first counts. One that is taken may come out as it is."""
    case, rng = CASES[name], np.random.default_rng(0)
    shape = case.shapes["x"]
    x = jnp.asarray(rng.choice([0, 1e-39, 5e-39, -1e-39, -5e-39, -1e-30, -1, -2, -3, 4], shape).astype(dtype))
    zeros = jnp.asarray(np.where(denormal(x), 0, np.asarray(x)).astype(dtype))
    _, cotangents = with_cotangents(case, dict(x=x))
    (y,), gradient = compiled(case)(dict(x=x), cotangents)
    (expected,), wanted = unfused(case)(dict(x=zeros), cotangents)
    assert denormal(x).any() and (np.float32(expected) == 0).any() and (np.float32(expected) != 0).any()
    np.testing.assert_array_equal(np.where(denormal(y), 0, np.float32(y)), np.float32(expected))
    np.testing.assert_allclose(np.float32(gradient["x"]), np.float32(wanted["x"]), *(2 * [1e-6 if dtype == "float32" else 1e-2]))


def in_one_dtype(dtype):
    """A batch norm all of whose arithmetic is in x's dtype."""

    def f(x, gamma, beta):
        mean = x.mean((0, 1, 2))
        var = (x * x).mean((0, 1, 2)) - mean * mean
        return (x - mean) * lax.rsqrt(var + np.asarray(1e-5, dtype)) * gamma + beta

    return f


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_norm_of_one_element_a_channel(dtype):
    """Two terms of its gradient, some 1e5 each, cancel."""
    f = in_one_dtype(dtype)
    x, gamma, beta, dy = (jax.random.normal(jax.random.key(i), (1, 1, 1, 16), dtype) for i in range(4))
    args = x + 3, gamma[0, 0, 0] * 10, beta[0, 0, 0]
    assert jaxfuse.explain(f, *args, policy="always").fused
    for function in (f, jaxfuse.fuse(f, policy="always")):
        dx = jax.jit(lambda *args, function=function: jax.vjp(function, *args)[1](dy * 40)[0])(*args)
        assert np.abs(np.float32(dx)).max() <= 1e-2
