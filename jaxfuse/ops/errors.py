"""Errors of ops called with arguments that do not fit: they name op, argument, what came, what was expected, what to do."""

import difflib


class OpError(ValueError):
    """An op was called with shapes, dtypes or options that do not fit. Also a TypeError's cousin: raised at trace time."""


def require(condition: bool, op: str, argument: str, came, expected: str, remedy: str) -> None:
    if not condition:
        raise OpError(f"jaxfuse.ops.{op}: {argument} is {came}, expected {expected}; {remedy}")


def one_of(name, known, what: str) -> str:
    """`name` if it is known, else a ValueError that suggests the nearest."""
    if name in known:
        return name
    near = difflib.get_close_matches(str(name), list(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise OpError(f"unknown {what} {name!r}{hint} (known: {', '.join(map(repr, known))})")
