"""What a rule of profitability is: a table of measurements, from which the smallest site worth rewriting follows."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

NOISE = 1.05  # times as long: nothing to tell two equal ways apart
DIRECTIONS = ("forward", "backward")
# Of a Rule: where it was measured, and the instruction set that was meant. A rule of bfloat16 names the one with bf16 where
# oneDNN computes: without it, as with AMX, other code runs, which nobody measured.
ZEN_3 = dict(isa="avx2", machine="AMD Zen 3, 2 cores, AVX2")  # oneDNN computes bfloat16 in float32 there
ZEN_4 = dict(isa="avx512", machine="AMD Zen 4, 2 cores, AVX-512")
ZEN_4_BUSY = dict(isa="avx512", machine="AMD Zen 4, 2 cores, AVX-512, with other work on them")
ZEN_4_BF16 = dict(isa="avx512_core_bf16", machine="AMD Zen 4, 2 cores, AVX-512")


class Point(NamedTuple):
    """Microseconds per op under XLA and fused, at one size; "backward": of forward and gradient together."""

    size: int
    xla: float
    fused: float
    direction: str = "forward"


class Rule(NamedTuple):
    """For which sites of an op the points speak; None: for any. `direction` "forward" or "backward", `shape` one of the op's
    shape classes, `isa` a name that `jaxfuse.tuning.tuned.isa()` has ("avx2", "avx512", "avx512_core_bf16", "avx512_core_amx"). Every
    built-in rule names one; what a user measures holds for that machine alone.

    Without a direction the forward and the backward points count together: what is rewritten going forward may be
    differentiated later.
    """

    points: tuple[Point, ...]
    direction: str | None = None
    dtype: str | None = None
    shape: str | None = None
    isa: str | None = None
    machine: str = "this machine"

    def fits(self, direction: str, dtype: str, shape: str, isa: tuple[str, ...]) -> bool:
        own = (self.direction, direction), (self.dtype, dtype), (self.shape, shape)
        return all(mine in (None, theirs) for mine, theirs in own) and (self.isa is None or self.isa in isa)

    @property
    def smallest(self) -> float:
        """The smallest size at which the fused kernel won and above which it never lost by more than noise: 0 if that is the
        smallest measured, infinite if there is none."""
        found, sizes = math.inf, sorted({p.size for p in self.points})
        for size in reversed(sizes):
            ratios = [p.fused / p.xla for p in self.points if p.size == size]
            if max(ratios) > NOISE:
                break
            if max(ratios) < 1:
                found = size
        return 0 if sizes and found == sizes[0] else found

    @property
    def largest(self) -> int:
        """The largest size measured."""
        return max((p.size for p in self.points), default=0)

    @property
    def sites(self) -> str:
        return " ".join(filter(None, (self.shape, self.dtype, self.direction, self.isa))) or "any"

    def wins_from(self, unit: str) -> str:
        """The smallest size in words."""
        if self.smallest == math.inf:
            return f"never, up to {self.largest} {unit}"
        only = "the largest measured: " if self.smallest == self.largest else ""
        return f"{only}{self.smallest} {unit}" if self.smallest else "any size"


class Ladder(NamedTuple):
    """What to measure for a shape class: `program(x, *parameters)`, plain JAX with a value of x's shape, at growing shapes,
    each a tuple with the shape of every argument."""

    program: Callable
    shapes: tuple[tuple[tuple[int, ...], ...], ...]


class OpRules(NamedTuple):
    """Everything about when one op is worth it.

    unit: what `size(config, types)` counts, as in "operations"; `types` are the op's arguments with shape and dtype, of the
    forward op in both directions. `shape_class(config, types)` names a kind of site that has a size sweep, or rules, of its own.
    `rules` are read top-down, the first that fits decides. `size_sweeps`: for each shape class how to measure it again.
    """

    unit: str
    size: Callable[[Any, tuple], int]
    rules: tuple[Rule, ...]
    size_sweeps: dict[str, Ladder]
    shape_class: Callable[[Any, tuple], str] = lambda config, types: "any"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


def points(*rows: tuple) -> tuple[Point, ...]:
    """Points from rows (size, (XLA, fused) forward, (XLA, fused) backward); the last may be left out."""
    return tuple(Point(size, xla, fused, direction) for size, *pairs in rows for direction, (xla, fused) in zip(DIRECTIONS, pairs))
