"""The native convolution targets against numpy in float64, geometry by geometry, and where NaN, Inf and emptiness lead."""

import concurrent.futures
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_oracle import (
    ALPHA, BF16, CASES, F32, LONG, SLOPES, Case, assert_close, backward,
    check_backward, check_forward, convolve, forward, gradients, multiplies_padding, random, random_filter,
)

from jaxfuse.runtime import ffi
from processes import printed_by

pytestmark = pytest.mark.skipif(ffi.no_onednn() is not None, reason=str(ffi.no_onednn()))

DTYPES = [F32, BF16]
VALUES = {
    "none": lambda z, a: z,
    "relu": lambda z, a: np.maximum(z, 0),
    "relu6": lambda z, a: np.minimum(np.maximum(z, 0), 6),
    "leaky_relu": lambda z, a: np.where(z >= 0, z, a * z),
    "elu": lambda z, a: np.where(z > 0, z, a * np.expm1(np.minimum(z, 0))),
    "elu_expm1": lambda z, a: np.where(z > 0, z, a * np.expm1(np.minimum(z, 0))),
    "sigmoid": lambda z, a: 1 / (1 + np.exp(-z)),
    "tanh": lambda z, a: np.tanh(z),
    "silu": lambda z, a: z / (1 + np.exp(-z)),
    "gelu": lambda z, a: np.float64(jax.nn.gelu(np.float32(z), approximate=False)),
    "gelu_tanh": lambda z, a: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "mish": lambda z, a: z * np.tanh(np.logaddexp(z, 0)),
    "hard_swish": lambda z, a: z * (np.minimum(np.maximum(z + 3, 0), 6) / 6),
    "softplus": lambda z, a: np.logaddexp(z, 0),
    "clip": lambda z, a: np.minimum(np.maximum(z, 0), a),
    "selu": lambda z, a: 1.0507009873554805 * np.where(z > 0, z, 1.6732632423543772 * np.expm1(np.minimum(z, 0))),
    "celu": lambda z, a: np.where(z > 0, z, a * np.expm1(np.minimum(z, 0) / a)),
    "hard_sigmoid": lambda z, a: np.minimum(np.maximum(z + 3, 0), 6) / 6,
    "hard_tanh": lambda z, a: np.minimum(np.maximum(z, -1), 1),
    "relu_squared": lambda z, a: np.maximum(z, 0) ** 2,
}
ARGUMENT_SLOPES = {  # of z; the others' are checked by test_ops.py
    "maximum0": lambda z, a: np.where(z > 0, 1, np.where(z == 0, 0.5, 0)),
    "hard_tanh": lambda z, a: np.abs(z) <= 1,
    "silu": lambda z, a: (lambda s: s * (1 + z * (1 - s)))(1 / (1 + np.exp(-z))),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
each_kernel = pytest.mark.parametrize("channels", [12, 16])  # oneDNN's, and with AVX2 our own
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])


@each_dtype
@each_case
def test_forward(case, dtype):
    check_forward(case, dtype)


@each_dtype
@each_case
def test_backward(case, dtype):
    check_backward(case, dtype)


AVX512 = ffi.native() is not None and (ffi.native().info()["isa"] or "").startswith("avx512")
CONTRACTS_BF16 = AVX512 and ffi.native().info()["simd"] == "avx512" and ffi.native().info()["isa"] not in (
    "avx512_core", "avx512_core_vnni")  # a large filter that few pixels meet


def rms_error(got, want):
    """Relative, in units of f32."""
    return np.sqrt(np.mean((np.float64(got) - want) ** 2) / np.mean(want**2)) * 2.0**23


