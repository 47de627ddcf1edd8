"""The contract of every op: op × kernel × case × dtype against the float64 truth and against the same thing unfused."""

import dataclasses
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from arrays import array
from cases import CASES, CORE
from compare import as_float64, by_xla, distance, fused, jit, kinds, pairs, unfused, value_and_gradients, with_cotangents
from jaxfuse import ops
from jaxfuse.ops.activations import TABLE as ACTIVATIONS, named
from jaxfuse.runtime import ffi
from layers import conv
from processes import printed_at

DTYPES = ["float32", "bfloat16"]
RECURRENT = ("lstm", "gru")


EVERY = [*[("installed", name) for name in CASES], *[("reference", name) for name in CORE]]  # the reference is plain JAX
IN_HALVES = dict.fromkeys([*CORE, *(name for name, case in CASES.items() if case.module == "norm")])
ROWS = [*[(*row, dtype) for row in EVERY for dtype in DTYPES],
        *[(kernel, name, "float16") for kernel in ("installed", "reference") for name in IN_HALVES]]
ROUNDING = dict(float32=5e-7, bfloat16=2e-3, float16=3e-4)  # of the result alone


@pytest.mark.parametrize("kernel, name, dtype", ROWS, indirect=["kernel"])
def test_as_close_to_the_truth_as_unfused(name, dtype, kernel):
    case = CASES[name]
    args = with_cotangents(case, case.inputs(dtype))
    run, native = compiled(case, kernel, *args)
    got, (plain, exact) = run(*args), by_xla(case, dtype)
    for value, unfused_value, true in pairs(got, plain, exact):
        assert value.dtype == unfused_value.dtype
        assert distance(value, true) <= 1.5 * distance(unfused_value, true) + ROUNDING[dtype]
    summed = case.module == "norm" and "residual" in case.shapes  # the sum is rounded too
    if native and dtype == "bfloat16" and not summed and case.op not in RECURRENT:  # those round at every step
        y, true = np.asarray(jit(case.fused)(args[0])[0], np.float64), np.asarray(exact[0][0])
        one_rounding = 2.0**-8 * np.abs(true) + 2e-5 * np.abs(true).max()
        assert (np.abs(y - true) <= one_rounding).all()
    for first, second in pairs(got, run(*args)):
        np.testing.assert_array_equal(first, second, "from one run to the next")


def compiled(case, kernel, *args):
    """Forward and backward, and whether they are native: they must be if the kernels take the case."""
    lowered = fused(case).lower(*args)
    if kernel == "installed" and case.module == "conv" and ffi.no_onednn():
        pytest.skip(f"some are XLA's: {ffi.no_onednn()}")
    forward, backward = targets(case.module)
    native = kernel == "installed" and not case.refused and forward in ffi.TARGETS and ffi.unavailable(forward) is None
    text = lowered.as_text()
    plain_gradient = "mean" in case.shapes  # of a batch norm with given statistics: no kernel for it
    assert [target in text for target in (forward, backward)] == [native, native and not plain_gradient and backward in ffi.TARGETS]
    return lowered.compile(), native


def targets(module):
    """Its kernels' names, forward and backward; an op need not have them."""
    ways = ("apply", "bwd_apply") if module == "batch_norm" else ("fwd", "bwd")
    return [f"jaxfuse_{module}_{way}" for way in ways]


@pytest.mark.parametrize("name", CORE)
def test_derivatives_by_finite_differences(name):
    """The rules, in float64, hence of the reference; the kernels are held to the truth above."""
    case = CASES[name]
    with jax.enable_x64(True):
        arrays = as_float64(case.inputs())
        order = 1 if case.op in RECURRENT else 2  # a loop's second derivatives take 15 s to compile
        check_grads(jax.jit(case.fused), (arrays,), order=order, modes=("fwd", "rev"), atol=1e-4, rtol=1e-4)


NAN_AND_INF = [np.nan, np.inf, -np.inf]
SPECIAL = [*NAN_AND_INF, 0.0, -0.0, 6.0, 3.0, -3.0, 1e4, -1e4]  # every tie of the activations is among them


def one_by_one(x):
    return "conv-1x1_residual_only", dict(w=jnp.ones((1, 1, 1, 1), x.dtype), residual=jnp.zeros_like(x)), {}


def identity_layer(x):
    return "dense-residual_tanh", dict(w=jnp.ones((1, 1), x.dtype), residual=jnp.zeros_like(x)), {}


def normalized(x):
    ones = jnp.ones(1)
    return "batch_norm-given_statistics", dict(gamma=ones, beta=0 * ones, mean=0 * ones, var=ones), dict(epsilon=0.0)


