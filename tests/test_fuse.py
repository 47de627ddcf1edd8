"""fuse and explain as a user calls them: signatures, transformations, policies, reports, and what they cannot take."""

import enum
import pathlib
import platform
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from layers import B, W, X
from processes import printed_by, python


pytestmark = pytest.mark.usefixtures("some_kernel")


def block(x, w, b):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + b)


def fuse(fn, **options):
    return jaxfuse.fuse(fn, **({"policy": "always"} | options))


def close(a, b, tolerance=1e-4):
    jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=tolerance, atol=tolerance), a, b)


def kernels(fn, /, *args, **options):
    """How many fused primitives are in the program."""
    return str(jax.make_jaxpr(lambda *args: fn(*args, **options))(*args)).count("jaxfuse_conv[")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: jax.jit(f, donate_argnums=2)], ids=["plain", "jit", "donated"])
def test_plain_and_jitted(wrap):
    fused = fuse(wrap(block))
    close(fused(X, W, B + 0), block(X, W, B))
    close(jax.jit(fused)(X, W, B), block(X, W, B))
    assert kernels(fused, X, W, B) == 1


def test_pytrees_keywords_closures_and_statics():
    def fn(params, x, *, mode, scale=1.0, repeats=1):
        y = block(x, params["w"], params["b"])
        for _ in range(repeats):
            y = y * scale
        return {"mode": y if mode == "train" else -y, "none": None}

    params = {"w": W, "b": B}
    fused = fuse(fn, static_argnames=("mode", "repeats"))
    for options in (dict(mode="train"), dict(mode="test", scale=2.0), dict(mode="test", scale=3.0, repeats=2)):
        close(fused(params, X, **options), fn(params, X, **options))
    assert fused.__name__ == "fn"


@pytest.mark.parametrize("options", [
    dict(name=np.str_("add")), dict(name="add", deep=[{"er": "mul"}]), dict(when=None), dict(fn=jnp.tanh), dict(fn=jax.nn.relu),
    dict(dtype=jnp.float32), dict(dtype=np.dtype("float32")), dict(kind=pathlib.Path), dict(level=enum.Enum("E", "A").A),
    dict(strict="a", unprofitable=1.0, run=2.0, call="call", fn="fn", args="args", kwargs="kwargs")], ids="+".join)
def test_constants_are_part_of_the_signature(options):
    """What cannot change reaches the function as it is, wherever it stands, and another value of it another program."""
    seen = []

    def fn(x, **options):
        seen.append(options)
        return block(x, W, B)

    fused = fuse(fn)
    for _ in range(2):
        close(fused(X, **options), block(X, W, B))
    assert len(seen) == 1 and kernels(fused, X, **options) == 1
    traced = len(seen)
    fused(X, **options, other="value")
    assert len(seen) == traced + 1 and seen[-1]["other"] == "value"
    constants = {name: value for name, value in options.items() if not isinstance(value, float)}
    assert constants.items() <= seen[0].items() if "deep" not in options else seen[0] == options


@pytest.mark.parametrize("arguments", [lambda x: ((x, 3), {}), lambda x: ((x,), dict(n=3))], ids=["position", "keyword"])
def test_donated_beside_static(arguments):
    fn = jax.jit(lambda x, n: block(x, W, B)[..., :4] * n, static_argnames="n", donate_argnames="x")
    x = X + 0
    args, kwargs = arguments(x)
    close(fuse(fn)(*args, **kwargs), 3 * block(X, W, B)[..., :4])
    assert x.is_deleted()


def test_numbers_do_not_compile_anew():
    traces = []

    def fn(x, rate):
        traces.append(1)
        return block(x, W, B) * rate

    fused = fuse(fn)
    for rate in (0.1, 0.2, 0.3):
        close(fused(X, rate), block(X, W, B) * rate)
    assert len(traces) == 1


def test_composes():
    fused = fuse(block)

    def scalar(f):
        return lambda *args: jnp.sum(jnp.sin(f(*args)))

    args, tangents = (X, W, B), (jnp.cos(X), jnp.cos(W), jnp.cos(B))
    close(jax.grad(scalar(fused), (0, 1, 2))(*args), jax.grad(scalar(block), (0, 1, 2))(*args))
    close(jax.jvp(fused, args, tangents), jax.jvp(block, args, tangents))
    close(jax.vmap(fused, (0, None, None))(X[:, None], W, B), jax.vmap(block, (0, None, None))(X[:, None], W, B))
    per_example = jax.vmap(jax.grad(scalar(fused), (0, 1)), (0, None, None))(X[:, None], W, B)
    close(per_example, jax.vmap(jax.grad(scalar(block), (0, 1)), (0, None, None))(X[:, None], W, B))
    close(jax.linearize(fused, *args)[1](*tangents), jax.linearize(block, *args)[1](*tangents))
    hessian = jax.jvp(jax.grad(scalar(fused), 1), args, tangents)
    close(hessian, jax.jvp(jax.grad(scalar(block), 1), args, tangents), 1e-3)


def test_closed_over_tracers():
    close(jax.grad(lambda w: jnp.sum(fuse(lambda x: block(x, w, B))(X) ** 2))(W), jax.grad(lambda w: jnp.sum(block(X, w, B) ** 2))(W))


