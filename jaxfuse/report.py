"""What was fused, what was not, and why: rows first, then text."""

import dataclasses
import io
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from jaxfuse.program.site import Match, Refusal
from jaxfuse.program.source import calling_line
from jaxfuse.running import kernels
from jaxfuse.runtime.private import known
from jaxfuse.runtime.reasons import heading

FEW = 24  # rows that are printed with the overview; of more the overview says how to see them
NOTHING = "nothing to fuse: no convolution, dense layer, attention, norm, recurrent cell or max pool in this program"


@dataclasses.dataclass(frozen=True)
class Site:
    """One place in the program.

    pattern: like "conv+bias+relu"; direction: "forward" or "backward"; shapes, dtypes: of the full-size operands;
    source: "file:line" of the user's code; kernel: what computes it ("onednn", "native": our own loops, "native+onednn": part by
    part, "plain JAX"), "" if skipped;
    bytes_saved: an estimate of the memory traffic that the fused kernel avoids, in bytes;
    reason: for a skipped site the first check that failed, with the value or the reader that failed it;
    scopes: the `jax.named_scope`s of its parts; those of Flax linen are modules: "jvp(ResNet)/Bottleneck_2/Conv_1".
    """

    pattern: str
    direction: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    source: str
    kernel: str = ""
    bytes_saved: int = 0
    reason: str = ""
    scopes: tuple[str, ...] = ()

    def __str__(self):
        shapes = " ".join(f"{d}{list(s)}" for d, s in zip(self.dtypes, self.shapes))
        verdict = f"fused, {self.kernel}" if not self.reason else f"skipped: {self.reason}"
        return f"{self.pattern} {self.direction} {shapes} at {self.source}: {verdict}"

    @property
    def module(self) -> str:
        """The first scope without JAX's transformations: "ResNet/Bottleneck_2/Conv_1"."""
        return re.sub(r"\w+\(|\)", "", self.scopes[0]).removeprefix("/") if self.scopes else ""


def site(found: Match | Refusal) -> Site:
    shapes = tuple(tuple(v.shape) for v in found.operands)
    dtypes = tuple(str(v.dtype) for v in found.operands)
    source = found.anchor.source()
    if source == "unknown":
        source = calling_line()
    scopes = tuple(dict.fromkeys(node.scope() for node in found.nodes)) or (found.anchor.scope(),)
    if isinstance(found, Match):
        return Site(found.pattern, found.direction, shapes, dtypes, source, kernels(found.emissions), known(found.bytes_saved), "", scopes)
    return Site(found.pattern, found.direction, shapes, dtypes, source, reason=found.reason, scopes=scopes)


