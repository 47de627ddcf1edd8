"""The measurements that come with jaxfuse: for each instruction set the file that `python -m jaxfuse bench --tune` wrote on one machine.

For a new instruction set, or anew for an old one: run that command on a quiet machine, copy the rules.json that it names into this
folder, and say in it which "machine" that was.
"""

import functools
import json
import math
from importlib import resources

from jaxfuse.tuning.rules import TABLE
from jaxfuse.tuning.rules.rule import DIRECTIONS, Point, Rule


@functools.cache
def rules(op: str) -> tuple[Rule, ...]:
    """Those of an op, on any machine."""
    return tuple(rule for file in _files() for rule in file.get(op, ()))


@functools.cache
def _files() -> tuple[dict[str, tuple[Rule, ...]], ...]:
    folder = resources.files(__name__)
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".json"))
    files = [json.loads((folder / name).read_text()) for name in names]
    return tuple(parsed(file["rules"], file["machine"], file["isa"]) for file in files)


def parsed(rows: dict[str, list[dict]], machine: str = "this machine",
           isa: tuple[str | None, ...] = (None, None)) -> dict[str, tuple[Rule, ...]]:
    """The rules of each op in a file; `isa`: the instruction sets that our loops and oneDNN used. Raises ValueError, TypeError or
    KeyError for what no such file has."""
    return {op: tuple(rule for row in own for rule in _rules(op, row, machine, isa)) for op, own in rows.items()}


def _rules(op: str, row: dict, machine: str, isa: tuple[str | None, ...]) -> list[Rule]:
    """Of bfloat16 they speak for the instruction set that oneDNN used, if it did: without bf16 instructions, as with AMX, other
    code runs."""
    found = Rule(**{**row, "points": tuple(map(_point, row["points"]))})
    found = found._replace(isa=isa[found.onednn and found.dtype == "bfloat16"], machine=machine)
    if not TABLE[op].directions_apart:
        return [found]
    return [found._replace(direction=way, points=tuple(p for p in found.points if p.direction == way)) for way in DIRECTIONS]


def _point(row: list) -> Point:
    point = Point(*row)
    if not all(isinstance(n, (int, float)) and 0 < n < math.inf for n in point[:3]) or point.direction not in DIRECTIONS:
        raise ValueError(f"a point of {tuple(point)}; expected size, two times and a direction")
    return point
