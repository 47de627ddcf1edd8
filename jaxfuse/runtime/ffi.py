"""The native module, found, loaded, registered with XLA, and called. The only importer of ``jaxfuse._native``."""

import contextvars
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import pathlib
import re
import sys
import threading
from types import ModuleType
from typing import Any

import jax
import jaxlib
import numpy as np

from jaxfuse.runtime import dispatch, private, processors

TARGETS = (
    "jaxfuse_conv_fwd",
    "jaxfuse_conv_bwd",
    "jaxfuse_conv_pack",
    "jaxfuse_conv_packed",
    "jaxfuse_conv_gated",
    "jaxfuse_conv_expanded",
    "jaxfuse_conv_int8",
    "jaxfuse_batch_norm_stats",
    "jaxfuse_batch_norm_apply",
    "jaxfuse_batch_norm_bwd_stats",
    "jaxfuse_batch_norm_bwd_apply",
    "jaxfuse_dense_fwd",
    "jaxfuse_dense_bwd",
    "jaxfuse_global_average_pool",
    "jaxfuse_max_pool_fwd",
    "jaxfuse_max_pool_bwd",
    "jaxfuse_norm_fwd",
    "jaxfuse_norm_bwd",
    "jaxfuse_lstm_fwd",
    "jaxfuse_lstm_bwd",
    "jaxfuse_gru_fwd",
    "jaxfuse_gru_bwd",
    "jaxfuse_attention_fwd",
    "jaxfuse_attention_bwd",
)

_ONEDNN = "_native_onednn.so"  # our own copy of the library, beside the module
REINSTALL = "reinstall jaxfuse with its dependencies: from its source tree, python -m pip install --force-reinstall ."
VERSION = 1  # of the targets that exported programs call; tests/test_export.py holds what they take
_NOT_BUILT = "the native module is not built; to build it: python -m pip install . in the source tree of jaxfuse"
_loading = threading.RLock()
_expected: dict[str, str] = {}
_exporting = jax.make_user_context(False)
_asked: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("asked", default=None)
_thread_limit = processors.Limit(1, "the native module is not loaded")

ONLY_REFERENCE = "oneDNN has only its reference code for this geometry, which is slow"


def call(target: str, out_types: Any, *operands: jax.Array, overwritten: int | None = None, **attrs: Any) -> Any:
    """Calls an FFI target of this package on the CPU.

    ``out_types`` is a ``jax.ShapeDtypeStruct`` or a sequence of them, as for ``jax.ffi.ffi_call``, and so is what comes
    back. ``overwritten`` is the operand in whose place the first output is written; XLA copies it where it is read
    afterwards. Attributes may be bool, int (i64), float (f32), str, or a sequence of int (an i64 array). Raises
    ``NotImplementedError`` if the target is not available here. What the kernel refuses raises at run time, in words.
    """
    if reason := unavailable(target):
        raise NotImplementedError(f"{target}: {reason}")
    if (asked := _asked.get()) is not None:
        asked.update(_libraries(target, out_types, operands, attrs))
        return call_registered(target, out_types, *operands, **attrs)
    _start()
    run = functools.partial(call_registered, target, out_types, overwritten=overwritten, **attrs)
    return dispatch.with_cost(lambda given: run(*given), out_types, operands)


def call_registered(target: str, out_types: Any, *operands: jax.Array, overwritten: int | None = None, **attrs: Any) -> Any:
    """``call`` of whatever is registered by that name for the platform that the program is lowered for."""
    attributes = {name: _attribute(value) for name, value in attrs.items()}
    aliases = {} if overwritten is None else {overwritten: 0}
    name = promised(target) if _exporting.value else target
    return jax.ffi.ffi_call(name, out_types, input_output_aliases=aliases)(*operands, **attributes)


def libraries(run: Any, *types: jax.ShapeDtypeStruct) -> set[str]:
    """Whose code, "native" or "onednn", would compute the calls that `run` makes of arrays of these types. Nothing is run: the
    native module is asked for each call, and goes by what its handler goes by."""
    found: set[str] = set()
    token = _asked.set(found)
    try:
        jax.eval_shape(lambda *arrays: run(*arrays), *types)  # a function that JAX has not seen, or it would not call it again
    finally:
        _asked.reset(token)
    return found


def no_onednn() -> str | None:
    """None if oneDNN computes here, else why not: convolutions of channels first are XLA's then."""
    module = native()
    return _NOT_BUILT if module is None else module.info().get("no_onednn")


def refused_without_fast_code(run: Any, *types: jax.ShapeDtypeStruct) -> str | None:
    """Why the calls that `run` makes of arrays of these types cannot be computed here, or not fast: there is no oneDNN, or it has
    nothing but its reference code. None: oneDNN or our own loops compute them."""
    reason, found = no_onednn(), libraries(run, *types)
    if reason and "onednn" in found:
        return f"the native module has no such kernel: {reason}"
    return ONLY_REFERENCE if "onednn_reference" in found else None


def _libraries(target: str, out_types: Any, operands: tuple, attrs: dict) -> list[str]:
    results = out_types if isinstance(out_types, (list, tuple)) else [out_types]
    described = [[(str(a.dtype), tuple(map(private.known, a.shape))) for a in arrays] for arrays in (operands, results)]
    return _built().libraries(target, *described, {name: _attribute(value) for name, value in attrs.items()})


