"""The native module, found, loaded, registered with XLA, and called. The only importer of ``jaxfuse._native``."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import pathlib
import sys
from types import ModuleType
from typing import Any

import jax
import numpy as np

_ONEDNN_PACKAGE = "onednn-cpu-gomp"
_REINSTALL = "reinstall jaxfuse: pip install --force-reinstall --no-deps <jaxfuse>"


def call(target: str, out_types: Any, *operands: jax.Array, **attrs: Any) -> Any:
    """Calls an FFI target of this package on the CPU.

    ``out_types`` is a ``jax.ShapeDtypeStruct`` or a sequence of them, as for ``jax.ffi.ffi_call``. Attributes may be bool, int (i64), float (f32), str,
    or a sequence of int (an i64 array). Raises ``NotImplementedError`` if the target is not available here.
    """
    if reason := available(target):
        raise NotImplementedError(f"{target}: {reason}")
    attributes = {name: _attribute(value) for name, value in attrs.items()}
    return jax.ffi.ffi_call(target, out_types)(*operands, **attributes)


def available(target: str) -> str | None:
    """None if the target can be called on the CPU of this machine, else a sentence that says why not.

    Raises ``RuntimeError`` if a native module is installed but does not load.
    """
    module = native()
    if module is None:
        return "the native module is not built (jaxfuse runs from a source tree that was never installed); pip install ."
    if target in _registered():
        return None
    if no_onednn := module.info().get("no_onednn"):
        return f"the native module has no such kernel: {no_onednn}"
    return "the native module has no such kernel; it was built from another version of the sources, " + _REINSTALL


def targets() -> tuple[str, ...]:
    """The names of the FFI targets that the native module provides, sorted; empty without a native module."""
    return tuple(sorted(_registered())) if native() is not None else ()


@functools.cache
def native() -> ModuleType | None:
    """``jaxfuse._native``, or None if it was not built. Raises ``RuntimeError`` if it is there but does not load."""
    path = _native_path()
    if path is None:
        return None
    try:
        _load_onednn()
        spec = importlib.util.spec_from_file_location("jaxfuse._native", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:
        raise RuntimeError(f"jaxfuse: the native module {path} does not load: {error}; {_REINSTALL}") from error
    sys.modules["jaxfuse._native"] = module
    return module


@functools.cache
def _registered() -> frozenset[str]:
    """Registers every handler with XLA, once, and returns the names."""
    handlers = native().registrations()
    for name, capsule in handlers.items():
        try:
            jax.ffi.register_ffi_target(name, capsule, platform="cpu")
        except Exception as error:
            built = native().info()["ffi_api"]
            raise RuntimeError(
                f"jaxfuse: jaxlib {importlib.metadata.version('jaxlib')} refuses {name}, built for XLA FFI {built}: "
                f"{error}; {_REINSTALL}"
            ) from error
    return frozenset(handlers)


def _native_path() -> pathlib.Path | None:
    """The built module: beside this file or, when a source tree shadows the installed package (Python was started in the
    root of the repository), where the installed package has it."""
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    names = {"_native" + suffix for suffix in suffixes}
    for path in pathlib.Path(__file__).parent.iterdir():
        if path.name in names:
            return path
    return _installed_file("jaxfuse", names)


def _load_onednn() -> None:
    """Loads libdnnl.so.3 from the installed oneDNN package, so that the native module finds it without a search path: the
    dynamic linker takes a library that is loaded already when the name fits. Not installed: the linker may still find
    one, or the native module may not want one."""
    if library := _installed_file(_ONEDNN_PACKAGE, {"libdnnl.so.3"}):
        ctypes.CDLL(str(library))


def _installed_file(package: str, names: set[str]) -> pathlib.Path | None:
    try:
        files = importlib.metadata.files(package) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((pathlib.Path(file.locate()) for file in files if file.name in names), None)


def _attribute(value: Any) -> Any:
    if isinstance(value, (bool, str, np.generic, np.ndarray)):
        return value
    if isinstance(value, int):
        return np.int64(value)
    if isinstance(value, float):
        return np.float32(value)
    return np.asarray(value, np.int64)
