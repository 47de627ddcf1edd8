"""Depthwise convolutions of sequences, channels first: run channels last, with no transposes between them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxfuse
from compare import as_near_to_the_truth, jit
from exact import in_float64
from jaxfuse.runtime import ffi
from layers import randn

NAMES = ("NCW", "OIW", "NCW")


def depthwise(x, w, spec=NAMES):
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=spec, feature_group_count=x.shape[1])


def network(x, w, v, bias, residual):
    h = jax.nn.silu(depthwise(x, w) + bias[:, None])
    return jax.nn.relu(depthwise(h, v) + residual)


def value_and_gradients(fn, cotangent, *args):
    y, pullback = jax.vjp(fn, *args)
    return y, *pullback(cotangent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_in_a_row(dtype):
    shapes = (2, 24, 37), (24, 1, 5), (24, 1, 3), (24,), (2, 24, 37)
    args = [randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    fused, cotangent = jaxfuse.fuse(network, policy="always"), randn(2, 24, 37, seed=9, dtype=dtype)
    compiled = jit(lambda *args: value_and_gradients(fused, *args)).lower(cotangent, *args).compile()
    plain = functools.partial(value_and_gradients, network)
    as_near_to_the_truth(compiled(cotangent, *args), jit(plain)(cotangent, *args), in_float64(plain, cotangent, *args))
    if ffi.no_onednn() is None and dtype == "float32":
        calls = [line for line in compiled.as_text().splitlines() if "custom_call_target" in line and "jaxfuse_conv" in line]
        assert len(calls) == 4 and all("[2,37,24]" in line and "[2,24,37]" not in line for line in calls)
        assert any(a.split("=")[0].strip() in b for a in calls for b in calls if a is not b)  # the first feeds the second


@pytest.mark.skipif(ffi.no_onednn() is not None, reason=str(ffi.no_onednn()))
def test_only_depthwise_sequences_in_another_layout():
    def kernels(fn, *shapes):
        return [site.kernel for site in jaxfuse.explain(fn, *map(jnp.zeros, shapes), policy="always").fused]

    assert kernels(depthwise, (2, 24, 37), (24, 1, 5)) == ["native"]
    assert kernels(lambda x, w: lax.conv(x, w, (1,), "SAME"), (2, 24, 37), (24, 24, 5)) == ["onednn"]
    image = ("NCHW", "OIHW", "NCHW")
    assert kernels(lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=image, feature_group_count=8), (2, 8, 5, 5), (8, 1, 3, 3)) == ["onednn"]
    last = ("NWC", "WIO", "NWC")
    text = jaxfuse.fuse(lambda x, w: lax.conv_general_dilated(
        x, w, (1,), "SAME", dimension_numbers=last, feature_group_count=24), policy="always").lower(
            jnp.zeros((2, 37, 24)), jnp.zeros((5, 1, 24))).as_text()
    assert "jaxfuse_conv_fwd" in text and "transpose" not in text
