"""Programs for a platform that this machine does not have: what is fused for it, and what its lowering has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from jaxfuse import ops
from jaxfuse.runtime import cuda, ffi, platforms
from layers import conv

LARGE, SMALL = (32, 56, 56, 64), (2, 8, 8, 64)


@pytest.fixture(autouse=True)
def without_cuda_library(monkeypatch):
    """Whether it is built here or not."""
    monkeypatch.setattr(cuda, "unavailable", lambda target: "not asked for")


def normalised(x, gamma, beta, axes=(0, 1, 2)):
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * gamma + beta


def layer(x, w, gamma, beta):
    return jax.nn.relu(normalised(jax.nn.relu(conv(x, w) + beta), gamma, beta))


def arguments(shape):
    types = shape, (1, 1, 64, 64), (64,), (64,)
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in types]


def sites(report):
    return [(s.pattern, s.kernel, s.reason) for s in sorted((*report.fused, *report.skipped), key=lambda s: s.pattern)]


def test_explain_for_cuda_without_a_gpu():
    batch_norm, convolution = sites(jaxfuse.explain(layer, *arguments(LARGE), platform="cuda"))
    assert batch_norm == ("bn+relu", "plain JAX", "")
    assert convolution[0] == "conv+bias+relu" and not convolution[1]
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


@pytest.mark.parametrize("shape, dtype, centered, library, said", [
    ((8192, 768), "bfloat16", True, True, ""), ((8192, 768), "float16", True, True, ""), ((1 << 14, 1 << 12), "bfloat16", False, True, ""),
    ((8192, 768), "bfloat16", True, False, "without its kernel no gain on cuda: not asked for"),
    ((512, 768), "bfloat16", True, True, "too small to gain on cuda: 2.4 MB less"), ((8192, 768), "float32", True, True, "float32 has not"),
    ((8192, 768), "bfloat16", False, True, "RMS norm is no faster"), ((512, 16384), "bfloat16", True, True, "the CUDA kernel takes"),
])  # fmt: skip
def test_norms_of_rows_on_cuda(monkeypatch, shape, dtype, centered, library, said):
    def norm(x, gamma, beta):
        wide = x.astype(jnp.float32)
        wide = wide - wide.mean(-1, keepdims=True) if centered else wide
        y = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6) * gamma
        return (y + beta if centered else y).astype(x.dtype)

    if library:
        monkeypatch.setattr(cuda, "unavailable", lambda target: None)
    types = jax.ShapeDtypeStruct(shape, dtype), *[jax.ShapeDtypeStruct(shape[1:], jnp.float32)] * 2
    ((_, kernel, reason),) = sites(jaxfuse.explain(norm, *types, platform="cuda"))
    assert said in reason if said else (kernel, reason) == ("native", "")
    assert bool(said) == (not kernel)


def channels_first(x, z, gamma, beta):
    x, z, gamma, beta = x.transpose(0, 3, 1, 2), z.transpose(0, 3, 1, 2), gamma[:, None, None], beta[:, None, None]
    return jax.nn.relu(normalised(x, gamma, beta, (0, 2, 3)) + normalised(z, beta, gamma, (0, 2, 3)))


def pooled(x, z, gamma, beta, init, combine):
    return lax.reduce_window(jax.nn.relu(normalised(x, gamma, beta)), init, combine, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


FUSED_BY_XLA = {
    "of two normalised values the other": lambda x, z, gamma, beta: jax.nn.relu(normalised(x, gamma, beta) + normalised(z, beta, gamma)),
    "likewise, channels first": channels_first,
    "a max pool": lambda *args: pooled(*args, -jnp.inf, lax.max),
}
IN_MEMORY = {
    "a residual": lambda x, z, gamma, beta: jax.nn.relu(normalised(x, gamma, beta) + z),
    "a residual per channel": lambda x, z, gamma, beta: jax.nn.relu(normalised(x, gamma, beta) + (z - beta) * gamma),
    "an activated one": lambda x, z, gamma, beta: jax.nn.relu(normalised(x, gamma, beta) + jax.nn.relu(normalised(z, beta, gamma))),
    "a sum pool": lambda *args: pooled(*args, 0.0, lax.add),
}


@pytest.mark.parametrize("kernel, name, policy", [
    *[("plain JAX", name, "measured") for name in FUSED_BY_XLA], *[("native", name, "measured") for name in IN_MEMORY],
    *[("native", name, "always") for name in FUSED_BY_XLA]])
def test_what_stands_beside_a_batch_norm_on_cuda(monkeypatch, kernel, name, policy):
    """XLA computes the neighbour along with it, for less than our kernels move, that read it from memory; gradients too. Policy
    "always" does not ask."""
    monkeypatch.setattr(cuda, "unavailable", lambda target: None)
    function, (x, _, gamma, beta) = (FUSED_BY_XLA | IN_MEMORY)[name], arguments(LARGE)
    step = jax.grad(lambda *args: (function(*args) ** 2).sum(), range(4))
    for program in (function, step):
        report = jaxfuse.explain(program, x, x, gamma, beta, platform="cuda", policy=policy)
        found = {(s.kernel, s.direction) for s in report.fused if s.pattern.startswith("bn")}
        assert found == {(kernel, direction) for direction in ("forward", "backward")[: 1 + (program is step)]}, report


def test_float16_on_cuda_has_kernels_of_its_own(monkeypatch):
    monkeypatch.setattr(cuda, "unavailable", lambda target: None)
    x, w, *vectors = (jax.ShapeDtypeStruct(a.shape, jnp.float16) for a in arguments((64, *LARGE[1:])))
    assert sites(jaxfuse.explain(layer, x, w, *vectors, platform="cuda"))[0] == ("bn+relu", "native", "")


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_platforms_without_kernels(platform):
    report = jaxfuse.explain(layer, *arguments(LARGE), platform=platform)
    assert not report.fused and {s.reason for s in report.skipped} == {f"no kernel yet on {platform}"}


def test_unknown_platform():
    with pytest.raises(ValueError, match="unknown platform 'gpu'.*'cuda'"):
        jaxfuse.explain(layer, *arguments(SMALL), platform="gpu")


def test_a_convolution_stays_as_it_is_on_cuda():
    x, w, _, beta = arguments(LARGE)
    with platforms.assumed("cuda"):
        fused = jax.make_jaxpr(jaxfuse.fuse(lambda x, w, beta: jax.nn.relu(conv(x, w) + beta)))(x, w, beta)
    assert "jaxfuse" not in str(fused) and "conv_general_dilated" in str(fused)


def test_a_call_goes_by_where_its_arguments_are(monkeypatch):
    """And is traced anew for another platform."""
    at, seen = ["cuda"], []
    monkeypatch.setattr(platforms, "committed", lambda tree: at[0])
    call = jaxfuse.fuse(lambda x: (seen.append(platforms.current()), x)[1])
    for at[0] in ("cuda", None, "cpu", "cuda"):
        call(jnp.zeros(3))
    assert seen == ["cuda", "cpu"]


@pytest.mark.parametrize("platform, native", [("cuda", False), ("tpu", False), ("cpu", True)])
def test_kernels_are_chosen_when_lowered(some_kernel, platform, native):
    x = jnp.ones((2, 4, 4, 8))
    run = jax.jit(lambda x, g: jax.grad(lambda x: ops.batch_norm(x, g, g, x, activation="relu")[0].sum())(x))
    text = run.trace(x, jnp.ones(8)).lower(lowering_platforms=(platform,)).as_text()
    assert ("custom_call @jaxfuse" in text) == (native and not ffi.unavailable("jaxfuse_batch_norm_apply"))
    assert np.all(np.isfinite(run(x, jnp.ones(8))))
