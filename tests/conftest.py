"""`kernel`: what takes it runs once with the kernels that are installed and once with none, by reference."""

import jax
import pytest

from jaxfuse import ffi, op


@pytest.fixture(scope="module", params=["installed", "reference"])
def kernel(request):
    if request.param == "installed":
        yield "installed"
        return
    with pytest.MonkeyPatch.context() as patch:
        _forget_compiled()
        patch.setattr(ffi, "unavailable", lambda target: "switched off by the test")
        yield "reference"
    _forget_compiled()


def _forget_compiled():
    """What was compiled holds the kernel that was chosen then."""
    op._jitted.cache_clear()
    jax.clear_caches()