@dataclasses.dataclass(frozen=True)
class FusionReport:
    """The sites of a program, as tuples of `Site`; `str(report)` is an overview, and the rows where they are few.

    fused: what kernels run; skipped: what stays as it is; unfused_steps: what stays outside of a layer that is itself
    fused, and is among `fused` without that step.
    """

    fused: tuple[Site, ...]
    skipped: tuple[Site, ...]
    unfused_steps: tuple[Site, ...] = ()

    def __str__(self):
        if not self.fused and not self.skipped:
            return NOTHING
        rows = len(self.fused) + len(self.skipped) + len(self.unfused_steps)
        rest = self.table() if rows <= FEW else f"All {rows} rows: print(report.table())"
        return f"{self.overview()}\n\n{rest}"

    def overview(self) -> str:
        """How many sites of each pattern and direction are fused, and what stays XLA's, counted by reason."""
        saved = sum(site.bytes_saved for site in self.fused)
        every = len(self.fused) + len(self.skipped)
        parts = [f"{len(self.fused)} of {every} sites fused, about {saved / 1e6:.1f} MB of memory traffic saved"]
        if self.fused:
            table = _table("pattern", "forward", "backward", "kernel", "MB saved")
            for pattern in dict.fromkeys(site.pattern for site in self.fused):
                sites = [site for site in self.fused if site.pattern == pattern]
                ways, kernels = Counter(site.direction for site in sites), dict.fromkeys(site.kernel for site in sites)
                table.add_row(pattern, *(str(ways[way] or "") for way in ("forward", "backward")), ", ".join(kernels), _megabytes(sites))
            parts.append(_text(table))
        if self.skipped:
            parts += ["Left as it is, by reason:", _text(_by_reason(self.skipped))]
        if self.unfused_steps:
            parts += ["Steps that stay outside; the layers themselves are fused:", _text(_by_reason(self.unfused_steps))]
        return "\n\n".join(parts)

    def table(self) -> str:
        """Every row: the fused sites, the skipped ones, and the steps that stay outside of fused ones."""
        parts = []
        if self.fused:
            table = _rows(self.fused, ("kernel", "MB saved"), lambda site: (site.kernel, _megabytes([site])))
            table.title = f"{len(self.fused)} fused"
            parts.append(table)
        titles = (self.skipped, "skipped"), (self.unfused_steps, "steps outside of fused layers")
        for sites, title in titles:
            if sites:
                table = _rows(sites, ("reason",), lambda site: (site.reason,))
                table.title = f"{len(sites)} {title}"
                parts.append(table)
        return "\n".join(map(_text, parts)) or NOTHING


class FusionError(RuntimeError):
    """`fuse(..., strict=True)` met a site that stays unfused; the message has a line for each."""


def is_logged() -> bool:
    """Whether JAXFUSE_LOG=1 asks for a report of all that is fused."""
    return os.environ.get("JAXFUSE_LOG", "0") not in ("", "0")


def log(report: FusionReport) -> None:
    """One line per site on stderr."""
    for found in (*report.fused, *report.skipped, *report.unfused_steps):
        print(f"jaxfuse: {found}", file=sys.stderr)


def _by_reason(sites: Iterable[Site]) -> Table:
    """A row for each kind of reason, pattern and direction, with the words of the first of them."""
    groups: dict[tuple, list[Site]] = {}
    for site in sites:
        groups.setdefault((heading(site.reason), site.pattern, site.direction), []).append(site)
    table = _table("why", "pattern", "direction", "sites", "the first of them")
    for (why, pattern, direction), members in sorted(groups.items(), key=lambda group: group[0][0]):
        table.add_row(why, pattern, direction, str(len(members)), f"{members[0].source}: {members[0].reason}")
    return table


def _rows(sites: tuple[Site, ...], columns: tuple[str, ...], cells) -> Table:
    """A row for each site; with modules where one line of the program makes several."""
    modules = {(site.source, site.module) for site in sites}
    scoped = len(modules) > len({site.source for site in sites})
    table = _table("pattern", "direction", "operands", "source", *(["module"] if scoped else []), *columns)
    for site in sites:
        module = [site.module] if scoped else []
        table.add_row(site.pattern, site.direction, _operands(site), site.source, *module, *cells(site))
    return table


def _table(*columns: str) -> Table:
    table = Table(title_justify="left")
    for name in columns:
        number = name in ("forward", "backward", "sites", "MB saved")
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    return table


def _text(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=_width(), no_color=True, markup=False).print(table)
    return out.getvalue().rstrip()


def _megabytes(sites: Iterable[Site]) -> str:
    """Empty where nothing is saved by the estimate, as by a convolution alone: such a kernel is faster, it moves no less."""
    saved = sum(site.bytes_saved for site in sites)
    return f"{saved / 1e6:.2f}" if saved else ""


def _operands(site: Site) -> str:
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
    return "  ".join(f"{short.get(d, d)}{list(s)}".replace(" ", "") for d, s in zip(site.dtypes, site.shapes))


def _width() -> int:
    try:
        return max(100, os.get_terminal_size().columns)
    except OSError:  # not a terminal
        return 160
