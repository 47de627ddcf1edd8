"""Programs in each spelling that they are written in, and beside them the near-misses: a table for each pattern.

test_patterns.py runs all HITS and MISSES. A hit's name is the pattern that it is, a comma, and what is special about it.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple


class Hit(NamedTuple):
    """A program, what is fused of it, and what is fused of its value and gradients, sorted; None: that is not told here.

    `left`: the patterns of rows that are not fused; None: that is not told here.
    """

    function: Callable
    args: tuple
    fused: list[str]
    step: list[str] | None = None
    left: list[str] | None = []


class Miss(NamedTuple):
    """A program; what is not fused of it, with words of the reason; what is fused all the same, or None: that is not told here."""

    function: Callable
    args: tuple
    left: list[tuple[str, str | tuple[str, ...]]]
    fused: list[str] | None = []
    has_gradient: bool = True


def hits(args, table, both=False) -> dict[str, Hit]:
    """Of names that begin with the pattern. `both`: of value and gradients there is a site forward and one backward."""
    found = {}
    for name, function in table.items():
        pattern = name.split(",")[0]
        found[name] = Hit(function, tuple(args), [pattern], sorted([pattern, f"backward {pattern}"]) if both else None)
    return found


def misses(args, table) -> dict[str, Miss]:
    """Of rows (function, the pattern that is left, words of the reason, what is fused all the same)."""
    return {name: Miss(function, args, [(pattern, words)] * bool(pattern), still)
            for name, (function, pattern, words, still) in table.items()}


def rows(kind: str) -> dict[str, Hit | Miss]:
    """All HITS, or all MISSES, by pattern and name."""
    tables = {module.name: importlib.import_module(f"spellings.{module.name}") for module in pkgutil.iter_modules(__path__)}
    return {f"{pattern}: {name}": row for pattern, table in tables.items() for name, row in getattr(table, kind, {}).items()}
