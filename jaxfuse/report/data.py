"""A report as plain data, and back."""

import dataclasses
import json
from typing import Any

from jaxfuse.report.program import Equation, Memory, Program
from jaxfuse.report.site import Rows, Site, Times
from jaxfuse.runtime import reasons

SCHEMA = 1  # changes with the meaning of a field, or when one goes


def to_dict(rows: Rows, program: Program | None) -> dict[str, Any]:
    sites = {part: list(map(_site, found)) for part, found in rows._asdict().items()}
    return {"schema": SCHEMA, **sites, "program": program and _fields(program)}


def to_json(rows: Rows, program: Program | None) -> str:
    return json.dumps(to_dict(rows, program))


def from_dict(found: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a `FusionReport`."""
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"no report of schema {SCHEMA}, as FusionReport.to_dict gives it")
    try:
        sites = {part: tuple(map(_read_site, found[part])) for part in Rows._fields}
        return {**sites, "program": _read_program(found["program"]) if found["program"] else None}
    except (KeyError, TypeError) as error:
        raise ValueError(f"a report of schema {SCHEMA} that lacks a part: {error}") from error


def _site(site: Site) -> dict[str, Any]:
    reason = site.reason and {"kind": type(site.reason).__name__, "text": str(site.reason)}
    return {**_fields(site), "reason": reason or None, "times": site.times and site.times._asdict()}


def _read_site(found: dict[str, Any]) -> Site:
    reason, times = found["reason"], found["times"]
    kind = reasons.kinds().get(reason["kind"], str) if reason else str
    return Site(**_tuples(found) | {
        "reason": kind(reason["text"]) if reason else "",
        "times": Times(**times) if times else None,
    })


def _read_program(found: dict[str, Any]) -> Program:
    equations = tuple(Equation(**_tuples(equation)) for equation in found["equations"])
    return Program(**_tuples(found) | {"equations": equations, "memory": Memory(**_tuples(found["memory"]))})


def _fields(thing: Any) -> dict[str, Any]:
    return {field.name: _lists(getattr(thing, field.name)) for field in dataclasses.fields(thing)}


def _lists(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(map(_lists, value))
    if dataclasses.is_dataclass(value):
        return _fields(value)
    return value if value is None or isinstance(value, (str, int, float)) else str(value)  # a symbolic size


def _tuples(found: dict[str, Any]) -> dict[str, Any]:
    def read(value: Any) -> Any:
        return tuple(map(read, value)) if isinstance(value, list) else value

    return {name: read(value) for name, value in found.items()}
