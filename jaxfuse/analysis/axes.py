"""Where the elements of a value come from, after steps that only move or repeat them: an index map with mixed radices.

Each axis of the value has a run of digits, most significant first. A digit is (stride, length): the element whose digits are
d₁, d₂, … is the one at flat index Σ stride·d of the origin. Along a digit with stride 0 the value repeats.

    float32[2, 6, 8] itself            ((48, 2),)  ((8, 6),)  ((1, 8),)
    transposed to [8, 2, 6]            ((1, 8),)  ((48, 2),)  ((8, 6),)
    that, reshaped to [8, 12]          ((1, 8),)  ((8, 12),)             for 48 = 6·8 the two digits are one
    [6], broadcast to [2, 6, 8]        ((0, 2),)  ((1, 6),)  ((0, 8),)

A negative stride -1 - i is that of an axis along which the value was stacked with others, as the i-th of them.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Self

from jaxfuse.program.graph import Node
from jaxfuse.runtime import private

Run = tuple[tuple[int, ...], ...]  # a layout's digits begin with the axis that they are of (analysis/layout.py)


@dataclasses.dataclass(frozen=True)
class IndexMap:
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, shape) -> "IndexMap":
        """Of the origin itself."""
        strides = [math.prod([n if is_long(n) else 1 for n in shape[d + 1 :]]) for d in range(len(shape))]
        return cls(tuple(((stride, n),) for stride, n in zip(strides, shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(length(run) for run in self.runs)

    @property
    def flat(self) -> Run:
        """The digits of all axes, in order."""
        return merged(digit for run in self.runs for digit in run)

    def is_same(self, other: "IndexMap") -> bool:
        return self.shape == other.shape and self.flat == other.flat

    def of_runs(self, runs: Iterable[Run]) -> Self:
        """The same elements, with these runs for axes."""
        return dataclasses.replace(self, runs=tuple(runs))

    def without(self, axes) -> Self:
        return self.of_runs(run for d, run in enumerate(self.runs) if d not in axes)

    def then(self, node: Node) -> Self | None:
        """The map of the node's output, if the node only moves or repeats the elements of its input."""
        shape = node.out.shape
        match node.primitive:
            case "transpose":
                return self.of_runs(self.runs[d] for d in node.params["permutation"])
            case "broadcast_in_dim":
                source = dict(zip(node.params["broadcast_dimensions"], map(merged, self.runs)))
                return self.of_runs(source.get(d, ()) for d in range(len(shape))).repeated_to(shape)
            case "reshape" | "squeeze" | "expand_dims" | "copy" | "pvary":
                return self if shape == self.shape else self.reshaped(shape)
            case "slice":
                return self._taken(**node.params)
        return None

    def stacked(self, axis: int, index: int, count: int) -> Self:
        """Of `count` values that are stacked along an axis: the one at the index."""
        return self.of_runs((*self.runs[:axis], ((-1 - index, count),), *self.runs[axis:]))

    @property
    def is_stacked(self) -> bool:
        return any(stride < 0 for stride, _ in self.flat)

    def _taken(self, start_indices, limit_indices, strides) -> Self | None:
        """A slice of what was stacked, which takes this value only, and all of it."""
        runs: list[Run] = []
        for run, start, limit in zip(self.runs, start_indices, limit_indices):
            own = limit - start == 1 and [stride for stride, _ in run] == [-1 - start]
            if strides is not None or not own and limit - start != length(run):
                return None
            runs.append(() if own else run)
        return self.of_runs(runs)

    def reshaped(self, shape) -> Self | None:
        """None where an axis of the shape would have a part of a digit that is not a digit itself."""
        runs = regrouped(self.flat, shape)
        return self.of_runs(runs) if runs is not None else None

    def merged_with(self, other: "IndexMap") -> "IndexMap | None":
        """That of an elementwise function of two values: each digit that either of them has. None where they disagree."""
        runs: list[Run] = []
        for left, right in zip(self.runs, other.runs):
            if left == right or length(left) == 0:
                runs.append(left)
                continue
            cuts = sorted({*_ends(left), *_ends(right)}, key=private.known)  # JAX cannot tell whether 1 < t
            if any(high % low for low, high in zip(cuts, cuts[1:])):
                return None
            lengths = [high // low for low, high in zip(cuts, cuts[1:])][::-1]
            mine, theirs = (IndexMap((run,)).reshaped(lengths) for run in (left, right))
            pairs = [(a, b) for (a,), (b,) in zip(mine.runs, theirs.runs)] if mine and theirs else []
            if len(pairs) < len(lengths) or any(a != b and a[0] and b[0] for a, b in pairs):
                return None
            runs.append(tuple(a if a[0] else b for a, b in pairs))
        return IndexMap(tuple(runs))

    def repeated_to(self, shape) -> Self:
        """Axes of length 1 repeat."""
        return self.of_runs(run if length(run) == n else ((0, n),) for run, n in zip(self.runs, shape))


def is_long(n) -> bool:
    """Whether an axis of this length has more places than one; one of unknown length is taken to."""
    return n not in (0, 1)


def length(run: Run) -> int:
    return math.prod(digit[-1] for digit in run)


def merged(digits: Iterable[tuple[int, ...]]) -> Run:
    """The same with neighbours that are one larger digit as one, and those of one value left out."""
    out: list[tuple[int, ...]] = []
    for *axis, stride, n in digits:
        if n == 1:
            continue
        if out and out[-1][:-1] == (*axis, stride * n):
            n *= out.pop()[-1]
        out.append((*axis, stride, n))
    return tuple(out)


def regrouped(digits: Run, shape) -> tuple[Run, ...] | None:
    """The digits as axes of these lengths; None where one would have a part of a digit that is not a digit itself."""
    pending = list(reversed(digits))
    runs: list[Run] = []
    for n in shape:
        run, rest = [], n
        while rest != 1:
            if not pending:
                return None
            *axis, stride, own = pending.pop()
            if _divides(own, rest):
                run.append((*axis, stride, own))
                rest = 1 if rest == own else rest // own
            elif _divides(rest, own):
                run.append((*axis, stride * (own // rest), rest))
                pending.append((*axis, stride, own // rest))
                rest = 1
            else:
                return None
        runs.append(merged(run))
    return None if pending else tuple(runs)


def _divides(n, of) -> bool:
    return n == of or is_long(n) and is_long(of) and of % n == 0


def _ends(run: Run) -> Iterator[int]:
    """How many elements lie in what follows each digit, and in all."""
    n = 1
    yield n
    for *_, own in reversed(run):
        n *= own
        yield n
