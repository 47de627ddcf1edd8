"""What XLA's code for an H200 moves, counted without a device: fused programs keep to a budget, beside what they were unfused.

    JAX_PLATFORMS=cpu python -m pytest -n 0 tests/gpu/test_traffic.py

docs/gpu.md says what that needs. tests/gpu/resnet50_step.py counts a whole train step, in minutes.
"""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax import lax

if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
    pytest.skip("needs jax-cuda13-plugin and jax-cuda13-pjrt of jax's version", allow_module_level=True)

import jaxfuse
import stand_in
from benchmarks.gpu_programs import bn_add_relu, bn_relu, layer_norm, normalised
from deviceless import bytes_moved, launches, spec
from jaxfuse.ops.batch_norm import OP as BATCH_NORM
from jaxfuse.ops.batch_norm_grad import DX, SUMS
from jaxfuse.ops.norm import OP as NORM
from jaxfuse.runtime import cuda, platforms

IMAGES, ROWS = (128, 56, 56, 256), (16384, 4096)
OURS = "jaxfuse_"


def residual_block(x, w, v, u, gamma, beta):
    """Two 3×3 convolutions with their batch norms, the identity, and the first convolution of the next block."""
    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    y = bn_relu(conv(x, w), gamma, beta)
    return conv(bn_add_relu(conv(y, v), x, gamma, beta), u)


def channels_first(x, w, v, u, gamma, beta):
    """The residual block in NCHW."""
    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "HWIO", "NCHW"))

    def norm(x):
        mean, var = (f((0, 2, 3), keepdims=True) for f in (x.astype(jnp.float32).mean, x.astype(jnp.float32).var))
        return ((x - mean) * lax.rsqrt(var + 1e-5) * gamma[:, None, None] + beta[:, None, None]).astype(x.dtype)

    y = jax.nn.relu(norm(conv(x, w)))
    return conv(jax.nn.relu(norm(conv(y, v)) + x), u)


def max_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def stem(image, w, v, u, gamma, beta):
    """ResNet's first layers: a batch norm under a max pool, and two normalised branches of what that gives, added."""
    def conv(x, w, stride=1):
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    y = bn_relu(conv(image, w, 2), gamma[:64], beta[:64])
    y = max_pool(y)
    return bn_add_relu(conv(y, v), normalised(conv(y, u), gamma, beta), gamma, beta)


FULL, WEIGHTS = spec(IMAGES), spec((3, 3, 256, 256))
VECTOR, FEATURES = spec(IMAGES[-1:], jnp.float32), spec(ROWS[-1:], jnp.float32)
PROGRAMS = {
    "bn_add_relu": (bn_add_relu, (FULL, FULL, VECTOR, VECTOR)),
    "bn_relu": (bn_relu, (FULL, VECTOR, VECTOR)),
    "layer_norm": (layer_norm, (spec(ROWS), FEATURES, FEATURES)),
    "max_pool": (max_pool, (FULL,)),
    "stem": (stem, (spec((128, 224, 224, 3)), spec((7, 7, 3, 64)), *[spec((1, 1, 64, 256))] * 2, VECTOR, VECTOR)),
    "residual_block": (residual_block, (FULL, WEIGHTS, WEIGHTS, WEIGHTS, VECTOR, VECTOR)),
    "channels_first": (channels_first, (spec((128, 256, 56, 56)), WEIGHTS, WEIGHTS, WEIGHTS, VECTOR, VECTOR)),
}


def forward(function):
    """What a train step's forward pass computes: the value, and what else than the arguments is kept for the gradient."""
    def run(*args):
        y, pullback = jax.vjp(function, *args)
        return y, [leaf for leaf in jax.tree.leaves(pullback) if not any(leaf is arg for arg in args)]

    return run


def backward(function, args):
    """(the gradient of what `forward` kept, its arguments)"""
    def of(*args):
        return jax.vjp(function, *args)[1]

    pullback = jax.eval_shape(of, *args)
    kept, tree = jax.tree.flatten(pullback)
    y = jax.eval_shape(function, *args)
    run = lambda ct, *kept: jax.tree.unflatten(tree, kept)(ct)
    return run, [spec(leaf.shape, leaf.dtype) for leaf in (y, *kept)]


def per_element(found, x):
    """Bytes moved by what is not a convolution."""
    return bytes_moved([f for f in found if "conv" not in f.target]) / x.size


def moves(found) -> int:
    """How many launches only move a large tensor."""
    return sum(f.moved > 2 * FULL.size and (f.op in ("copy", "transpose") or "transpose" in f.name) for f in found)


