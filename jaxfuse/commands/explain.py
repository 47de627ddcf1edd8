"""python -m jaxfuse explain module:function: a report of a function with example arguments, as text and as a page."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from jaxfuse.fuse import explain
from jaxfuse.report import FusionReport

ARGUMENTS = "example_arguments"


class Unusable(Exception):
    """What was asked for cannot be explained; the message says what to do."""


def run(target: str, arguments: str = "", out: Path | None = None, policy: str = "measured", platform: str | None = None,
        measure: bool = False) -> int:
    """Prints the overview of "module:function", or of "file.py:function", and writes the report to `out`.

    Args:
      target: where the function is. Names may have dots: "train:Trainer.step".
      arguments: where its arguments are, as "module:name" or as a name in the same module; by default `example_arguments`. That is
        a tuple of positional arguments, a dict of keyword arguments, or a function without parameters that returns either. Arrays
        may be `jax.ShapeDtypeStruct`s.
      out: the file to write, by its ending; by default function.html, here.
      policy, platform, measure: as of `jaxfuse.explain`.

    Returns: the exit code.

    Raises: Unusable for a name that is not there, and for arguments of another kind.
    """
    module, name = _split(target)
    fn = _found(module, name)
    where, given = _split(arguments, default=(module, arguments or ARGUMENTS))
    args, kwargs = _arguments(_found(where, given), f"{where}:{given}")
    path = out or Path(f"{name.rsplit('.', 1)[-1]}.html")
    report = explain(fn, *args, policy=policy, platform=platform, measure=measure, **kwargs)
    report.save(path)
    _show(report, path)
    return 0


def _show(report: FusionReport, path: Path) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(report.overview() if report.fused or report.skipped else str(report))
    console.print(f"\n{path} is written.")


def _split(target: str, default: tuple[str, str] | None = None) -> tuple[str, str]:
    module, colon, name = target.rpartition(":")
    if not (module and colon and name):
        if default:
            return default
        raise Unusable(f'{target!r} names no function: give "module:function" or "file.py:function"')
    return module, name


def _module(name: str) -> ModuleType:
    """The module, with the folder that the command runs in on the path, as `python -m` has it."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    path = Path(name)
    if path.suffix == ".py":
        if not path.exists():
            raise Unusable(f"there is no file {name}")
        sys.path.insert(0, str(path.resolve().parent))
        name = path.stem
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.split(".")[0] and error.name != name:
            raise
        raise Unusable(f"there is no module {name} in {os.getcwd()}, nor among the installed packages") from error


def _found(module: str, name: str) -> Any:
    found: Any = _module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            asked = f"; {name} is a tuple of its arguments, or a function that returns them" if name == ARGUMENTS else ""
            raise Unusable(f"{module} has no {name}{asked}")
        found = getattr(found, part)
    return found


def _arguments(given: Any, where: str) -> tuple[tuple, dict]:
    given = given() if callable(given) else given
    if isinstance(given, tuple):
        return given, {}
    if isinstance(given, dict):
        return (), given
    raise Unusable(f"{where} is a {type(given).__name__}: expected a tuple of positional arguments or a dict of keyword arguments")
