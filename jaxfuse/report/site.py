"""One row of a report."""

import dataclasses
import re
from typing import NamedTuple

from jaxfuse.program.site import Match, Refusal
from jaxfuse.program.source import calling_line
from jaxfuse.running import kernels
from jaxfuse.runtime.private import known


class Times(NamedTuple):
    """Milliseconds of a site's own program, compiled alone and run on random inputs of its shapes.

    fused, unfused: None where it cannot be measured; why: the reason for that, else "".
    """

    fused: float | None
    unfused: float | None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Site:
    """One place in the program.

    pattern: like "conv+bias+relu"; direction: "forward" or "backward"; shapes, dtypes: of the full-size operands;
    source: "file:line" of the user's code; kernel: what computes it ("onednn", "native": our own loops, "native+onednn": part by
    part, "plain JAX"), "" if skipped;
    bytes_saved: an estimate of the memory traffic that the fused kernel avoids, in bytes;
    reason: for a skipped site the first check that failed, with the value or the reader that failed it;
    scopes: the `jax.named_scope`s of its parts; those of Flax linen are modules: "jvp(ResNet)/Bottleneck_2/Conv_1";
    equations: indices into `report.program.equations` of those that it stands for;
    times: what `explain(..., measure=True)` measured.
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
    equations: tuple[int, ...] = ()
    times: Times | None = None

    def __str__(self):
        verdict = f"fused, {self.kernel}" if not self.reason else f"skipped: {self.reason}"
        return f"{self.place}: {verdict}"

    @property
    def place(self) -> str:
        """Like "conv+relu forward float32[8, 56, 56, 64] at model.py:12"."""
        shapes = " ".join(f"{d}{list(s)}" for d, s in zip(self.dtypes, self.shapes))
        return f"{self.pattern} {self.direction} {shapes} at {self.source}"

    @property
    def module(self) -> str:
        """The first scope without JAX's transformations: "ResNet/Bottleneck_2/Conv_1"."""
        return untransformed(self.scopes[0]) if self.scopes else ""

    @property
    def operands(self) -> str:
        """Types and shapes of the operands: "f32[8,56,56,64]  f32[3,3,64,64]"."""
        short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
        return "  ".join(f"{short.get(d, d)}{list(s)}".replace(" ", "") for d, s in zip(self.dtypes, self.shapes))


class Rows(NamedTuple):
    """The sites of a program, by what became of them."""

    fused: tuple[Site, ...]
    skipped: tuple[Site, ...]
    unfused_steps: tuple[Site, ...]


def site(found: Match | Refusal) -> Site:
    """The row, with the kernel that runs it: its program is traced for that."""
    made = where(found)
    return dataclasses.replace(made, kernel=kernels(found.emissions)) if isinstance(found, Match) else made


def where(found: Match | Refusal) -> Site:
    """The row but for its kernel."""
    shapes = tuple(tuple(v.shape) for v in found.operands)
    dtypes = tuple(str(v.dtype) for v in found.operands)
    source = found.anchor.source()
    if source == "unknown":
        source = calling_line()
    scopes = tuple(dict.fromkeys(node.scope() for node in found.nodes)) or (found.anchor.scope(),)
    if isinstance(found, Match):
        return Site(found.pattern, found.direction, shapes, dtypes, source, bytes_saved=known(found.bytes_saved), scopes=scopes)
    return Site(found.pattern, found.direction, shapes, dtypes, source, reason=found.reason, scopes=scopes)


def untransformed(scope: str) -> str:
    """A scope without the names of JAX's transformations around its parts."""
    return re.sub(r"\w+\(|\)", "", scope).removeprefix("/")