# Bytes per bf16 element (forward, backward) by plain JAX and by the kernels' calls. Least possible in two passes: bn+add+relu
# 8.125 and 12.25, bn+relu 6 and 10; layer norm 4 and 6; max pool 2.75 and 2.75. Where statistics are kept XLA takes 6 for the
# forward layer norm.
BUDGET = {
    "bn_add_relu": dict(plain=(8.2, 12.4), native=(8.2, 12.4)),
    "bn_relu": dict(plain=(6.1, 10.1), native=(6.1, 10.1)),
    "layer_norm": dict(plain=(6.1, 10.2), native=(4.1, 6.2)),
    "max_pool": dict(plain=(2.8, 2.8), native=(2.8, 2.8)),
}
BATCH_NORM_CALLS = tuple(f"jaxfuse_batch_norm_{stage}" for stage in ("stats", "apply", "bwd_stats", "bwd_apply"))
CALLS = {
    "bn_add_relu": BATCH_NORM_CALLS, "bn_relu": BATCH_NORM_CALLS, "layer_norm": ("jaxfuse_norm_fwd", "jaxfuse_norm_bwd"),
    "max_pool": (),
}  # fmt: skip


STAGES = (BATCH_NORM.forward, BATCH_NORM.backward, SUMS, DX, NORM.forward, NORM.backward)


@pytest.fixture(params=["plain", "native"])
def by(request, monkeypatch):
    """plain: as where no CUDA library is built. native: with its calls. Where it is not built, handlers of the CPU stand in for
    its own: only shapes matter here."""
    if request.param == "native":
        if reason := stand_in.register():
            pytest.skip(reason)
        monkeypatch.setattr(cuda, "unavailable", lambda target: None)
    for stage in STAGES:
        own = (k for k in stage.kernels if k.platform == "cuda" and (request.param == "native" or not k.run))
        monkeypatch.setattr(stage, "kernels", tuple(own))
    jax.clear_caches()
    with platforms.assumed("cuda"):
        yield request.param
    jax.clear_caches()


@pytest.mark.parametrize("name", BUDGET)
def test_budget(name, by):
    function, args = PROGRAMS[name]
    fused = jaxfuse.fuse(function, policy="always")
    run, kept = backward(fused, args)
    there, back = launches(forward(fused), *args), launches(run, *kept)
    found = per_element(there, args[0]), per_element(back, args[0])
    assert all(f <= budget for f, budget in zip(found, BUDGET[name][by], strict=True)), found
    calls = [f.target for f in (*there, *back) if f.target.startswith(OURS)]
    assert calls == list(CALLS[name]) * (by == "native")
    assert not [f for f in (*there, *back) if f.op in ("copy", "transpose") and f.moved > args[0].size / 10]


@pytest.mark.parametrize("name, budget", [
    ("residual_block", dict(plain=0.85, native=0.88)),  # calls take a pass of their own for the sum of two gradients
    ("channels_first", dict(plain=0.88, native=0.9)),
    ("stem", dict(plain=0.6, native=0.6)),  # by plain JAX either way
])  # fmt: skip
def test_with_autodiff_in_it(name, budget, by):
    """One program of loss and gradient, convolutions aside."""
    function, args = PROGRAMS[name]

    def step(ct, *args):
        return jax.grad(lambda *args: (function(*args) * ct).astype(jnp.float32).sum() ** 2, range(len(args)))(*args)

    ct = spec(jax.eval_shape(function, *args).shape)
    unfused, fused = (launches(f, ct, *args) for f in (step, jaxfuse.fuse(step)))
    assert per_element(fused, FULL) <= budget[by] * per_element(unfused, FULL), (per_element(unfused, FULL), per_element(fused, FULL))
    assert moves(fused) == 4 * (name == "channels_first")  # of its arguments and results, as unfused


def test_gradient_of_activation_and_bias_is_one_pass_of_xlas():
    """So there is no kernel of ours for it: dy and z read, dz written, its sum made on the way, and 6 bytes are the least."""
    def gradient(ct, x, w, bias):
        return jax.vjp(lambda x, w, bias: jax.nn.gelu(x @ w + bias), x, w, bias)[1](ct)

    dy = spec((16384, 4096))
    found = [f for f in launches(gradient, dy, spec((16384, 1024)), spec((1024, 4096)), spec((4096,))) if "dot" not in f.name]
    assert 6 <= bytes_moved(found) / dy.size <= 6.1, found
