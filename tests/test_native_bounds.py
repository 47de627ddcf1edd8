"""Kernels read and write nothing outside of their buffers, in any dtype: forbidden pages lie right before them, then right behind."""

import ctypes
import functools
import json
import mmap
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import int8_oracle
from conv_oracle import CASES, LONG, MANY_PIXELS, backward, forward, random, random_filter
from jaxfuse.ops import dense, group_norm, layer_norm, rms_norm
from jaxfuse.ops.conv import int8
from jaxfuse.runtime import ffi
from processes import printed_at, python

ODD = ["3x3", "1x1 strided", "depthwise", "stem", "NCHW", "grouped"]  # not sliced
PRODUCTS = [(16, 5, 16), (7, 16, 48), (32, 33, 16), (13, 272, 16), (1, 64, 208), (80, 48, 1)]  # with every tail of a packed panel
NARROW = [*(CASES[name] for name in [*ODD, "1x1", "1x1, odd"]), MANY_PIXELS["stem"], MANY_PIXELS["groups"]]  # in bfloat16
# (norm, shape, options): rows of every tail, and groups over places, channels last and first
NORMS = [(layer_norm, (7, 45), {}), (layer_norm, (3, 1027), {}), (layer_norm, (2300, 6), {}), (rms_norm, (5, 33), {}),
         (group_norm, (2, 5, 7, 15), dict(groups=3)), (group_norm, (2, 19, 3, 7), dict(groups=19, axis=1)),
         (group_norm, (1, 9, 9, 64), dict(groups=4))]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
PAGE = mmap.PAGESIZE
PROT_NONE = 0
_mappings = []  # they live as long as the process


def guarded(array, behind: bool) -> jax.Array:
    """The same numbers in memory of the kernel's own choice: JAX takes it as it is where it is aligned to 64 bytes."""
    array = np.asarray(array)
    pages = -(-array.nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, pages + 2 * PAGE)
    _mappings.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (start, start + PAGE + pages):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), PROT_NONE) == 0
    offset = PAGE + ((pages - array.nbytes) // 64 * 64 if behind else 0)
    copy = np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)
    copy[...] = array
    found = jax.device_put(copy, may_alias=True)
    assert found.unsafe_buffer_pointer() == start + offset
    return found


def run_guarded(run, *operands) -> int:
    """One program, with pages behind its operands and then before them."""
    compiled = jax.jit(run)
    for behind in (True, False):
        jax.block_until_ready(compiled(*(guarded(operand, behind) for operand in operands)))
    return 2


def run_convolution(case, dtype=jnp.float32) -> int:
    def run(x, w, dy):
        return forward(case, x, w), backward(case, x, w, dy, dy, "none")

    return run_guarded(run, random(case.x, dtype), random_filter(case, dtype), random(case.y, dtype, 2))


def run_int8(case, dtype) -> int:
    made, x, w, *rest = int8_oracle.quantised(case, dtype)
    return run_guarded(lambda *args: int8.OP(made, *args), x, *int8.pack(made, w), *rest)


def run_with_gradients(function, *operands) -> int:
    def run(dy, *operands):
        y, pullback = jax.vjp(function, *operands)
        return y, pullback(dy)

    return run_guarded(run, random(jax.eval_shape(function, *operands).shape, operands[0].dtype), *operands)


def run_product(m, k, n, dtype) -> int:
    return run_with_gradients(dense, random((m, k), dtype), random((k, n), dtype))


def run_norm(norm, shape, options, dtype) -> int:
    vectors = [random((shape[options.get("axis", -1)],))] * (2 - (norm is rms_norm))
    return run_with_gradients(functools.partial(norm, **options), random(shape, dtype), *vectors)


def run_all() -> int:
    convolutions = [*(CASES[name] for name in [*LONG, *ODD]), *MANY_PIXELS.values()]
    return sum([
        *map(run_convolution, convolutions), *(run_convolution(case, jnp.bfloat16) for case in NARROW),
        *(run_int8(case, dtype) for case in int8_oracle.CASES.values() for dtype in DTYPES),
        *(run_product(*sizes, dtype) for sizes in PRODUCTS for dtype in DTYPES),
        *(run_norm(*row, dtype) for row in NORMS for dtype in DTYPES)])


@pytest.mark.costly
@pytest.mark.skipif(ffi.no_onednn() is not None, reason=str(ffi.no_onednn()))
@pytest.mark.parametrize("convolutions", [dict(JAXFUSE_CONTRACTION="always"), {}], ids=["contraction", "as chosen"])
@pytest.mark.parametrize("level", ["avx512", "avx2"])
def test_nothing_is_read_outside(level, convolutions):
    in_each_dtype = [*PRODUCTS, *NORMS, *int8_oracle.CASES]
    printed = printed_at(level, __file__, ONEDNN_MAX_CPU_ISA="AVX2" if level == "avx2" else None, **convolutions)
    assert json.loads(printed) == 2 * len([*LONG, *ODD, *MANY_PIXELS, *NARROW, *DTYPES * len(in_each_dtype)])


@pytest.mark.costly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="this system is not Linux")
def test_the_pages_are_forbidden():
    program = "import sys, test_native_bounds as t, ctypes; x = t.guarded(t.np.ones(16, 'float32'), True); " \
        "ctypes.c_float.from_address(x.unsafe_buffer_pointer() + 64 * int(sys.argv[1])).value"
    assert [bool(python("-c", program, n).returncode) for n in "01"] == [False, True]


if __name__ == "__main__":
    print(json.dumps(run_all()))
