"""The CUDA library ``libjaxfuse_cuda.so``: found, loaded, registered with XLA, and called. Its only importer.

It is loaded when a program is lowered for CUDA, or when somebody asks what it has; neither needs a driver or a GPU.
"""

import ctypes
import functools
import pathlib
import threading
from typing import Any

import jax

from jaxfuse import ffi

_NAME = "libjaxfuse_cuda.so"
_loading = threading.RLock()


def call(target: str, out_types: Any, *operands: jax.Array, workspace: jax.ShapeDtypeStruct | None = None, **attrs: Any) -> Any:
    """Calls an FFI target of the CUDA library; as ``ffi.call``, which calls the one of the same name on the CPU.

    ``workspace`` is memory for the kernel's intermediate results: the target's last result, which is dropped here.
    Raises ``NotImplementedError`` if the target is not available.
    """
    if reason := unavailable(target):
        raise NotImplementedError(f"{target} on CUDA: {reason}")
    if workspace is None:
        return ffi.call_registered(target, out_types, *operands, **attrs)
    single = not isinstance(out_types, (list, tuple))
    outs = ffi.call_registered(target, [*([out_types] if single else out_types), workspace], *operands, **attrs)
    return outs[0] if single else outs[:-1]


def unavailable(target: str) -> str | None:
    """None if the target can be called in programs lowered for CUDA, else a sentence that says why not.

    Registers the library's targets with XLA, for platform CUDA. Raises ``RuntimeError`` if a library is installed but
    does not load.
    """
    if library() is None:
        return _why_absent()
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
    return dict(line.split("=", 1) for line in found.jaxfuse_cuda_info().decode().splitlines()) if found else {}


def library() -> ctypes.CDLL | None:
    """The library, or None if it was not built. Raises ``RuntimeError`` if it is there but does not load."""
    with _loading:
        return _library()


def path() -> pathlib.Path | None:
    """Where it is: beside this file, or in the installed package."""
    beside = pathlib.Path(__file__).with_name(_NAME)
    return beside if beside.exists() else ffi.installed_file("jaxfuse", {_NAME})


@functools.cache
def _library() -> ctypes.CDLL | None:
    if (found := path()) is None:
        return None
    try:
        loaded = ctypes.CDLL(str(found))
        loaded.jaxfuse_cuda_name.restype = loaded.jaxfuse_cuda_info.restype = ctypes.c_char_p
        loaded.jaxfuse_cuda_handler.restype = ctypes.c_void_p
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"jaxfuse: the CUDA library {found} does not load: {error}; {ffi.REINSTALL}") from error
    lines = loaded.jaxfuse_cuda_info().decode().splitlines()
    ffi.check_api(dict(line.split("=", 1) for line in lines)["ffi_api"], found)
    return loaded


@functools.cache
def _register() -> frozenset[str]:
    found = library()
    names = []
    for i in range(found.jaxfuse_cuda_count() if found else 0):
        name = found.jaxfuse_cuda_name(i).decode()
        handler = ctypes.CFUNCTYPE(ctypes.c_void_p)(found.jaxfuse_cuda_handler(i))
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="CUDA")
        names.append(name)
    return frozenset(names)


def _why_absent() -> str:
    native = ffi.native()
    reason = native.info().get("no_cuda") if native else "the native module is not built either"
    return f"{_NAME} is not built: {reason or 'it was, but is not where the package is'}"
