"""The kernel that a report names is the one that runs: oneDNN says itself, by ONEDNN_VERBOSE, what it computes."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxfuse
from jaxfuse import running
from jaxfuse.program.graph import Emission, Value
from jaxfuse.runtime import ffi
from processes import printed_by

pytestmark = pytest.mark.skipif(ffi.no_onednn() is not None, reason=str(ffi.no_onednn()))


def convolved(strides=1, padding="SAME", **options):
    def run(x, w):
        rank = x.ndim - 2
        letters = "DHW"[3 - rank :]
        numbers = options.get("numbers", (f"N{letters}C", f"{letters}IO", f"N{letters}C"))
        rest = {name: value for name, value in options.items() if name != "numbers"}
        return lax.conv_general_dilated(x, w, (strides,) * rank, padding, dimension_numbers=numbers, **rest)

    return run


def dense(x, w):
    return x @ w


def lstm(x, w):
    """Of gates whose arguments are there but for the state's part."""

    def step(state, row):
        h, c = state
        i, f, g, o = jnp.split(row + h @ w, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((x.shape[1], w.shape[0]))
    return lax.scan(step, (zeros, zeros), x)[1]


IMAGES, NATIVE, ONEDNN, BOTH = (2, 10, 10, 32), "native", "onednn", "native+onednn"
SEQUENCES = ("NCW", "OIW", "NCW")
# name: (function, dtype, shape of x, of w, (forward, backward) with AVX-512 and its bf16, with AVX2)
CASES = {
    "full": (convolved(), "float32", IMAGES, (3, 3, 32, 16), (ONEDNN, ONEDNN), (ONEDNN, BOTH)),
    "full, bf16": (convolved(), "bfloat16", IMAGES, (3, 3, 32, 16), (ONEDNN, ONEDNN), (ONEDNN, BOTH)),
    "dilated": (convolved(rhs_dilation=(2, 2)), "float32", IMAGES, (3, 3, 32, 16), (ONEDNN, ONEDNN), (ONEDNN, BOTH)),
    "three axes": (convolved(), "float32", (2, 4, 6, 6, 16), (3, 3, 3, 16, 16), (ONEDNN, ONEDNN), (ONEDNN, BOTH)),
    "groups": (convolved(feature_group_count=4), "float32", IMAGES, (3, 3, 8, 16), (ONEDNN, ONEDNN), (ONEDNN, ONEDNN)),
    "of few inputs": (convolved(2), "float32", (2, 32, 32, 3), (7, 7, 3, 16), (ONEDNN, BOTH), (ONEDNN, BOTH)),
    "of few inputs, bf16": (convolved(2), "bfloat16", (2, 32, 32, 3), (7, 7, 3, 16), (ONEDNN, ONEDNN), (ONEDNN, BOTH)),
    "over many pixels": (convolved(), "float32", (1, 40, 40, 16), (3, 3, 16, 8), (ONEDNN, ONEDNN), (ONEDNN, BOTH)),
    "dilated, over many pixels": (
        convolved(rhs_dilation=(2, 2)), "float32", (1, 40, 40, 16), (3, 3, 16, 8), (ONEDNN, BOTH), (ONEDNN, BOTH)),
    "one place": (convolved(), "float32", IMAGES, (1, 1, 32, 16), (ONEDNN, ONEDNN), (NATIVE, BOTH)),
    "one place, bf16": (convolved(), "bfloat16", IMAGES, (1, 1, 32, 16), (ONEDNN, ONEDNN), (NATIVE, NATIVE)),
    "transposed": (convolved(1, [(2, 2)] * 2, lhs_dilation=(2, 2)), "float32", IMAGES, (3, 3, 32, 16), (ONEDNN, ONEDNN), (ONEDNN, BOTH)),
    "depthwise": (convolved(feature_group_count=32), "float32", IMAGES, (3, 3, 1, 32), (ONEDNN, ONEDNN), (ONEDNN, ONEDNN)),
    "depthwise, large": (convolved(feature_group_count=32), "float32", IMAGES, (7, 7, 1, 32), (NATIVE, NATIVE), (NATIVE, NATIVE)),
    "depthwise, strided": (convolved(2, feature_group_count=32), "float32", IMAGES, (7, 7, 1, 32), (ONEDNN, BOTH), (ONEDNN, BOTH)),
    "depthwise, over many pixels": (
        convolved(feature_group_count=8), "float32", (1, 40, 40, 8), (3, 3, 1, 8), (ONEDNN, BOTH), (ONEDNN, BOTH)),
    "depthwise, sequence": (convolved(feature_group_count=32), "float32", (2, 20, 32), (5, 1, 32), (NATIVE, NATIVE), (NATIVE, NATIVE)),
    "depthwise, channels first": (
        convolved(feature_group_count=32, numbers=SEQUENCES), "float32", (2, 32, 20), (32, 1, 5), (NATIVE, NATIVE), (NATIVE, NATIVE)),
    "copies": (convolved(feature_group_count=8), "float32", (1, 40, 40, 8), (3, 3, 1, 16), (ONEDNN, BOTH), (ONEDNN, BOTH)),
    "dense": (dense, "float32", (40, 96), (96, 48), (ONEDNN, ONEDNN), (NATIVE, NATIVE)),
    "dense, bf16": (dense, "bfloat16", (40, 96), (96, 48), (ONEDNN, ONEDNN), (NATIVE, NATIVE)),
    "dense, f16": (dense, "float16", (40, 96), (96, 48), (NATIVE, NATIVE), (NATIVE, NATIVE)),
    "lstm": (lstm, "float32", (16, 8, 256), (64, 256), (NATIVE, BOTH), (NATIVE, NATIVE)),
}
LEVELS = {("avx512", "AVX512_CORE_BF16"): -2, ("avx2", "AVX2"): -1}


def program(function):
    """Value and gradients of something that needs both the value and the cotangent."""
    def loss(x, w):
        y = function(x, w)
        return jnp.sin(y.astype(jnp.float32)).sum()

    return jax.value_and_grad(loss, (0, 1))


def print_all():
    """For each case what the report says, and, before it, what oneDNN says."""
    for name, (function, dtype, x, w, *_) in CASES.items():
        args = [jnp.full(shape, 0.01, dtype) for shape in (x, w)]
        rows = jaxfuse.explain(program(function), *args, policy="always").fused
        print(f"\ncase {json.dumps([name, [[row.direction, row.kernel] for row in rows]])}", flush=True)
        jax.block_until_ready(jaxfuse.fuse(program(function), policy="always")(*args))


@pytest.fixture(scope="module", params=LEVELS, ids=" ".join)
def said(request):
    """(case -> (rows, kinds of products that oneDNN computed), which of its kernels are expected)"""
    ours, onednns = request.param
    levels, native = ["portable", "avx2", "avx512"], ffi.native().info()
    if levels.index(ours) > levels.index(native["simd"]) or onednns.endswith("BF16") and "bf16" not in native["isa"]:
        pytest.skip(f"this CPU has {native['simd']}, oneDNN uses {native['isa']}")
    text, found = printed_by(__file__, JAXFUSE_SIMD=ours, ONEDNN_MAX_CPU_ISA=onednns, ONEDNN_VERBOSE="1"), {}
    for part in re.split(r"^case ", text, flags=re.M)[1:]:
        name, rows = json.loads(part.splitlines()[0])
        lines = re.findall(r"^onednn_verbose,exec,cpu,(convolution|deconvolution|matmul),[^,]*,([^,]*),.*,([^,]*),[^,]*$", part, re.M)
        found[name] = rows, set(lines)
    assert found.keys() == CASES.keys()
    return found, LEVELS[request.param]


def test_a_report_fails_for_no_site():
    x = Value(jax.core.ShapedArray((3,), jnp.float32))

    def run(read):
        raise ValueError("cannot be traced")

    assert running.kernels([Emission((x,), (x,), run)]) == "unknown"


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_that_is_named_is_the_one_that_runs(said, name):
    found, expected = said
    rows, products = found[name]
    assert dict(map(tuple, rows)) == dict(zip(("forward", "backward"), CASES[name][expected]))
    parts = {("forward", ONEDNN): 1, ("backward", ONEDNN): 2, ("backward", BOTH): 1}
    assert len(products) == sum(parts.get(tuple(row), 0) for row in rows), products


if __name__ == "__main__":
    print_all()