def normalized_residual(x):
    name, arrays, options = normalized(x)
    return name, arrays | dict(residual=jnp.zeros_like(x)), options


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [one_by_one, identity_layer, normalized, normalized_residual])
def test_every_activation_at_ties_nan_and_inf(layer, dtype, kernel):
    """Values and derivatives, of a layer that computes activation(x)."""
    x = jnp.asarray(SPECIAL, dtype).reshape(1, 2, -1, 1)
    name, arrays, options = layer(x)
    arrays, ones = arrays | dict(x=x), (jnp.ones_like(x),)

    def each(function):
        def of(activation):
            case = dataclasses.replace(CASES[name], options=options | dict(alpha=0.3, activation=activation))
            return value_and_gradients(getattr(case, function), arrays, ones)

        return jit(lambda: {activation: of(activation) for activation in ACTIVATIONS})()

    got, expected = each("fused"), each("unfused")
    for activation in ACTIVATIONS:
        for what, (value, plain) in zip(("y", *sorted(arrays)), pairs(got[activation], expected[activation])):
            if (layer, dtype, activation, what) == (one_by_one, "bfloat16", "relu_squared", "x"):
                continue  # its derivative at Inf is Inf, which oneDNN's bf16 gradients may spread
            close(value, plain, f"{activation}: {what}", x.dtype)


