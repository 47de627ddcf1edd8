"""The functions that a command is told of, as "module:function" or "file.py:function"."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxfuse.runtime import near


class Unusable(Exception):
    """What a command was told of is not there, or of another kind; the message says what to do."""


def split(target: str, default: tuple[str, str] | None = None) -> tuple[str, str]:
    """(module or file, name). Raises Unusable where it names none and there is no default."""
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
            raise Unusable(f"there is no file {name}{near.files(name)}")
        return _of_file(path.resolve())
    if name.startswith("."):
        raise Unusable(f"{name} begins with a dot: give the module's whole name, or its file")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.split(".")[0] and error.name != name:
            raise
        raise Unusable(f"there is no module {name} in {os.getcwd()}, nor among the installed packages") from error


def _of_file(path: Path) -> ModuleType:
    """The file as a module of its name, though another module has the same."""
    known = sys.modules.get(path.stem)
    if known and getattr(known, "__file__", None) == str(path):
        return known
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader, f"{path} ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _functions(of: Any) -> list[str]:
    """Names of what can be called in it: an import that is spelled alike is not meant."""
    return [name for name in dir(of) if callable(getattr(of, name, None))]


def _there(of: Any) -> str:
    """; it has …: the functions that a module defines itself."""
    names = [name for name, each in vars(of).items() if callable(each) and getattr(each, "__module__", "") == getattr(of, "__name__", "")]
    return f"; it has {', '.join(names[:8])}" if names else ""


def found(module: str, name: str, hint: str = "") -> Any:
    """What has this name, with dots, in the module. Raises Unusable where nothing has; the message ends with the hint."""
    found: Any = _module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise Unusable(f"{module} has no {name}{hint or near.meant(part, _functions(found)) or _there(found)}")
        found = getattr(found, part)
    return found
