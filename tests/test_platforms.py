"""Programs for a platform that this machine does not have: what is fused for it, and what its lowering has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from jaxfuse import cuda, ops, platforms, signature

LARGE, SMALL = (32, 56, 56, 64), (2, 8, 8, 64)


def layer(x, w, gamma, beta):
    x = jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + beta)
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5) * gamma + beta)


def arguments(shape):
    types = shape, (1, 1, 64, 64), (64,), (64,)
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in types]


def sites(report):
    return [(s.pattern, s.kernel, s.reason) for s in sorted((*report.fused, *report.skipped), key=lambda s: s.pattern)]


def test_explain_for_cuda_without_a_gpu():
    batch_norm, convolution = sites(jaxfuse.explain(layer, *arguments(LARGE), platform="cuda"))
    assert batch_norm == ("bn+relu", "plain JAX", "")
    assert convolution[0] == "conv+bias+relu" and not convolution[1]


def test_what_gains_too_little_on_cuda():
    batch_norm, _ = sites(jaxfuse.explain(layer, *arguments(SMALL), platform="cuda"))
    assert batch_norm[2] == "too small to gain on cuda: 0.061 MB less to move, worth it from 16"


def test_norms_of_places_stay_on_cuda():
    def group_norm(x, gamma, beta):
        grouped = x.reshape(*x.shape[:-1], 8, 8)
        mean, var = (f((1, 2, 4), keepdims=True) for f in (grouped.mean, grouped.var))
        return ((grouped - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape) * gamma + beta

    x, _, gamma, beta = arguments(LARGE)
    ((_, kernel, reason),) = sites(jaxfuse.explain(group_norm, x, gamma, beta, platform="cuda"))
    assert not kernel and reason == "norm (places) has not been measured on cuda, and its bytes do not speak for it"


def test_depthwise_convolutions_on_cuda(monkeypatch):
    """With something after them; what bytes do not speak for stays with XLA."""
    monkeypatch.setattr(cuda, "unavailable", lambda target: None)

    def convolved(x, w, **options):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=64, **options)

    def activated(x, w, bias):
        return jax.nn.relu6(convolved(x, w) + bias)

    def gradient(x, w, bias):
        return jax.grad(lambda *args: (activated(*args) ** 2).sum(), (0, 1, 2))(x, w, bias)

    def types(shape=LARGE, window=3):
        return [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (window, window, 1, 64), (64,))]

    def found(function, *args):
        return sites(jaxfuse.explain(function, *args, platform="cuda"))

    assert found(activated, *types()) == [("conv+bias+relu6", "depthwise", "")]
    assert sorted(found(gradient, *types())) == [("conv+bias+relu6", "depthwise", "")] * 2
    assert found(activated, *types(SMALL))[0][2] == "too small to gain on cuda: 0.066 MB less to move, worth it from 16"
    assert found(activated, *types(window=5))[0][2].startswith("a window of 25 places has not been measured on cuda")
    assert found(convolved, *types()[:2])[0][2] == "XLA makes one kernel of it"


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_platforms_without_kernels(platform):
    report = jaxfuse.explain(layer, *arguments(LARGE), platform=platform)
    assert not report.fused and {s.reason for s in report.skipped} == {f"no kernel yet on {platform}"}


def test_unknown_platform():
    with pytest.raises(ValueError, match="unknown platform 'gpu'.*'cuda'"):
        jaxfuse.explain(layer, *arguments(SMALL), platform="gpu")


def test_a_convolution_stays_as_it_is_on_cuda():
    def convolution(x, w, beta):
        return jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + beta)

    x, w, _, beta = arguments(LARGE)
    with platforms.assumed("cuda"):
        fused = jax.make_jaxpr(jaxfuse.fuse(convolution))(x, w, beta)
    assert "jaxfuse" not in str(fused) and "conv_general_dilated" in str(fused)


def test_a_call_goes_by_where_its_arguments_are(monkeypatch):
    """And is traced anew for another platform."""
    at, seen = ["cuda"], []
    monkeypatch.setattr(platforms, "committed", lambda tree: at[0])
    monkeypatch.setattr(signature.private, "jit_options", lambda fn: None)
    call = signature.compiled(lambda x: x, lambda x: (seen.append(platforms.current()), x)[1], None)
    for at[0] in ("cuda", None, "cpu", "cuda"):
        call(jnp.zeros(3))
    assert seen == ["cuda", "cpu"]


@pytest.mark.parametrize("platform, native", [("cuda", False), ("tpu", False), ("cpu", True)])
def test_kernels_are_chosen_when_lowered(some_kernel, platform, native):
    x = jnp.ones((2, 4, 4, 8))
    run = jax.jit(lambda x, g: jax.grad(lambda x: ops.batch_norm(x, g, g, x, activation="relu")[0].sum())(x))
    text = run.trace(x, jnp.ones(8)).lower(lowering_platforms=(platform,)).as_text()
    assert native or "custom_call @jaxfuse" not in text
    assert np.all(np.isfinite(run(x, jnp.ones(8))))
