"""Which line of the user's code an equation comes from."""

import functools
import os
import pathlib
import sys
import sysconfig
import traceback
from collections.abc import Callable
from types import FrameType

FRAMEWORKS = ("jax", "jaxlib", "jaxfuse", "flax", "haiku", "equinox", "keras", "optax", "transformers", "numpy")

_OWN = str(pathlib.Path(__file__).parent.parent)
# the standard library, and the scripts that start programs of installed packages
_ELSEWHERE = (*(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "scripts")), "<frozen")


def user_line(tracebacks: list) -> str:
    """file:line of the innermost frame that is not in an installed package, or, where a package's own program runs, not in a
    framework. The tracebacks are an equation's and those of the inlined jits it stood in, innermost first."""
    *jits, outermost = tracebacks
    for unwanted in (_is_library, _is_framework):
        lines = [*[_line(stack, unwanted, True) for stack in jits], _line(outermost, unwanted, False)]
        line = next(filter(None, lines), None)
        if line:
            return line
    return "unknown"


def calling_line() -> str:
    """file:line of the user's code that is being run: for equations that were traced for one layer, apart from its caller."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "unknown" if frame is None else f"{_relative(frame.f_code.co_filename)}:{frame.f_lineno}"


def raising_line(error: BaseException) -> str:
    """file:line of the innermost frame of the user's code that the error came through."""
    walked = [f"{_relative(frame.f_code.co_filename)}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)
              if not _is_library(frame.f_code.co_filename)]
    return walked[-1] if walked else "unknown"


@functools.lru_cache(maxsize=65536)
def _line(stack, unwanted: Callable[[str], bool], traced_apart: bool) -> str | None:
    """The innermost frame of a wanted file. A jit is traced once for all who call it: with `traced_apart` only frames
    inside it count, for those outside are the first caller's."""
    for frame in stack.frames if stack is not None else ():
        if traced_apart and "trace_to_jaxpr" in frame.function_name:
            return None
        if not unwanted(frame.file_name):
            return f"{_relative(frame.file_name)}:{frame.line_num}"
    return None


@functools.cache
def _is_framework(file_name: str) -> bool:
    parts = pathlib.PurePath(file_name).parts
    return _is_own(file_name) or _is_library(file_name) and any(name in parts for name in FRAMEWORKS)


@functools.cache
def _is_library(file_name: str) -> bool:
    installed = {"site-packages", "dist-packages"} & set(pathlib.PurePath(file_name).parts)
    return bool(installed) or _is_own(file_name) or file_name.startswith(_ELSEWHERE)


def _is_own(file_name: str) -> bool:
    """Part of jaxfuse, the demo aside: that is a user's program."""
    return file_name.startswith(f"{_OWN}{os.sep}") and not file_name.startswith(os.path.join(_OWN, "commands", "demo"))


def _relative(file_name: str) -> str:
    try:
        return str(pathlib.Path(file_name).relative_to(pathlib.Path.cwd()))
    except ValueError:
        return file_name
