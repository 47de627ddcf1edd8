"""The depthwise loops beyond the convolution targets' contract: every ISA, any number of threads, NaN in gradients.

Geometry by geometry they are tested with the other convolutions, see conv_oracle.CASES.
"""

import hashlib

import numpy as np
import pytest
from conv_oracle import BF16, CASES, F32, backward, check_backward, check_forward, forward, gradients, random, random_filter

import jaxfuse
from jaxfuse.runtime import ffi
from processes import printed_by

pytestmark = pytest.mark.skipif(ffi.unavailable("jaxfuse_conv_fwd") is not None, reason=str(ffi.unavailable("jaxfuse_conv_fwd")))

NAMES = ["depthwise 5x5", "depthwise 7x7, wide", "depthwise 6x9, strided", "depthwise, dilated and strided",
         "depthwise, causal", "depthwise, 3-D"]  # fmt: skip
LEVELS = ["portable", "avx2", "avx512"]


def results(name, dtype):
    case = CASES[name]
    x, w, dy = random(case.x, dtype), random_filter(case, dtype), random(case.y, dtype, 2)
    y = forward(case, x, w, bias=random(case.y[-1], dtype, 3), activation="relu")
    return [y, *backward(case, x, w, dy, y, "relu").values()]


def digest(threads):
    """Of all results, computed by so many threads."""
    jaxfuse.set_num_threads(threads)
    found = hashlib.sha256()
    for name in NAMES:
        for dtype in (F32, BF16):
            for result in results(name, dtype):
                found.update(np.asarray(result).tobytes())
    return found.hexdigest()


def main():
    """Checks the results, and prints the ISA and the digests of one thread and of three."""
    for name in NAMES:
        for dtype in (F32, BF16):
            check_forward(CASES[name], dtype)
            check_backward(CASES[name], dtype)
    print(ffi.native().info()["simd"], digest(1), digest(3))


@pytest.mark.parametrize("simd", LEVELS)
def test_close_and_the_same_bits_on_any_number_of_threads(simd):
    if ffi.native().info()["simd"] in LEVELS[: LEVELS.index(simd)]:
        pytest.skip(f"this machine has no {simd}")
    level, of_one, of_three = printed_by(__file__, JAXFUSE_SIMD=simd).split()
    assert level == simd and of_one == of_three


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite_in_gradients(name, dtype, value):
    """From one place in x or dy to exactly those gradients that depend on it."""
    case = CASES[name]
    for spoiled in ("x", "dy"):
        arrays = {"x": np.array(random(case.x)), "dy": np.array(random(case.y, seed=2))}
        middle = tuple(n // 2 for n in arrays[spoiled].shape)
        arrays[spoiled][middle] = value
        x, dy = (np.asarray(arrays[key], dtype) for key in ("x", "dy"))
        w = random_filter(case, dtype)
        found = backward(case, x, w, dy, dy, "none")
        with np.errstate(invalid="ignore"):
            dx, dw = gradients(case, x, w, dy)
            db = np.float64(dy).sum(tuple(range(len(case.y) - 1)))
        for got, want in ((found["dx"], dx), (found["dw"], dw), (found["db"], db)):
            np.testing.assert_array_equal(np.isfinite(np.float64(got)), np.isfinite(want))


if __name__ == "__main__":
    main()
