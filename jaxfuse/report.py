"""What was fused, what was not, and why: rows first, then text."""

import dataclasses
import io
import os
import sys

from rich.console import Console
from rich.table import Table

from jaxfuse.private import known
from jaxfuse.match import Match, Refusal
from jaxfuse.source import calling_line


@dataclasses.dataclass(frozen=True)
class Site:
    """One place in the program.

    pattern: like "conv+bias+relu"; direction: "forward" or "backward"; shapes, dtypes: of the full-size operands;
    source: "file:line" of the user's code; kernel: what runs it ("onednn", "native", "reference"), "" if skipped;
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


def site(found: Match | Refusal) -> Site:
    shapes = tuple(tuple(v.shape) for v in found.operands)
    dtypes = tuple(str(v.dtype) for v in found.operands)
    source = found.anchor.source()
    if source == "unknown":
        source = calling_line()
    scopes = tuple(dict.fromkeys(node.scope() for node in found.nodes)) or (found.anchor.scope(),)
    kernel, saved, reason = (found.kernel, known(found.bytes_saved), "") if isinstance(found, Match) else ("", 0, found.reason)
    return Site(found.pattern, found.direction, shapes, dtypes, source, kernel, saved, reason, scopes)


@dataclasses.dataclass(frozen=True)
class FusionReport:
    """The sites of a program. `str(report)` is a table; `.fused` and `.skipped` are tuples of `Site`."""

    fused: tuple[Site, ...]
    skipped: tuple[Site, ...]

    def __str__(self):
        out = io.StringIO()
        console = Console(file=out, width=_width(), no_color=True, markup=False)
        if self.fused:
            console.print(self.table())
        if self.skipped:
            table = Table("pattern", "direction", "operands", "source", "reason", title=f"{len(self.skipped)} skipped")
            for site in self.skipped:
                table.add_row(site.pattern, site.direction, _operands(site), site.source, site.reason)
            console.print(table)
        if not self.fused and not self.skipped:
            console.print("nothing to fuse: no convolution, dense layer, norm, recurrent cell or max pool in this program")
        return out.getvalue().rstrip()

    def table(self) -> Table:
        """The fused sites as a rich table."""
        saved = sum(site.bytes_saved for site in self.fused)
        title = f"{len(self.fused)} fused, about {saved / 1e6:.1f} MB of memory traffic saved"
        table = Table("pattern", "direction", "operands", "source", "kernel", "MB saved", title=title)
        for site in self.fused:
            table.add_row(site.pattern, site.direction, _operands(site), site.source, site.kernel, f"{site.bytes_saved / 1e6:.2f}")
        return table


class FusionError(RuntimeError):
    """`fuse(..., strict=True)` met a site that stays unfused; the message carries the table."""


def log(report: FusionReport) -> None:
    """One line per site on stderr, if JAXFUSE_LOG=1."""
    if os.environ.get("JAXFUSE_LOG", "0") not in ("", "0"):
        for found in (*report.fused, *report.skipped):
            print(f"jaxfuse: {found}", file=sys.stderr)


def _operands(site: Site) -> str:
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
    return "  ".join(f"{short.get(d, d)}{list(s)}".replace(" ", "") for d, s in zip(site.dtypes, site.shapes))


def _width() -> int:
    try:
        return max(100, os.get_terminal_size().columns)
    except OSError:  # not a terminal
        return 160
