"""The CUDA library ``libjaxfuse_cuda.so``: found, loaded, registered with XLA, and called. Its only importer.

It is loaded when a program is lowered for CUDA, or when somebody asks what it has; neither needs a driver or a GPU.
"""

import ctypes
import functools
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxfuse.runtime import ffi

_NAME = "libjaxfuse_cuda.so"
_loading = threading.RLock()


def call(target: str, out_types: Any, *operands: jax.Array, **attrs: Any) -> Any:
    """Calls an FFI target of the CUDA library; as ``ffi.call``, which calls the one of the same name on the CPU.

    Memory for a kernel's intermediate results, if it needs any, is the target's last result, which is dropped here.
    Raises ``NotImplementedError`` if the target is not available.
    """
    if reason := unavailable(target):
        raise NotImplementedError(f"{target} on CUDA: {reason}")
    return call_registered(target, out_types, *operands, **attrs)


def call_registered(target: str, out_types: Any, *operands: jax.Array, prefix: str = "", **attrs: Any) -> Any:
    """``call`` of what is registered under the target's name, after a prefix."""
    workspace = _WORKSPACES[target](operands, attrs) if target in _WORKSPACES else None
    if workspace is None:
        return ffi.call_registered(prefix + target, out_types, *operands, **attrs)
    *outs, _ = ffi.call_registered(prefix + target, [*out_types, workspace], *operands, **attrs)
    return outs


def _sums_of_channels(operands, attrs) -> jax.ShapeDtypeStruct:
    """Batch norm's partial sums, (parts, 2, channels): parts of the rows, so many that the blocks fill a GPU once, and each
    has rows enough to be worth its sums. The number follows from the shape alone, so sums come out the same in every run."""
    channels = operands[0].shape[-1]
    rows, tiles = operands[0].size // channels, -(-channels // 64)
    return jax.ShapeDtypeStruct((_parts(tiles, -(-rows // 256)), 2, channels), np.float32)


def _parts(blocks: int, most: int) -> int:
    """How many parts, each of so many blocks, an H100 runs at a time: two blocks on a multiprocessor."""
    return max(1, min(2 * 132 // blocks, most))


def _sums_of_parameters(operands, attrs) -> jax.ShapeDtypeStruct | None:
    """A norm's partial sums of dgamma and dbeta, (parts, 2, channels): two parts for each multiprocessor of an H100, fewer where
    they would be more to write than a sixteenth of the rows."""
    outer, _, groups, length = operands[0].shape
    parts = _parts(groups, outer // 16)
    return jax.ShapeDtypeStruct((parts, 2, groups * length), np.float32) if attrs["wants_parameters"] else None


# target -> the type of its workspace, or None. The kernel takes the number of parts from it.
_WORKSPACES: dict[str, Callable] = {
    "jaxfuse_batch_norm_stats": _sums_of_channels,
    "jaxfuse_batch_norm_bwd_stats": _sums_of_channels,
    "jaxfuse_norm_bwd": _sums_of_parameters,
}


def unavailable(target: str) -> str | None:
    """None if the target can be called in programs lowered for CUDA, else a sentence that says why not.

    Registers the library's targets with XLA, for platform CUDA. Raises ``RuntimeError`` if a library is installed but
    does not load.
    """
    if library() is None:
        return why_absent()
    if target in targets():
        return None
    return f"{_NAME} has no such kernel"


def targets() -> frozenset[str]:
    """The library's targets, from here on registered with XLA; empty if it is not built."""
    with _loading:
        return _register()


def info() -> dict[str, str]:
    """What the library says of itself: nvcc's version, architectures, XLA's FFI version; empty if it is not built."""
    found = library()
    return _info(found) if found else {}


def library() -> ctypes.CDLL | None:
    """The library, or None if it was not built. Raises ``RuntimeError`` if it is there but does not load."""
    with _loading:
        return _library()


def path() -> pathlib.Path | None:
    """Where it is: in this package's folder, or in the installed package."""
    beside = pathlib.Path(__file__).parent.parent / _NAME
    return beside if beside.exists() else ffi.installed_file("jaxfuse", {_NAME})


@functools.cache
def _library() -> ctypes.CDLL | None:
    if (found := path()) is None:
        return None
    try:
        loaded = ctypes.CDLL(str(found))
        loaded.jaxfuse_cuda_info.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"jaxfuse: the CUDA library {found} does not load: {error}; {ffi.REINSTALL}") from error
    ffi.check(_info(loaded), found)
    return loaded


def _info(loaded: ctypes.CDLL) -> dict[str, str]:
    return dict(line.split("=", 1) for line in loaded.jaxfuse_cuda_info().decode().splitlines())


@functools.cache
def _register() -> frozenset[str]:
    loaded = library()
    table = handlers(loaded) if loaded else []
    for name, handler in table:
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    return frozenset(name for name, _ in table)


def handlers(loaded: ctypes.CDLL) -> list[tuple[str, Any]]:
    """The library's targets by name, each with the capsule that XLA registers."""
    loaded.jaxfuse_cuda_name.restype, loaded.jaxfuse_cuda_handler.restype = ctypes.c_char_p, ctypes.c_void_p
    address = ctypes.CFUNCTYPE(ctypes.c_void_p)
    return [(loaded.jaxfuse_cuda_name(i).decode(), jax.ffi.pycapsule(address(loaded.jaxfuse_cuda_handler(i))))
            for i in range(loaded.jaxfuse_cuda_count())]


def why_absent() -> str:
    """A sentence, where `library` is None."""
    native = ffi.native()
    reason = native.info().get("no_cuda") if native else "the native module is not built either"
    return f"{_NAME} is not built: {reason or 'it was, but is not where the package is'}"