PLANTED = [("batch_norm-residual_relu", "x"), ("batch_norm-residual_relu", "residual"), ("lstm-sequence", "x"), ("gru-sequence", "x"),
           ("gru-resets_first", "x")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, where", PLANTED)
def test_nan_and_inf(name, where, dtype, kernel):
    """One in each of three channels, or in one step of three rows: there alone, from that step on, and in every statistic, as unfused."""
    case = CASES[name]
    arrays, cts = with_cotangents(case, case.inputs(dtype))
    for i, value in enumerate(NAN_AND_INF):
        arrays[where] = arrays[where].at[(2, i, 0) if case.op in RECURRENT else (1, 2, 3, i)].set(value)
    got = fused(case)(arrays, cts)
    for value, plain in pairs(got, unfused(case)(arrays, cts)):
        np.testing.assert_array_equal(kinds(value), kinds(plain))
    assert np.isnan(np.asarray(got[0][0], np.float32)).any()


def close(value, expected, what, dtype):
    rtol = 2e-2 if dtype == jnp.bfloat16 else 1e-4  # of sums of bfloat16 numbers too
    value, expected = (np.asarray(a, np.float32) for a in (value, expected))
    np.testing.assert_allclose(value, expected, rtol, rtol, err_msg=what)


@pytest.mark.parametrize("name", [
    "conv-3x3_residual", "batch_norm-residual_relu", "batch_norm-given_statistics", "dense-residual_tanh", "layer_norm-residual",
    "group_norm-images_silu", "lstm-sequence", "gru-sequence", "attention-plain"])
def test_empty_batch(name, kernel):
    case = CASES[name]
    shapes = {n: (0, *shape[1:]) if n in ("x", "residual", "h0", "c0", *"qkv") else shape for n, shape in case.shapes.items()}
    if case.op in RECURRENT:
        shapes["x"] = (case.shapes["x"][0], 0, case.shapes["x"][2])
    case = dataclasses.replace(case, name="empty", shapes=shapes)
    arrays, cts = with_cotangents(case, case.inputs())
    for value, plain in pairs(fused(case)(arrays, cts), unfused(case)(arrays, cts)):
        np.testing.assert_array_equal(value, plain)


@pytest.mark.parametrize("name", [
    "conv-scale_bias_residual", "batch_norm-residual_relu", "dense-residual_tanh", "lstm-sequence", "gru-resets_first",
    "attention-grouped"])
def test_float64_runs_by_reference(name, kernel):
    case = CASES[name]
    with jax.enable_x64(True):
        args = with_cotangents(case, case.inputs("float64"))
        run, native = compiled(dataclasses.replace(case, refused="float64"), kernel, *args)
        for value, plain in pairs(run(*args), unfused(case)(*args)):
            assert value.dtype == plain.dtype and distance(value, plain) < 1e-6


REFUSED = {name: case.refused for name, case in CASES.items() if case.refused}


@pytest.mark.parametrize("name, why", REFUSED.items())
@pytest.mark.parametrize("kernel", ["installed"], indirect=True)
def test_refusals_say_why(name, why, kernel):
    case = CASES[name]
    if unavailable := ffi.unavailable(targets(case.module)[0]):
        pytest.skip(unavailable)
    (equation,) = jax.make_jaxpr(case.fused)(case.inputs()).eqns
    op = importlib.import_module(f"jaxfuse.ops.{case.module}").OP
    kernel, reason = op.forward.kernel(equation.params["config"], [v.aval for v in equation.invars])
    assert kernel is None and why in reason


@pytest.mark.parametrize("kernel, name", EVERY, indirect=["kernel"])
def test_autodiff_keeps_inputs_statistics_and_outputs(name, kernel):
    """Or one bit for each element, of a max pool one byte for each window; nothing else from inside the op."""
    case = CASES[name]
    arrays = case.inputs()
    (y, *statistics), vjp = jax.vjp(case.fused, arrays)
    channels = next((a.size for a in arrays.values() if a.ndim == 1), 1)
    small = max(channels, y.size // 2) if case.module == "norm" else channels  # statistics of each row are
    kept = sorted(leaf.nbytes for leaf in jax.tree.leaves(vjp) if leaf.size > small)
    if "scale" in arrays:  # goes into w
        kept.remove(arrays["w"].nbytes)
    allowed = [arrays[n].nbytes for n in ("x", "w") if n in arrays]
    if case.options.get("activation"):
        if case.op in ("conv", "dense"):
            allowed += [y.nbytes]
        elif case.op == "batch_norm" and "residual" in arrays:
            masked = named(case.options["activation"], case.options.get("alpha", 0.0)).is_mask
            allowed += [y.size // channels * -(-channels // 8) if masked else arrays["residual"].nbytes]
    if case.op == "max_pool":
        allowed += [y.size]
    if case.op == "global_average_pool":
        allowed = []
    if case.op == "attention":  # two numbers of each row, too
        allowed = [a.nbytes for a in (*arrays.values(), y, *[case.options[n] for n in ("mask", "factor") if n in case.options])]
        allowed += [4 * y.size // y.shape[-1]] * 2
    if case.op in RECURRENT:  # also h, c and the gates of every step, and the first states
        gates, states = 3 if case.options.get("reset_after") is False else 4, 2 if case.op == "lstm" else 1
        allowed += [arrays["w_x"].nbytes, arrays["w_h"].nbytes, gates * y.nbytes]
        allowed += states * [y.nbytes, y[0].nbytes]
    if case.op != "batch_norm":  # whose mask of bits is small, too
        allowed = [nbytes for nbytes in allowed if nbytes > 4 * small]
    assert kept == sorted(allowed)


def test_attention_where_nothing_is_left(kernel):
    """Masked by -Inf a row of nothing is NaN, as unfused; keys before that were met count no more."""
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 600, 1, 4)) for i in range(3))
    bias = jnp.where(jnp.arange(600) < jnp.arange(600)[:, None] - 300, 0.0, -jnp.inf)
    made = jax.jit(ops.attention)(q, k, v, bias)
    (plain,) = CASES["attention-plain"].unfused(dict(q=q, k=k, v=v, bias=bias))
    np.testing.assert_allclose(made, plain, 1e-5, 1e-5)
    assert np.isnan(made[:, :301]).all() and np.isfinite(made[:, 301:]).all()


def test_batch_statistics_far_from_zero_beside_a_corner_that_is_zero(kernel):
    x = np.float32(1000) + np.random.default_rng(0).standard_normal((4, 9, 9, 3), np.float32)
    x[:, 0, 0] = 0  # as of padded images: no guess of the mean
    _, mean, var = jax.jit(ops.batch_norm)(x, jnp.ones(3), jnp.zeros(3))
    truth = x.astype(np.float64)
    np.testing.assert_allclose(mean, truth.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(var, truth.var((0, 1, 2)), rtol=1e-6)


def test_groups_of_the_batch(kernel):
    x, w, dy = (jax.random.normal(jax.random.key(0), shape) for shape in [(6, 5, 5, 4), (3, 3, 4, 6), (2, 5, 5, 6)])
    made, plain = (value_and_gradients(lambda a: (f(*a, batch_group_count=3),), (x, w), (dy,)) for f in (ops.conv, conv))
    for got, wanted in pairs(made, plain):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


# What is compiled for every instruction set, but for what has tests of its own; of the float32 program of the same numbers.
LIMITS = {
    "norm": dict(float32=2e-6, bfloat16=1e-2, float16=2e-3),
    "attention": dict(float32=3e-6, bfloat16=1.5e-2, float16=3e-3),
}


@pytest.mark.costly
@pytest.mark.skipif(ffi.unavailable("jaxfuse_norm_fwd") is not None, reason="the native module is not built")
@pytest.mark.parametrize("level", ["portable", "avx2", "avx512"])
def test_every_instruction_set(level):
    errors = json.loads(printed_at(level, __file__))
    assert all(errors[module][dtype] < limit for module in LIMITS for dtype, limit in LIMITS[module].items()), errors


def worst(module, dtype):
    """The largest error of any output and gradient of any case; but where a sign within rounding of 0 counts."""
    cases = [c for c in CASES.values() if c.module == module and (dtype == "float32" or "relu" not in c.name)]
    given = [with_cotangents(case, case.inputs(dtype)) for case in cases]
    made = jit(lambda given: [value_and_gradients(case.fused, *args) for case, args in zip(cases, given)])(given)
    wide = [unfused(case)(*jax.tree.map(lambda a: array(a, jnp.float32), args)) for case, args in zip(cases, given)]
    return max(float(distance(a, b)) for a, b in pairs(made, wide))


if __name__ == "__main__":
    print(json.dumps({module: {dtype: worst(module, dtype) for dtype in limits} for module, limits in LIMITS.items()}))
