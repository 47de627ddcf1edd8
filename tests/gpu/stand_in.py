"""Handlers of the CPU under the names of the CUDA library's, where that is not built: only shapes matter to who counts bytes."""

import functools

import jax

from jaxfuse.runtime import cuda, ffi


@functools.cache
def register() -> str | None:
    """None, or why there are none."""
    if cuda.targets():  # built, and now registered
        return None
    if reason := ffi.unavailable("jaxfuse_norm_fwd"):
        return reason
    for name, handler in ffi.native().registrations().items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    return None