@pytest.mark.parametrize("case", LONG.values(), ids=LONG.keys())
def test_long_sums_stay_close(case):
    """Root mean square errors near XLA's: 4 units of f32 with AVX-512 and 5.5 without, where one sum would be off by up to 9."""
    x, w, dy = random(case.x), random_filter(case), random(case.y, seed=2)
    results = [(forward(case, x, w), convolve(case, x, w))]
    if set(case.strides) == {1}:
        results.append((backward(case, x, w, dy, dy, "none")["dx"], gradients(case, x, w, dy)[0]))
    for got, want in results:
        assert rms_error(got, want) < (4 if AVX512 else 5.5)


@pytest.mark.parametrize("groups", [1, 4, 16], ids=["dense", "grouped", "depthwise"])
def test_long_sums_of_the_filter_stay_close(groups):
    """Over a batch of 3888 pixels; in one sum they would be off by 9 units."""
    case = Case((12, 18, 18, 16), (3, 3, 16 // groups, 16), padding=(1, 1), groups=groups)
    x, w, dy = random(case.x), random_filter(case), random(case.y, seed=2)
    dw = backward(case, x, w, dy, dy, "none", want=("dw",))["dw"]
    assert rms_error(dw, gradients(case, x, w, dy)[1]) < 5.5


@each_dtype
@pytest.mark.parametrize("activation", VALUES)
@pytest.mark.parametrize("pixels", [8, 64], ids=["small", "large"])  # small ones take another path
def test_activations(activation, pixels, dtype):
    case = Case((2, pixels, pixels, 16), (1, 1, 16, 16))
    x, w = 2 * random(case.x, dtype), jnp.eye(16, dtype=dtype)[None, None]
    y = forward(case, x, w, activation=activation)
    assert_close(y, VALUES[activation](np.float64(x), ALPHA))
    if activation in SLOPES:
        g = np.float64(x) * SLOPES[activation](np.float64(y), ALPHA)
        found = backward(case, x, w, x, y, activation)
        assert_close(found["dresidual"], g)
        assert_close(found["db"], np.float64(found["dresidual"]).sum((0, 1, 2)))


@each_dtype
@pytest.mark.parametrize("activation", ARGUMENT_SLOPES)
def test_slope_told_by_the_argument(activation, dtype):
    case = Case((2, 8, 8, 16), (1, 1, 16, 16))
    z, w = random(case.x, dtype).at[0, 0, 0, :3].set(jnp.array([0, 1, -1], dtype)), jnp.eye(16, dtype=dtype)[None, None]
    g = np.float64(z) * ARGUMENT_SLOPES[activation](np.float64(z), ALPHA)
    assert_close(backward(case, z, w, z, z, activation, by_value=False)["dresidual"], g)


@each_dtype
@pytest.mark.parametrize("name", ["3x3", "1x1, odd", "depthwise", "NCHW", "long sums"])
@pytest.mark.parametrize("activation", ["relu", "silu", "relu_squared"])
def test_residual_last_and_what_the_activation_is_applied_to(activation, name, dtype):
    case = CASES[name]
    x, w, residual = random(case.x, dtype), random_filter(case, dtype), random(case.y, dtype, 2)
    bias = random(case.y[case.specs.out_spec[1]], dtype, 4)
    z = convolve(case, x, w) + case.per_feature(bias)
    together = forward(case, x, w, None, bias, residual, activation, residual_last=True)
    assert_close(together, VALUES[activation](z, ALPHA) + np.float64(residual))
    y, kept = forward(case, x, w, None, bias, residual, activation, residual_last=True, save_z=True)
    assert_close(kept, z)
    own = name == "long sums" and CONTRACTS_BF16 or name == "1x1, odd" and not AVX512
    by_product = dtype == BF16 and own  # which does not read z again
    assert_close(y, VALUES[activation](z if by_product else np.float64(kept), ALPHA) + np.float64(residual))


@each_kernel
def test_nan_behind_a_residual_that_comes_last(channels):
    case = Case((2, 64, 64, channels), (1, 1, channels, 16))
    x, w, residual = random(case.x).at[0, 1, 2, 3].set(jnp.nan), random(case.w), random(case.y).at[1, 1, 1, 1].set(jnp.nan)
    y = forward(case, x, w, None, None, residual, "relu", residual_last=True)
    assert np.argwhere(np.isnan(y)).tolist() == [*[[0, 1, 2, i] for i in range(16)], [1, 1, 1, 1]]


WATCHED = ["3x3", "1x1", "1x1, odd", "stem", "depthwise", "depthwise 5x5", "depthwise, strided", "depthwise, causal",
           "depthwise, multiplier 2", "grouped", "odd", "1-D", "3-D", "NCHW", "long sums"]


@each_dtype
@pytest.mark.parametrize("name", WATCHED)
def test_not_finite(name, dtype):
    """A NaN or Inf in one place of an operand comes out exactly where it should, through every activation."""
    case = CASES[name]
    operands = {
        "x": np.float32(random(case.x)), "w": np.float32(random_filter(case)),
        "bias": np.float32(random(case.y[case.specs.out_spec[1]], seed=2)), "residual": np.float32(random(case.y, seed=3)),
    }  # fmt: skip
    places = [*itertools.product(["x", "bias", "residual"], [np.nan, np.inf, -np.inf]), ("w", np.nan)]
    inside = convolve(case, np.ones(case.x), np.arange(np.prod(case.w)).reshape(case.w) == np.prod(case.w) // 2) > 0
    for i in range(3):  # a third of the activations with a third of the places, one program
        activations = list(VALUES)[i::3]
        fused = jax.jit(lambda x, w, bias, residual, activations=activations: [forward(
            case, x.astype(dtype), w.astype(dtype), None, bias, residual.astype(dtype), name) for name in activations])
        for name, value in places[i::3]:
            spoiled = {key: operand.copy() for key, operand in operands.items()}
            spoiled[name].flat[spoiled[name].size // 2] = value
            with np.errstate(invalid="ignore"):
                z = convolve(case, spoiled["x"], operands["w"])
                z = np.where(inside & (name == "w"), np.nan, z)
                z = z + case.per_feature(spoiled["bias"]) + spoiled["residual"]
            for activation, got in zip(activations, fused(*spoiled.values())):
                with np.errstate(invalid="ignore"):
                    want = VALUES[activation](z, ALPHA)
                got = np.float64(got)
                if name == "w" and multiplies_padding(dtype):  # NaN in more places
                    assert np.isnan(got)[np.isnan(want)].all()
                    continue
                np.testing.assert_array_equal(np.isnan(got), np.isnan(want), f"{activation} {name} {value}")
                np.testing.assert_array_equal(got[np.isinf(want)], want[np.isinf(want)])


@pytest.mark.parametrize("place", [(0, 0, 0, 3), (2, 7, 6, 0), (1, 14, 12, 39)])
def test_not_finite_in_a_filter_gradient_of_transformed_tiles(place):
    """Winograd's tiles would spread it to taps that do not meet it, and make NaN of infinities."""
    case = CASES["Winograd, odd image"]
    x, dy = np.float32(random(case.x)), np.float32(random(case.y, seed=2))
    run = jax.jit(lambda x, dy: backward(case, x, jnp.zeros(case.w), dy, None, "none", want=("dw",))["dw"])
    for value, name in itertools.product([np.nan, np.inf, -np.inf], ["x", "dy"]):
        spoiled = {"x": x.copy(), "dy": dy.copy()}
        spoiled[name][place if name == "x" else (0, 5, 6, 47)] = value
        with np.errstate(invalid="ignore"):
            want = gradients(case, spoiled["x"], np.zeros(case.w), spoiled["dy"])[1]
        got = np.float64(run(**spoiled))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want), f"{name} {value}")
        np.testing.assert_array_equal(got[np.isinf(want)], want[np.isinf(want)])


@each_kernel
def test_opposite_infinities_make_nan(channels):
    case = Case((2, 64, 64, channels), (1, 1, channels, 16))
    residual = random(case.y).at[1, 2, 3, 4].set(-jnp.inf)
    for activation in VALUES:
        y = forward(case, random(case.x), random(case.w), None, jnp.full(16, jnp.inf), residual, activation)
        assert np.argwhere(np.isnan(y)).tolist() == [[1, 2, 3, 4]]


@each_dtype
@each_kernel
def test_a_nan_before_leaves_no_trace(channels, dtype):
    case = Case((2, 64, 64, channels), (1, 1, channels, 16))
    x, w = random(case.x, dtype), random_filter(case, dtype)
    for activation in VALUES:
        before = forward(case, x, w, activation=activation)
        spoiled = forward(case, x.at[0, 1, 2, 3].set(jnp.nan), w, activation=activation)
        np.testing.assert_array_equal(np.argwhere(np.isnan(spoiled))[:, :3], [[0, 1, 2]] * 16)
        np.testing.assert_array_equal(before, forward(case, x, w, activation=activation))
        np.testing.assert_array_equal(before[1], spoiled[1])


def test_one_convolution_unless_there_is_nan():
    output = printed_by("-c", """
import numpy as np, test_native_conv as t
case = t.Case((2, 64, 64, 12), (1, 1, 12, 16))
x, w = t.random(case.x), t.random(case.w)
for activation in ("relu", "silu", "gelu_tanh"):
    t.forward(case, x, w, activation=activation).block_until_ready()
print("clean", flush=True)
t.forward(case, x.at[0, 0, 0, 0].set(np.nan), w, activation="relu").block_until_ready()
""", ONEDNN_VERBOSE="1")
    clean, spoiled = output.split("clean\n")
    assert (clean.count("exec,cpu,convolution"), spoiled.count("exec,cpu,convolution")) == (3, 2)


@pytest.mark.skipif(AVX512, reason="this CPU has bf16 kernels of oneDNN")
def test_what_is_a_product_in_bf16():
    """One place of the filter and channels last: our own, forward and backward."""
    output = printed_by("-c", """
import jax, test_native_conv as t
for name in ("1x1, odd", "1x1, OIHW", "1x1, 1-D, to NCH", "1x1 strided", "3x3"):
    case = t.CASES[name]
    x, w, dy = t.random(case.x, t.BF16), t.random_filter(case, t.BF16), t.random(case.y, t.BF16)
    jax.block_until_ready((t.forward(case, x, w), t.backward(case, x, w, dy, dy, "none")))
    print(name, flush=True)
""", ONEDNN_VERBOSE="1")
    parts = [part.count("exec,cpu,convolution") for part in re.split(r"^[13]x.*$", output, flags=re.MULTILINE)[:-1]]
    assert parts[:4] == [0, 0, 3, 3] and 0 < parts[4] < 3  # dw of 3x3 by loops of its own; with AVX2 alone more of it


# Images, filter, groups; and how many calls of oneDNN that takes with AVX-512, and without, where sums have to be shorter.
IN_FEW_CALLS = {
    "dense": ((64, 28, 28, 32), (3, 3, 32, 16), 1, 4, None),  # by loops of our own
    "grouped": ((64, 14, 14, 64), (3, 3, 16, 64), 4, 1, 16),
}


@pytest.mark.parametrize("name", IN_FEW_CALLS)
def test_a_filter_gradient_takes_many_images_at_a_time(name):
    """As many as one sum may have, where one at a time would be 64 calls."""
    x, w, groups, wide, narrow = IN_FEW_CALLS[name]
    if not AVX512 and narrow is None:
        pytest.skip("this CPU has no AVX-512")
    output = printed_by("-c", f"""
import jax, test_native_conv as t
case = t.Case({x}, {w}, padding=(1, 1), groups={groups})
x, w, dy = t.random(case.x), t.random_filter(case), t.random(case.y, seed=2)
jax.block_until_ready(t.backward(case, x, w, dy, dy, "none", want=("dw",)))
""", ONEDNN_VERBOSE="1")
    assert len(re.findall("exec,cpu,convolution.*backward_weights", output)) == (wide if AVX512 else narrow)


EMPTY = {
    "no images": Case((0, 8, 8, 4), (3, 3, 4, 6)),
    "no output features": Case((2, 8, 8, 4), (3, 3, 4, 0)),
    "no input features": Case((2, 8, 8, 0), (3, 3, 0, 6)),
    "no pixels but padding": Case((2, 0, 8, 4), (3, 3, 4, 6), padding=(2, 2)),
    "filter too large": Case((2, 2, 8, 4), (3, 3, 4, 6)),
}


@each_dtype
@pytest.mark.parametrize("case", EMPTY.values(), ids=EMPTY.keys())
def test_empty(case, dtype):
    x, w, bias = random(case.x, dtype), random(case.w, dtype), random(case.y[-1], dtype, 1)
    y = forward(case, x, w, None, bias, random(case.y, dtype, 2), "relu")
    want = np.maximum(np.float64(bias) + np.float64(random(case.y, dtype, 2)), 0)
    assert_close(y, np.broadcast_to(want, case.y))
    found = backward(case, x, w, random(case.y, dtype), y, "relu")
    assert not np.any(found["dx"]) and not np.any(found["dw"])
    assert_close(found["db"], np.float64(found["dresidual"]).sum((0, 1, 2)))


def test_refusals_say_what_and_why():
    case = CASES["3x3"]
    x, w, bias = random(case.x), random(case.w), random(64)
    for call, words in [
        (lambda: forward(case, x, w[:, :, :32]), r"w has shape \(3, 3, 32, 64\).*32 input features.*x has 64"),
        (lambda: forward(case, x, w.astype(BF16)), "w has dtype bfloat16, expected float32"),
        (lambda: forward(case, x, w, bias=bias[:5]), r"bias has shape \(5,\), expected \(64,\)"),
        (lambda: forward(case, x, w, residual=x[:1]), r"residual has shape \(1, .*expected \(2, "),
        (lambda: forward(case, x, w, activation="cosine"), 'activation is "cosine", expected one of'),
        (lambda: forward(case, x, w, shape=(2, 14, 14, 65)), r"y has shape .*65\), expected .*64\)"),
        (lambda: forward(Case(case.x, case.w, padding=(-1, 1)), x, w), r"padding_low is \(-1, -1\), expected entries from 0 to"),
        (lambda: forward(case, x, w, lhs_dilation=(2, 2)), r"y has shape \(2, 14, 14, 64\), expected \(2, 27, 27, 64\)"),
        (lambda: forward(case, x, w, lhs_dilation=(2, 2), window_strides=(2, 2)),
         "window_strides is .* with lhs_dilation"),
        (lambda: forward(case, x, w, shape=(2, 29, 27, 64), lhs_dilation=(2, 2), padding_low=(3, 1)),
         "padding 3 and 1 with lhs_dilation, expected at most 2 and 3"),
        (lambda: backward(case, x, w, x, x, "silu"), "not a function of its value"),
    ]:  # fmt: skip
        with pytest.raises(jax.errors.JaxRuntimeError, match="jaxfuse_conv_(fwd|bwd): .*" + words):
            jax.block_until_ready(call())


def test_many_threads_at_once_give_the_same_bits():
    jobs = []
    for name, dtype, activation in itertools.product(["3x3", "depthwise", "NCHW", "stem"], DTYPES, ["relu", "tanh"]):
        case = CASES[name]
        x, w, dy = random(case.x, dtype), random(case.w, dtype), random(case.y, dtype)

        def job(x, w, dy, case=case, activation=activation):
            y = forward(case, x, w, activation=activation)
            return y, backward(case, x, w, dy, y, activation)

        jobs.append((jax.jit(job), (x, w, dy)))
    run = lambda job: jax.tree.map(np.asarray, job[0](*job[1]))
    alone = [run(job) for job in jobs]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, jobs * 3))
    jax.tree.map(np.testing.assert_array_equal, alone * 3, together)
