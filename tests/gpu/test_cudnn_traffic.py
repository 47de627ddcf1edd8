"""Convolutions by cuDNN's plans, compiled for an H200 without one: calls, and bytes beside XLA's own code.

    python -m pip install nvidia-cudnn-cu13 jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2     # jax's own version
    JAX_PLATFORMS=cpu python -m pytest -n 0 tests/gpu/test_cudnn_traffic.py

The CUDA library must be built too. Skipped where something is missing.
"""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
    pytest.skip("needs jax-cuda13-plugin and jax-cuda13-pjrt of jax's version", allow_module_level=True)

import cudnn_plans
import jaxfuse
from deviceless import bytes_moved, launches, spec
from jaxfuse.ops.conv.cudnn import TARGET
from jaxfuse.runtime import cuda, ffi, platforms
from jaxfuse.runtime.cudnn import backend

if not any(ffi.installed_file(package, {"libcudnn.so.9"}) for package in backend.PACKAGES):
    pytest.skip("needs nvidia-cudnn-cu13", allow_module_level=True)
if reason := cuda.unavailable(TARGET):
    pytest.skip(reason, allow_module_level=True)

X, W, BIAS = spec((32, 56, 56, 64)), spec((3, 3, 64, 64)), spec((64,), jnp.bfloat16)


def conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def program(x, w, bias, w2, bias2):
    """The second convolution's residual is its input."""
    y = jax.nn.silu(conv(x, w) + bias)
    return jax.nn.gelu(conv(y, w2) + bias2 + y, approximate=False)


def test_an_activation_costs_no_pass_of_its_own(monkeypatch, tmp_path):
    """Results and operands of x's size: 5, where XLA has 9, a reading and a writing for each activation."""
    monkeypatch.setenv("JAXFUSE_CACHE", str(tmp_path))
    cudnn_plans.load_stub()
    args = X, W, BIAS, W, BIAS
    unfused = launches(program, *args)
    with platforms.assumed("cuda"):
        fused = launches(jaxfuse.fuse(program, policy="always"), *args)
    calls = [launch for launch in fused if launch.target == TARGET]
    assert len(calls) == 2 and all(launch.written == 2 * X.size for launch in calls)
    around = bytes_moved(fused) - bytes_moved(calls)
    assert around <= 5 * 2 * 2 * W.size  # the filters' transposes, the biases' casts
    assert bytes_moved(calls) == pytest.approx(5 * 2 * X.size, rel=0.02)
    assert bytes_moved(unfused) == pytest.approx(9 * 2 * X.size, rel=0.02)