def test_policies():
    assert jaxfuse.explain(block, X, W, B, policy="always").fused
    assert jaxfuse.explain(block, X, W, B, policy="never").skipped[0].reason == 'policy "never"'
    assert kernels(fuse(block, policy="never"), X, W, B) == 0
    with pytest.raises(ValueError, match="unknown policy 'measurd'; did you mean 'measured'?"):
        jaxfuse.fuse(block, policy="measurd")
    with pytest.raises(ValueError, match="unknown policy"):
        jaxfuse.explain(block, X, W, B, policy="fast")


def test_measured_leaves_tiny_convolutions_alone():
    (site,) = jaxfuse.explain(block, X[:1, :4, :4], W, B).skipped
    assert re.search(r"too small to gain: 9216 operations, measured faster from \d+", site.reason)
    assert jaxfuse.explain(block, jnp.ones((8, 16, 16, 4)), W, B).fused


def test_native_kernels_are_there():
    """Where the package brings them, nothing else in these tests may pass for want of them."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip(f"this machine is {sys.platform} on {platform.machine()}; the native convolution kernels are for Linux on x86-64")
    from jaxfuse.runtime import ffi

    assert {target: ffi.unavailable(target) for target in ffi.TARGETS} == dict.fromkeys(ffi.TARGETS)
    assert ffi.no_onednn() is None


def test_strict():
    close(fuse(block, strict=True)(X, W, B), block(X, W, B))
    with pytest.raises(jaxfuse.FusionError, match="1 sites stay unfused(.|\n)*empty array"):
        fuse(block, strict=True)(X[:0], W, B)


def test_strict_asks_for_kernels_that_exist():
    """What has none in this version is in the report, and no error."""
    def both(x, w, b):
        other = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID", window_dilation=(1, 2, 2, 1))
        return block(x, w, b), other

    (site,) = jaxfuse.explain(both, X, W, B, policy="always").skipped
    assert site.reason == "window_dilation (1, 2, 2, 1): no kernel yet on cpu"
    close(fuse(both, strict=True, policy="always")(X, W, B), both(X, W, B))


def test_equal_functions_with_rules_are_one():
    """A layer of the loss and the same layer of an evaluation beside it: one convolution with its relu, which both read."""
    def step(x, w, b):
        return jax.grad(lambda w: jnp.sin(block(x, w, b)).sum())(w), block(x, w, b).argmax(-1)

    report = jaxfuse.explain(step, X, W, B, policy="always")
    assert [(site.pattern, site.direction) for site in report.fused] == [("conv+bias+relu", "forward"), ("conv+relu", "backward")]
    close(fuse(step)(X, W, B), jax.jit(step)(X, W, B))


@pytest.mark.parametrize("slopes", [(2.0, 3.0), (2.0, np.arange(8.0) + 1)])
def test_functions_with_other_rules_stay_apart(slopes):
    """Two that read the same, and are differentiated otherwise."""
    def with_slope(slope):
        fn = jax.custom_jvp(lambda x: jnp.sin(x))
        fn.defjvps(lambda t, out, x: jnp.asarray(slope, x.dtype) * t)
        return fn

    one, other = map(with_slope, slopes)

    def fn(x, w, b):
        y = block(x, w, b)
        return one(y) + 2 * other(y) + other(y)

    gradient = jax.grad(lambda f, x: f(x, W, B).sum(), argnums=1)
    close(gradient(fuse(fn, policy="always"), X), gradient(fn, X))


def test_report():
    report = jaxfuse.explain(block, jax.ShapeDtypeStruct(X.shape, X.dtype), W, B, policy="always")
    (site,) = report.fused
    assert (site.pattern, site.direction, site.kernel, site.reason) == ("conv+bias+relu", "forward", "onednn", "")
    assert site.shapes == (X.shape, W.shape) and site.dtypes == ("float32", "float32")
    assert site.bytes_saved > 0
    file, line = site.source.rsplit(":", 1)
    assert pathlib.Path(file).name == "test_fuse.py"
    assert "conv_general_dilated" in pathlib.Path(__file__).read_text().splitlines()[int(line) - 1]
    assert "conv+bias+relu" in str(report) and "onednn" in str(report)
    assert "nothing to fuse" in str(jaxfuse.explain(jnp.sin, X))


def test_log(tmp_path):
    script = "import jax, jaxfuse, test_fuse as t; jaxfuse.fuse(t.block, policy='always')(t.X, t.W, t.B)"
    said = python("-c", script, JAXFUSE_LOG="1").stderr
    assert "jaxfuse: conv+bias+relu forward float32[2, 8, 8, 4]" in said and "fused, onednn" in said


def test_what_cannot_be_traced_raises():
    def fn(image):
        return float(image[0, 0, 0, 0])  # needs a concrete value

    for strict in (False, True):
        with pytest.raises(jax.errors.ConcretizationTypeError, match="function fn at .*(.|\n)*argument image"):
            fuse(fn, strict=strict)(X)
    (site,) = jaxfuse.explain(fn, X).skipped
    assert site.reason.startswith("the function cannot be traced for these arguments: ConcretizationTypeError")


def test_deep_programs():
    """Neither matching nor evaluation recurses along the program."""

    def fn(x):
        for _ in range(3000):
            x = jnp.sin(x)
        return block(x, W, B)

    close(jax.eval_shape(fuse(fn), X).shape, (2, 8, 8, 8))


def test_import_has_no_side_effects():
    script = "import jaxfuse, sys; from jax._src import xla_bridge; assert not xla_bridge._backends; " \
             "assert 'flax' not in sys.modules and 'matplotlib' not in sys.modules"
    printed_by("-c", script)
