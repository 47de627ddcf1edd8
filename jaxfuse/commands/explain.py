"""python -m jaxfuse explain module:function: a report of a function with example arguments, as text and as a page."""

from pathlib import Path
from typing import Any

import jax
import jax.export

from jaxfuse.commands.target import Unusable, found, function, split
from jaxfuse.commands.terminal import Terminal
from jaxfuse.fuse import explain
from jaxfuse.report.report import FusionReport, writer
from jaxfuse.runtime import near
from jaxfuse.runtime.reasons import Untraced

ARGUMENTS = "example_arguments"


def run(target: str, arguments: str = "", out: Path | None = None, policy: str = "measured", platform: str | None = None,
        measure: bool = False) -> int:
    """Prints the overview of "module:function", or of "file.py:function", and writes the report to `out`.

    Args:
      target: where the function is. Names may have dots: "train:Trainer.step". An exported program (`jax.export.Exported`) has its
        arguments' types itself.
      arguments: where its arguments are, as "module:name" or as a name in the same module; by default `example_arguments`. That is
        a tuple of positional arguments, a dict of keyword arguments, or a function without parameters that returns either. Arrays
        may be `jax.ShapeDtypeStruct`s.
      out: the file to write, by its ending; by default function.html, here.
      policy, platform, measure: as of `jaxfuse.explain`.

    Returns: the exit code.

    Raises: Unusable for a name or a folder that is not there, for an ending that no report has, for arguments of another kind, and for
      a function that cannot be traced.
    """
    module, name = split(target)
    fn = found(module, name, kinds=(jax.export.Exported,))
    if isinstance(fn, jax.export.Exported):
        args, kwargs = _types(fn)
        fn = fn.call
    else:
        fn = function(fn, target)
        where, given = split(arguments, default=(module, arguments or ARGUMENTS))
        hint = f"; {given} is a tuple of its arguments, or a function that returns them" if given == ARGUMENTS else ""
        args, kwargs = _arguments(found(where, given, hint, (tuple, dict)), f"{where}:{given}")
    path = out or Path(f"{name.rsplit('.', 1)[-1]}.html")
    try:
        writer(path)  # said before the work, which may take a while
    except ValueError as error:
        raise Unusable(str(error)) from error
    if wrong := near.no_folder(path):
        raise Unusable(wrong)
    if path.is_dir():
        raise Unusable(f"{path} is a folder: give a file in it")
    try:
        report = explain(fn, *args, policy=policy, platform=platform, measure=measure, **kwargs)
    except ValueError as error:  # of the options: what the function raises is in the report
        raise Unusable(str(error)) from error
    if any(isinstance(site.reason, Untraced) for site in report.skipped):
        raise Unusable(report.overview())
    try:
        report.save(path)
    except OSError as error:
        raise Unusable(f"{path} cannot be written: {error.strerror}") from error
    _show(report, path)
    return 0


def _show(report: FusionReport, path: Path) -> None:
    console = Terminal(highlight=False, markup=False, soft_wrap=True)
    console.print(report.overview() if report.fused or report.skipped else str(report))
    console.print(f"\n{path} is written.")


def _types(program: jax.export.Exported) -> tuple[tuple, dict]:
    """Arguments of the types that it was exported for."""
    return jax.tree.unflatten(program.in_tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.in_avals])


def _arguments(given: Any, where: str) -> tuple[tuple, dict]:
    given = given() if callable(given) else given
    if isinstance(given, tuple):
        return given, {}
    if isinstance(given, dict):
        if wrong := [name for name in given if not isinstance(name, str) or name in ("fn", "policy", "platform", "measure")]:
            raise Unusable(f"{where} has the key {wrong[0]!r}, which names no argument here: give a tuple of positional arguments")
        return (), given
    raise Unusable(f"{where} is a {type(given).__name__}: expected a tuple of positional arguments or a dict of keyword arguments")
