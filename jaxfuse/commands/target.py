"""The functions that a command is told of, as "module:function" or "file.py:function"."""

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable
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
    require_module(name)
    return importlib.import_module(name)


def require_module(name: str) -> None:
    """Raises Unusable where there is no module of this name; of its own no line is run, only of the packages around it."""
    if name.startswith("."):
        raise Unusable(f"{name} begins with a dot: give the module's whole name, or its file")
    missing = name
    try:
        if importlib.util.find_spec(name):
            return
    except ModuleNotFoundError as error:  # of a package around it; what that imports itself is its own
        missing = error.name or name
        if not f"{name}.".startswith(f"{missing}."):
            raise
    raise Unusable(f"there is no module {name} in {os.getcwd()}, nor among the installed packages{_meant(name, missing)}")


def _meant(name: str, missing: str) -> str:
    """"; did you mean X?": what lies beside the first part of the name that is missing, in its package or here."""
    if "/" in name:
        return near.files(name)
    package, rest = missing.rpartition(".")[0], name.removeprefix(missing)
    path = getattr(sys.modules.get(package), "__path__", ()) if package else [os.getcwd()]
    beside = pkgutil.iter_modules(path, prefix=package and f"{package}.")
    modules = [f"{module.name}{rest}" for module in beside if module.ispkg or not rest]
    return near.meant(name, [*modules, *(file.name for file in Path().glob("*.py"))])


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


def _there(of: Any) -> str:
    """; it has …: the functions that a module defines itself."""
    own = getattr(of, "__name__", "")
    names = [name for name, each in getattr(of, "__dict__", {}).items() if callable(each) and getattr(each, "__module__", "") == own]
    return f"; it has {', '.join(names[:8])}" if names else ""


def function(found: Any, target: str) -> Callable:
    """What was found there, if it can be called. Raises Unusable if it cannot."""
    if not callable(found):
        raise Unusable(f"{target} is of type {type(found).__name__}, expected a function; give the name of one")
    return found


def found(module: str, name: str, hint: str = "", kinds: tuple[type, ...] = ()) -> Any:
    """What has this name, with dots, in the module. Raises Unusable where nothing has: the message says what was meant of what can be
    called or is of these kinds (an import that is spelled alike is not), or ends with the hint."""
    found: Any = _module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            there = {each: getattr(found, each, None) for each in dir(found)}
            names = [each for each, value in there.items() if callable(value) or isinstance(value, kinds)]
            raise Unusable(f"{module} has no {name}{near.meant(part, names) or hint or _there(found)}")
        found = getattr(found, part)
    return found
