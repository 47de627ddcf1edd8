"""python -m jaxfuse bench --tune: from which size on each fused kernel wins on this machine.

Every op's size sweeps (`tuning/rules/<op>.py`), small to large, are run as plain JAX and fused, in turns: chains of ops in one `jit`, so
that what a call costs does not hide what an op costs. "backward" is forward and gradient.
"""

import functools
import math
from datetime import UTC, datetime
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxfuse.fuse import explain, fuse, plan
from jaxfuse.runtime.turns import in_turns
from jaxfuse.selection import Decider
from jaxfuse.tuning import tuned
from jaxfuse.tuning.policy import unprofitable
from jaxfuse.tuning.rules import TABLE
from jaxfuse.tuning.rules.rule import DIRECTIONS, DTYPES, Point, Rule, SizeSweep

LENGTH = 5  # ops in a chain


class Effort(NamedTuple):
    """How much to measure: sizes of a sweep, rounds of turns, seconds of each turn."""

    sizes: int = 99
    rounds: int = 15
    seconds: float = 0.005


QUICK = Effort(1, 1, 0.0)


def run(quick: bool = False) -> int:
    """Measures, prints a table and keeps the rules, unless it was quick: that tries the machinery and measures nothing worth
    keeping. Returns the exit code: 1 if the rules cannot be kept."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # into a file: nothing folds
    if quick:
        console.print(_table(measure(QUICK, console)))
        return 0
    try:
        tuned.writable()  # asked before the minute that would be lost
    except OSError as error:
        console.print(f"jaxfuse: the rules cannot be kept in {tuned.path()}: {error}; JAXFUSE_CACHE names another folder",
                      style="red", markup=False)
        return 1
    found = measure(Effort(), console)
    console.print(_table(found))
    where = tuned.save(found, datetime.now(UTC).date().isoformat())
    console.print(f'{where} is written; policy "measured" goes by it on this machine.', highlight=False)
    return 0


def measure(effort: Effort, console: Console) -> dict[str, tuple[Rule, ...]]:
    """For each op the rules of this machine, one for each sweep and dtype. What is not fused here (no kernel) gets none."""
    work = [(op, shape, dtype) for op, table in TABLE.items() for shape in table.size_sweeps for dtype in DTYPES]
    found: dict[str, tuple[Rule, ...]] = {op: () for op in TABLE}
    with Progress(console=console, refresh_per_second=2) as bar:
        task = bar.add_task("", total=len(work))
        for op, shape, dtype in work:
            bar.update(task, description=f"{op} {shape} {dtype}")
            points, onednn = _points(op, TABLE[op].size_sweeps[shape], dtype, effort)
            if points:
                found[op] += (Rule(points, None, dtype, shape, onednn=onednn),)
            bar.advance(task)
    return found


def _points(op: str, size_sweep: SizeSweep, dtype: str, effort: Effort) -> tuple[tuple[Point, ...], bool]:
    """The measurements, and whether oneDNN has a part in any."""
    found, calls, onednn = [], [], False
    for shapes in size_sweep.shapes[: effort.sizes]:
        operands = arguments(shapes, dtype)
        size = max((size for _, size in sites(op, size_sweep.program, operands)), default=None)
        if size is None:
            continue
        own = [site for site in explain(size_sweep.program, *operands, policy="always").fused
               if site.pattern.partition("+")[0] not in size_sweep.neighbours]
        onednn |= any("onednn" in site.kernel for site in own)
        for direction in DIRECTIONS:
            found.append((size, direction))
            for way in (_without(size_sweep), fuse(size_sweep.program, policy="always")):
                calls.append(functools.partial(_chain(way, direction), *operands))
    times = [round(1e6 * seconds / LENGTH, 2) for seconds in in_turns(calls, effort.rounds, effort.seconds)]
    points = (Point(size, xla, fused, direction) for (size, direction), xla, fused in zip(found, times[::2], times[1::2]))
    return tuple(points), onednn


def _without(size_sweep: SizeSweep):
    """The program with its neighbours fused alone."""
    program, neighbours = size_sweep.program, size_sweep.neighbours
    return fuse(program, policy="always", patterns=neighbours) if neighbours else program


def arguments(shapes, dtype: str) -> list[jax.Array]:
    """x of normal numbers; parameters that neither grow nor shrink it much; vectors near 1, in float32."""
    random = np.random.default_rng(0)

    def draw(index, shape):
        normal = random.standard_normal(shape)
        if len(shape) == 1:
            return jnp.asarray(1 + 0.1 * normal, "float32")
        return jnp.asarray(normal / math.sqrt(math.prod(shape[:-1])) if index else normal, dtype)

    return [draw(index, shape) for index, shape in enumerate(shapes)]


def sites(op: str, program, operands) -> list[tuple[str, int]]:
    """(shape class, size) of each of the program's sites of this op that a kernel takes."""
    found, never_unprofitable = [], unprofitable("always")

    def recording(name, config, types, direction="forward", cost=""):
        if name == op:
            found.append((TABLE[op].shape_class(config, types), TABLE[op].size(config, types)))
        return never_unprofitable(name, config, types, direction, cost)

    plan(jax.make_jaxpr(program)(*operands), Decider(recording))
    return found


def _chain(function, direction: str):
    def forward(x, *parameters):
        for _ in range(LENGTH):
            x = function(x, *parameters)
        return x

    def backward(x, *parameters):
        y, pullback = jax.vjp(forward, x, *parameters)
        return y, pullback(x)

    return jax.jit(forward if direction == "forward" else backward)


def _table(found: dict[str, tuple[Rule, ...]]) -> Table:
    headings = "op", "sites", "size", *(f"{direction}, µs XLA / fused" for direction in DIRECTIONS), "fused wins from"
    table = Table(*headings, title="measured here")
    for op, rules in found.items():
        for rule in rules:
            by_size = {p.size: {q.direction: f"{q.xla:.1f} / {q.fused:.1f}" for q in rule.points if q.size == p.size} for p in rule.points}
            columns = [[times.get(direction, "") for times in by_size.values()] for direction in DIRECTIONS]
            cells = [list(map(str, by_size)), *columns]
            table.add_row(op, rule.sites, *map("\n".join, cells), rule.wins_from(TABLE[op].unit))
            table.add_section()
    return table
