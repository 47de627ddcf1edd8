"""What a rule of profitability is: a table of measurements, from which the smallest site worth rewriting follows."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxfuse.ops.stage import FLOATS

DTYPES = FLOATS  # in which every op is measured
NOISE = 1.05  # times as long: nothing to tell two equal ways apart
DIRECTIONS = ("forward", "backward")


class Point(NamedTuple):
    """Microseconds per op under XLA and fused, at one size; "backward": of forward and gradient together."""

    size: int
    xla: float
    fused: float
    direction: str = "forward"


class Rule(NamedTuple):
    """For which sites of an op the points speak; None: for any. `direction` "forward" or "backward", `shape` one of the op's
    shape classes, `isa` a name that `jaxfuse.tuning.tuned.isa()` has ("avx2", "avx512", "avx512_core_bf16", "avx512_core_amx"). What
    comes with jaxfuse names one; what a user measures holds for that machine alone. `onednn`: it had a part in it, and must be there.

    Without a direction the forward and the backward points count together: what is rewritten going forward may be
    differentiated later.
    """

    points: tuple[Point, ...]
    direction: str | None = None
    dtype: str | None = None
    shape: str | None = None
    isa: str | None = None
    machine: str = "this machine"
    onednn: bool = False

    def fits(self, direction: str, dtype: str, shape: str, isa: tuple[str, ...]) -> bool:
        own = (self.direction, direction), (self.dtype, dtype), (self.shape, shape)
        return all(mine in (None, theirs) for mine, theirs in own) and self.holds_with(isa)

    def holds_with(self, isa: tuple[str, ...]) -> bool:
        """`isa`: of our own loops and, where it is there, of oneDNN."""
        return self.isa in (None, *isa) and (not self.onednn or len(isa) == 2)

    @property
    def in_inference(self) -> "Rule":
        """By the forward points alone, where both directions count together."""
        return self if self.direction else self._replace(points=tuple(p for p in self.points if p.direction == "forward"))

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


class SizeSweep(NamedTuple):
    """What to measure for a shape class: `program(x, *parameters)`, plain JAX with a value of x's shape, at growing shapes,
    each a tuple with the shape of every argument. `neighbours` are patterns that are fused both ways: ops that the program has
    beside this one, so that it meets its operands as it does in a network."""

    program: Callable
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    neighbours: tuple[str, ...] = ()


def elements(config, types) -> int:
    """The size of a site of an op that is bound by memory: how many numbers x has."""
    return math.prod(types[0].shape)


class OpRules(NamedTuple):
    """Everything about when one op is worth it.

    unit: what `size(config, types)` counts, as in "operations"; `types` are the op's arguments with shape and dtype, of the
    forward op in both directions. `shape_class(config, types)` names a kind of site that has a size sweep, or rules, of its own.
    `size_sweeps`: for each shape class what to measure. `directions_apart`: whether a site is judged by its own direction alone.
    """

    unit: str
    size: Callable[[Any, tuple], int]
    size_sweeps: dict[str, SizeSweep]
    shape_class: Callable[[Any, tuple], str] = lambda config, types: "any"
    directions_apart: bool = False
