"""A report as text: the overview, and a table of all rows."""

import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from jaxfuse.report.site import Rows, Site
from jaxfuse.runtime.reasons import Untraced, heading

NOTHING = "nothing to fuse: no convolution, dense layer, attention, norm, recurrent cell or pool in this program, " \
    "but for what it calls of jaxfuse.ops"
NUMBERS = ("forward", "backward", "sites", "MB saved", "ms unfused", "ms fused")


class Block(NamedTuple):
    """A table of text under a title; what every form of the summary is made of."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def headline(rows: Rows) -> str:
    """How many sites are fused, and what that saves."""
    saved = sum(site.bytes_saved for site in rows.fused)
    return f"{len(rows.fused)} of {len(rows.fused) + len(rows.skipped)} sites fused, about {saved / 1e6:.1f} MB of memory traffic saved"


def untraced(rows: Rows) -> str:
    """Why the function has no program to report on; "" where it has one."""
    sites = [site for site in rows.skipped if isinstance(site.reason, Untraced)]
    return "".join(site.reason if site.source == "unknown" else f"{site.source}: {site.reason}" for site in sites)


def summary(rows: Rows) -> list[Block]:
    """The fused sites by pattern, then what stays XLA's by reason."""
    fused, skipped, steps = rows
    blocks = []
    if fused:
        blocks.append(Block("", ("pattern", "forward", "backward", "kernel", "MB saved"), list(_by_pattern(fused))))
    columns = "why", "pattern", "direction", "sites", "the first of them"
    titles = (skipped, "Left as it is, by reason:"), (steps, "Steps that stay outside; the layers themselves are fused:")
    return blocks + [Block(title, columns, list(_by_reason(sites))) for sites, title in titles if sites]


def every(rows: Rows) -> list[Block]:
    """Every site: the fused, the skipped, and the steps outside of fused ones."""
    fused, skipped, steps = rows
    parts = (fused, "fused", _fused_cells), (skipped, "skipped", _reason), (steps, "steps outside of fused layers", _reason)
    return [_listed(sites, f"{len(sites)} {title}", cells) for sites, title, cells in parts if sites]


def printed(block: Block) -> str:
    """The block as a table drawn with lines."""
    table = Table(title_justify="left", box=box.HEAVY_HEAD if _has_lines() else box.ASCII)
    for name in block.columns:
        table.add_column(name, justify="right" if name in NUMBERS else "left", overflow="fold")
    for row in block.rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=_width(), no_color=True, markup=False).print(table)
    return out.getvalue().rstrip()


def _has_lines() -> bool:
    """Whether what is printed may have characters that draw lines."""
    try:
        "┏━┡".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def megabytes(sites: Iterable[Site]) -> str:
    """Empty where nothing is saved by the estimate, as by a convolution alone: such a kernel is faster, it moves no less."""
    saved = sum(site.bytes_saved for site in sites)
    return f"{saved / 1e6:.2f}" if saved else ""


def milliseconds(time: float | None) -> str:
    return "" if time is None else f"{time:.3f}"


def _by_pattern(fused: Sequence[Site]) -> Iterable[tuple[str, ...]]:
    for pattern in dict.fromkeys(site.pattern for site in fused):
        sites = [site for site in fused if site.pattern == pattern]
        ways, kernels = Counter(site.direction for site in sites), dict.fromkeys(site.kernel for site in sites)
        yield pattern, *(str(ways[way] or "") for way in ("forward", "backward")), ", ".join(kernels), megabytes(sites)


def _by_reason(sites: Iterable[Site]) -> Iterable[tuple[str, ...]]:
    """A row for each kind of reason, pattern and direction, with the words of the first of them."""
    groups: dict[tuple, list[Site]] = {}
    for site in sites:
        groups.setdefault((heading(site.reason), site.pattern, site.direction), []).append(site)
    for (why, pattern, direction), members in sorted(groups.items(), key=lambda group: group[0][0]):
        yield why, pattern, direction, str(len(members)), f"{members[0].source}: {members[0].reason}"


def _listed(sites: Sequence[Site], title: str, cells: Callable[[Site], dict[str, str]]) -> Block:
    """A row for each site; with modules where one line of the program makes several, with times where they were measured."""
    modules = {(site.source, site.module) for site in sites}
    scoped = len(modules) > len({site.source for site in sites})
    timed = any(site.times for site in sites)

    def row(site: Site) -> dict[str, str]:
        common = {"pattern": site.pattern, "direction": site.direction, "operands": site.operands, "source": site.source}
        return common | ({"module": site.module} if scoped else {}) | (_times(site) if timed else {}) | cells(site)

    found = [row(site) for site in sites]
    return Block(title, tuple(found[0]), [tuple(cells.values()) for cells in found])


def _fused_cells(site: Site) -> dict[str, str]:
    return {"kernel": site.kernel, "MB saved": megabytes([site])}


def _reason(site: Site) -> dict[str, str]:
    return {"reason": site.reason}


def _times(site: Site) -> dict[str, str]:
    times = site.times
    if times is None:
        return {"ms unfused": "", "ms fused": ""}
    why = times.why if times.unfused is None else ""
    return {"ms unfused": why or milliseconds(times.unfused), "ms fused": milliseconds(times.fused)}


def _width() -> int:
    try:
        return max(100, os.get_terminal_size().columns)
    except OSError:  # not a terminal
        return 160
