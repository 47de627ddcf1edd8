"""`kernel`: everything that takes it runs once on the native kernels and once without them."""

import jax
import pytest

from jaxfuse import ffi, op


@pytest.fixture(scope="module", params=["native", "reference"])
def kernel(request):
    if request.param == "native":
        if ffi.native() is None:
            pytest.skip(ffi.available("jaxfuse_conv_fwd"))
        yield "native"
        return
    with pytest.MonkeyPatch.context() as patch:
        forget_compiled()
        patch.setattr(ffi, "available", lambda target: "switched off by the test")
        yield "reference"
    forget_compiled()


def forget_compiled():
    """What was compiled holds the kernel that was chosen then."""
    op._jitted.cache_clear()
    jax.clear_caches()
