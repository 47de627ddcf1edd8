"""python -m benchmarks.roofline RESULT.json: how near each op is to what the machine can do.

An op can be no faster than its multiplications at the arithmetic peak, nor than its operands and results, each read or written once,
at the bandwidth of the memory. A table is printed, and drawn beside the result (or as --png). The peaks are this project's machine,
two cores of Zen 5 (benchmarks/README.md); for another give its own. On a machine like that `python -m benchmarks` ends with this.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from . import inputs, pictures, report
from .cases import CASES, Case

ORDER = {case.name: place for place, case in enumerate(CASES)}
SIZES = {"f32": 4, "bf16": 2}


class Peaks(NamedTuple):
    """GFLOP/s, and GB/s of the memory and of the last-level cache; `cache` is the cache's size in MB."""

    f32: float
    bf16: float
    memory: float
    last_level: float
    cache: float

    def roof(self, dtype: str, intensity: float, held: bool) -> float:
        """GFLOP/s at this number of FLOPs for a byte; `held`: all of it fits into the last-level cache."""
        return min(getattr(self, dtype), intensity * (self.last_level if held else self.memory))


ZEN5 = Peaks(f32=542, bf16=1089, memory=70, last_level=199, cache=32)  # two cores, benchmarks/README.md


class Point(NamedTuple):
    """One case of a result: `ours` and `xla` are GFLOP/s, `roof` what the machine could do."""

    case: Case
    flops: float
    bytes: float
    ours: float
    xla: float | None
    roof: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes


def flops(case: Case) -> float:
    """Of a layer's own definition: multiplications and additions of the forward pass, and for a gradient those of its transpose. Not
    what an algorithm saves (Winograd), nor what it does twice."""
    return _FLOPS[case.kind](case)


def _conv(case: Case) -> float:
    shape = case.shape
    positions = (shape.size if shape.transposed else shape.output_size) ** shape.dimensions  # of those a window is applied at
    window = shape.kernel**shape.dimensions * shape.inputs * shape.outputs / shape.groups
    return 2 * case.batch * positions * window * _passes(case)


def _dense(case: Case) -> float:
    return 2 * case.batch * case.shape.size * case.shape.inputs * case.shape.outputs * _passes(case)


def _recurrent(case: Case) -> float:
    shape = case.shape
    gates = {"lstm": 4, "gru": 3}[shape.cell]
    return 2 * case.batch * shape.size * 2 * shape.hidden * gates * shape.hidden * _passes(case)


def _transformer(case: Case) -> float:
    shape, tokens = case.shape, case.batch * case.shape.size
    products = 4 * tokens * shape.size * shape.features
    layers = 2 * tokens * (4 * shape.features**2 + 2 * shape.features * shape.inner) if shape.inner else 0
    return (products + layers) * _passes(case)


def _elementwise(forward: int, gradient: int) -> Callable[[Case], float]:
    """So many for each element of x."""

    def count(case: Case) -> float:
        arrays, _ = inputs.operands(case)
        return arrays["x"].size * (gradient if case.task == "gradient" else forward)

    return count


def _passes(case: Case) -> int:
    """The gradients of x and of w are as many multiplications each as the layer itself."""
    return 3 if case.task == "gradient" else 1


_FLOPS: dict[str, Callable[[Case], float]] = {
    "conv": _conv, "dense": _dense, "recurrent": _recurrent, "transformer": _transformer,
    # Σx, Σ(x - mean)², (x - mean)·a + b, residual, activation; then Σg, Σg·x, a·g + b·x + c
    "batch_norm": _elementwise(8, 18), "norm": _elementwise(8, 18)}


def traffic(case: Case) -> float:
    """Bytes of every operand and result, once; of a gradient, both passes read the operands, but for a residual."""
    arrays, cotangent = inputs.operands(case)
    operands = {name: array.size * SIZES[inputs.dtype(name, case)] for name, array in arrays.items()}
    output = cotangent.size * SIZES[case.dtype]
    if case.task == "forward":
        return sum(operands.values()) + output
    return 3 * sum(operands.values()) - operands.get("residual", 0) + 2 * output


def points(rows: Iterable[dict], peaks: Peaks) -> list[Point]:
    """Of all ops that were measured, in the order of the cases."""
    found = []
    for row in sorted(rows, key=lambda row: ORDER[row["case"]]):
        times = {name: answer.get("ms") for name, answer in row["peers"].items()}
        if row["kind"] not in _FLOPS or not times.get("jaxfuse"):
            continue
        case = CASES[ORDER[row["case"]]]
        count, moved = flops(case), traffic(case)
        xla = min((times[name] for name in ("xla", "xla-tuned") if times.get(name)), default=None)
        roof = peaks.roof(case.dtype, count / moved, moved < peaks.cache * 1e6)
        found.append(Point(case, count, moved, count / times["jaxfuse"] / 1e6, xla and count / xla / 1e6, roof))
    return found


def table(found: list[Point]) -> Table:
    made = Table("op", "run", "GFLOP", "MB", "FLOP/byte", "GFLOP/s", "roof", "of it", "XLA of it")
    for column in made.columns[2:]:
        column.justify = "right"
    for point in found:
        share, theirs = (f"{100 * speed / point.roof:.0f} %" if speed else "–" for speed in (point.ours, point.xla))
        run = f"{point.case.dtype}, batch {point.case.batch}, {report.TASKS[point.case.task]}"
        numbers = (report.number(n) for n in (point.flops / 1e9, point.bytes / 1e6, point.intensity, point.ours, point.roof))
        made.add_row(point.case.shape.title, run, *numbers, share, theirs)
    return made


def measured_on(machine: dict) -> bool:
    """Whether the machine of a result is one like that whose peaks are `ZEN5`'s."""
    return machine["cpu"].startswith("AMD") and machine["cores"] == 2 and {"avx_vnni", "avx512_vp2intersect"} <= {*machine["isa"]}


def show(found: list[Point], peaks: Peaks, path: Path, console: Console) -> None:
    """Prints the table, and draws the picture."""
    console.print(table(found))
    pictures.roofline(found, peaks, path)
    console.print(f"{path} is written.", highlight=False)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.roofline", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json", help="of `python -m benchmarks`; of a case in two the last")
    parser.add_argument("--png", type=Path, help="where the picture goes (default: RESULT-roofline.png of the last)")
    for name, unit in (("f32", "GFLOP/s"), ("bf16", "GFLOP/s"), ("memory", "GB/s"), ("last_level", "GB/s"),
                       ("cache", "MB of the last-level cache")):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(ZEN5, name), metavar="N",
                            help=f"{unit} (default: %(default)s)")
    given = parser.parse_args(argv)
    peaks = Peaks(given.f32, given.bf16, given.memory, given.last_level, given.cache)
    rows = {row["case"]: row for path in given.results for row in json.loads(path.read_text())["rows"] if row["allocator"] == "tuned"}
    found = points(rows.values(), peaks)
    if not found:
        raise SystemExit(f"benchmarks: {given.results[-1]} has no op whose arithmetic is known: python -m benchmarks conv dense")
    path = given.png or given.results[-1].with_name(f"{given.results[-1].stem}-roofline.png")
    show(found, peaks, path, Console(highlight=False, width=None if Console().is_terminal else 150))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
