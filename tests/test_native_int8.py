"""The kernel of convolutions in int8: every form of its product of bytes that this CPU has gives the same bits."""

import dataclasses
import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conv_oracle import BF16, F32, Case
from int8_oracle import CASES, NARROW, RANGES, check_extremes, check_sums, computed, config_of, quantised
from jaxfuse.ops.conv import int8
from jaxfuse.ops.conv.conv import forward_attrs
from jaxfuse.runtime import ffi
from processes import printed_by

pytestmark = pytest.mark.skipif(ffi.native() is None, reason="the native module is not built")


def test_the_kernel_takes_them():
    for case, dtype in itertools.product(CASES.values(), (F32, BF16, jnp.float16)):
        made, x, w, bias, residual = quantised(case, dtype)
        assert int8.OP.forward.kernel(made, (x, *int8.pack(made, w), bias, residual)) == (int8.OP.forward.kernels[0], "")


def refused(match, *operands, y=None, **attrs):
    """The target by itself, called with what does not fit."""
    case = CASES["3x3"]
    made, x, w, *_ = quantised(case)
    made = dataclasses.replace(made, filter=dataclasses.replace(made.filter, conv=config_of(case)))
    packed, scale, offset = int8.pack(made, w)
    given = dict(x=x, packed=packed, offset=offset, scale=scale) | dict(operands)
    attrs = forward_attrs(made.scaled) | made.range._asdict() | dict(filter_shape=case.w, most=int8.MOST) | attrs
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxfuse_conv_int8: .*{match}"):
        ffi.call("jaxfuse_conv_int8", y or jax.ShapeDtypeStruct(case.y, F32), *given.values(), **attrs)


def test_refusals_say_what_and_why():
    refused("packed has shape .*, expected", ("packed", jnp.zeros(64, jnp.uint8)))
    refused("packed has dtype", ("packed", jnp.zeros(64)))
    refused("offset has dtype float32, expected int32", ("offset", jnp.zeros(40)))
    refused("offset has shape .*, expected .*40", ("offset", jnp.zeros(41, jnp.int32)))
    refused("scale has shape .*, expected .*40", ("scale", jnp.zeros(4)))
    refused("x has dtype int32", ("x", jnp.zeros(CASES["3x3"].x, jnp.int32)))
    refused("y has shape", y=jax.ShapeDtypeStruct((8, 9, 10, 41), F32))
    refused("w has shape .*", filter_shape=(3, 3, 31, 40))
    refused("sums of .* products, expected at most 65536", ("x", jnp.zeros((8, 9, 10, 1 << 13))), filter_shape=(3, 3, 1 << 13, 40))
    refused("step is 0, expected a positive number", step=0.0)
    refused("step is .*, expected a positive number", step=float("nan"))
    refused("zero is 256, expected 0 to 255", zero=256)
    refused("most is 128, expected 1 to 127", most=128)
    refused("transposed, grouped or not channels last", lhs_spec=(0, 3, 2, 1), out_spec=(0, 3, 2, 1))


def test_programs_that_have_all_of_64():
    """They were exported when only two products were added in 16 bits."""
    case = Case((1, 5, 8, 600), (1, 1, 600, 20))
    made = int8.config_of(config_of(case), case.w, RANGES["from zero"], narrow=False)
    packed, scale, offset = int8.pack(made, np.full(case.w, 64.0))
    packed = jnp.full_like(packed, 64)
    attrs = forward_attrs(made.scaled) | made.range._asdict() | dict(filter_shape=case.w, most=64)
    x, y = jnp.full(case.x, 255.0), jax.ShapeDtypeStruct(case.y, F32)
    sums = ffi.call("jaxfuse_conv_int8", y, x, packed, offset, jnp.ones_like(scale), **attrs)
    np.testing.assert_array_equal(sums, np.float32(600 * 255 * 64))


def run_all() -> str:
    """A digest of what this process computes: of sums, which are compared with numpy's too, and of what follows them."""
    digest = hashlib.sha256()
    for case, range_, narrow in itertools.product(CASES.values(), RANGES.values(), NARROW):
        digest.update(check_sums(case, range_, narrow).tobytes())
    for narrow in NARROW:
        check_extremes(narrow)
    for case, dtype in itertools.product(CASES.values(), (F32, BF16)):
        made, x, w, bias, residual = quantised(case, dtype, "relu")
        digest.update(np.asarray(computed(made, x, w, bias, residual), np.float32).tobytes())
    return digest.hexdigest()


@pytest.mark.costly
def test_every_form_gives_the_same_bits():
    """Those that this CPU has."""
    levels, info = ["portable", "avx2", "avx512", "avx512_amx"], ffi.native().info()
    best = info["int8"] if info["int8"] in levels else info["simd"]
    found = {}
    for level in levels[: levels.index(best) + 1]:
        form, found[level] = printed_by(__file__, JAXFUSE_SIMD=level).split()
        assert form.startswith(level)
    assert len(set(found.values())) == 1, found


@pytest.mark.costly
def test_any_number_of_threads_gives_the_same_bits():
    assert len({printed_by(__file__, OMP_NUM_THREADS=str(n)) for n in (1, 3)}) == 1


if __name__ == "__main__":
    print(ffi.native().info()["int8"], run_all())