def exporting():
    """A context in which programs are lowered that another version of this package will run: by targets with a version."""
    return _exporting(True)


def promised(target: str) -> str:
    """The name by which exported programs call a target. What that name takes and computes never changes: a handler that
    changes gets another version, and the old one stays registered."""
    return f"{target}_v{VERSION}"


def register_all() -> None:
    """Registers the handlers, if there are any, for programs that were lowered elsewhere. What keeps the native module from
    loading is reported by the first call."""
    try:
        unavailable(TARGETS[0])
    except RuntimeError:
        pass


def unavailable(target: str) -> str | None:
    """None if the target can be called on the CPU of this machine, else a sentence that says why not.

    Raises ``RuntimeError`` if a native module is installed but does not load.
    """
    module = native()
    if module is None:
        return _NOT_BUILT
    if target in _registered(module):
        return None
    return f"the native module has no such kernel, it comes from another version of jaxfuse; {REINSTALL}"


def native() -> ModuleType | None:
    """``jaxfuse._native``, or None if it was not built. Raises ``RuntimeError`` if it is there but does not load."""
    with _loading:
        return _native()


@functools.cache
def _native() -> ModuleType | None:
    global _thread_limit
    path = _native_path()
    if path is None:
        return None
    try:
        spec = importlib.util.spec_from_file_location("jaxfuse._native", path)
        if spec is None or spec.loader is None:
            raise ImportError("Python has no loader for a file of this name")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _thread_limit = processors.limit()
        module.intend_threads(_thread_limit.number)
        module.load_onednn(str(path.with_name(_ONEDNN)))
        check(module.info(), path)
    except (ImportError, OSError, AttributeError) as error:  # the last: it comes from another version
        raise RuntimeError(f"jaxfuse: the native module {path} does not load: {error}; {REINSTALL}") from error
    sys.modules["jaxfuse._native"] = module
    return module


def num_threads() -> int:
    """Of the native module. Raises ``NotImplementedError`` if that is not built."""
    _start()
    return _built().num_threads()


def set_num_threads(limit: processors.Limit) -> None:
    """Starts or retires threads of the native module. Raises ``NotImplementedError`` if that is not built."""
    global _thread_limit
    with _loading:
        _thread_limit = processors.start(_built(), limit)


def thread_limit() -> processors.Limit:
    """The number of threads, and what decided it. Raises ``NotImplementedError`` if the native module is not built."""
    number = num_threads()
    return _thread_limit._replace(number=number)


def _built() -> ModuleType:
    if module := native():
        return module
    raise NotImplementedError(f"jaxfuse: {_NOT_BUILT}")


@functools.cache
def _start() -> None:
    """Before the first call, not when this is imported: a program may still say how many threads, or that memory is to stay."""
    _built()
    set_num_threads(_thread_limit)


def expect(fact: str, value: str) -> None:
    """What a library must say of itself, to be called from tables of this package."""
    _expected[fact] = value


def check(info: dict[str, str], path: pathlib.Path) -> None:
    """Whether a library was built for this jaxlib, and from the same tables as this package."""
    check_api(info["ffi_api"], path)
    for fact, value in _expected.items():
        if info.get(fact) != value:
            raise RuntimeError(f"jaxfuse: {path} was built from another table of {fact}; {REINSTALL}")


def check_api(built: str, path: pathlib.Path) -> None:
    """XLA takes handlers built for its own FFI version or an older one. It checks when its CPU backend starts, and that
    failing leaves JAX without a CPU; so this asks first."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    major, minor = (int(n) for part in ("MAJOR", "MINOR") for n in re.findall(rf"#define XLA_FFI_API_{part} (\d+)", header))
    built_major, built_minor = (int(part) for part in built.split("."))
    if built_major != major or built_minor > minor:
        raise RuntimeError(
            f"jaxfuse: {path} is built for XLA's FFI {built_major}.{built_minor}, "
            f"and jaxlib {jaxlib.__version__} has {major}.{minor}; {REINSTALL}"
        )


def _registered(module: ModuleType) -> frozenset[str]:
    with _loading:
        return _register(module)


@functools.cache
def _register(module: ModuleType) -> frozenset[str]:
    """Registers every handler with XLA, and returns the names."""
    handlers = module.registrations()
    for name, handler in handlers.items():
        for known_as in (name, promised(name)):
            jax.ffi.register_ffi_target(known_as, handler, platform="cpu")
    return frozenset(handlers)


def _native_path() -> pathlib.Path | None:
    """The built module: in this package's folder or, when a source tree shadows the installed package (Python was started in the
    root of the repository), where the installed package has it."""
    names = {"_native" + suffix for suffix in importlib.machinery.EXTENSION_SUFFIXES}
    beside = (path for path in pathlib.Path(__file__).parent.parent.iterdir() if path.name in names)
    return next(beside, None) or installed_file("jaxfuse", names)


def installed_file(package: str, names: set[str]) -> pathlib.Path | None:
    """The first file of an installed package that has one of these names."""
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
