"""Where the elements of a value come from, after steps that only move or repeat them: an index map with mixed radices.

Each axis of the value is split into sub-axes, most significant first. A sub-axis is (stride, length): the element at i₁, i₂, … of the
sub-axes is the one at flat index Σ stride·i of the origin. Along a sub-axis with stride 0 the value repeats.

    float32[2, 6, 8] itself            ((48, 2),)  ((8, 6),)  ((1, 8),)
    transposed to [8, 2, 6]            ((1, 8),)  ((48, 2),)  ((8, 6),)
    that, reshaped to [8, 12]          ((1, 8),)  ((8, 12),)             for 48 = 6·8 two sub-axes are one
    [6], broadcast to [2, 6, 8]        ((0, 2),)  ((1, 6),)  ((0, 8),)

A negative stride -1 - i is that of an axis along which the value was stacked with others, as the i-th of them.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from typing import Self

from jaxfuse.program.graph import Node
from jaxfuse.runtime import private

SubAxes = tuple[tuple[int, ...], ...]  # of one axis; a layout's begin with the axis of the origin that they are of (analysis/layout.py)


@dataclasses.dataclass(frozen=True)
class IndexMap:
    sub_axes: tuple[SubAxes, ...]  # of each axis

    @classmethod
    def of(cls, shape) -> "IndexMap":
        """Of the origin itself."""
        strides = [math.prod([n if is_long(n) else 1 for n in shape[d + 1 :]]) for d in range(len(shape))]
        return cls(tuple(((stride, n),) for stride, n in zip(strides, shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(length, self.sub_axes))

    @property
    def flat(self) -> SubAxes:
        """Those of all axes, in order."""
        return merged(itertools.chain.from_iterable(self.sub_axes))

    def is_same(self, other: "IndexMap") -> bool:
        return self.shape == other.shape and self.flat == other.flat

    def with_sub_axes(self, sub_axes: Iterable[SubAxes]) -> Self:
        """Of the same origin."""
        return dataclasses.replace(self, sub_axes=tuple(sub_axes))

    def without(self, axes) -> Self:
        return self.with_sub_axes(own for d, own in enumerate(self.sub_axes) if d not in axes)

    def then(self, node: Node) -> Self | None:
        """The map of the node's output, if the node only moves or repeats the elements of its input."""
        shape = node.out.shape
        match node.primitive:
            case "transpose":
                return self.with_sub_axes(self.sub_axes[d] for d in node.params["permutation"])
            case "broadcast_in_dim":
                source = dict(zip(node.params["broadcast_dimensions"], map(merged, self.sub_axes)))
                return self.with_sub_axes(source.get(d, ()) for d in range(len(shape))).repeated_to(shape)
            case "reshape" | "squeeze" | "expand_dims" | "copy" | "pvary":
                return self if shape == self.shape else self.reshaped(shape)
            case "slice":
                return self._taken(**node.params)
        return None

    def stacked(self, axis: int, index: int, count: int) -> Self:
        """Of `count` values that are stacked along an axis: the one at the index."""
        return self.with_sub_axes((*self.sub_axes[:axis], ((-1 - index, count),), *self.sub_axes[axis:]))

    @property
    def is_stacked(self) -> bool:
        return any(stride < 0 for stride, _ in self.flat)

    def _taken(self, start_indices, limit_indices, strides) -> Self | None:
        """A slice of what was stacked, which takes this value only, and all of it."""
        left: list[SubAxes] = []
        for own, start, limit in zip(self.sub_axes, start_indices, limit_indices):
            is_stack = limit - start == 1 and [stride for stride, _ in own] == [-1 - start]
            if strides is not None or not is_stack and limit - start != length(own):
                return None
            left.append(() if is_stack else own)
        return self.with_sub_axes(left)

    def reshaped(self, shape) -> Self | None:
        """None where an axis of the shape would end inside a sub-axis that is not divided there."""
        pending = list(reversed(self.flat))
        axes: list[SubAxes] = []
        for n in shape:
            made, rest = [], n
            while rest != 1:
                if not pending:
                    return None
                *axis, stride, own = pending.pop()
                if _divides(own, rest):
                    made.append((*axis, stride, own))
                    rest = 1 if rest == own else rest // own
                elif _divides(rest, own):
                    made.append((*axis, stride * (own // rest), rest))
                    pending.append((*axis, stride, own // rest))
                    rest = 1
                else:
                    return None
            axes.append(merged(made))
        return None if pending else self.with_sub_axes(axes)

    def merged_with(self, other: "IndexMap") -> "IndexMap | None":
        """That of an elementwise function of two values: each sub-axis that either of them has. None where they disagree."""
        both: list[SubAxes] = []
        for left, right in zip(self.sub_axes, other.sub_axes):
            if left == right or length(left) == 0:
                both.append(left)
                continue
            cuts = sorted({*_ends(left), *_ends(right)}, key=private.known)  # JAX cannot tell whether 1 < t
            if any(high % low for low, high in zip(cuts, cuts[1:])):
                return None
            lengths = [high // low for low, high in zip(cuts, cuts[1:])][::-1]
            mine, theirs = (IndexMap((own,)).reshaped(lengths) for own in (left, right))
            pairs = [(a, b) for (a,), (b,) in zip(mine.sub_axes, theirs.sub_axes)] if mine and theirs else []
            if len(pairs) < len(lengths) or any(a != b and a[0] and b[0] for a, b in pairs):
                return None
            both.append(tuple(a if a[0] else b for a, b in pairs))
        return IndexMap(tuple(both))

    def repeated_to(self, shape) -> Self:
        """Axes of length 1 repeat."""
        return self.with_sub_axes(own if length(own) == n else ((0, n),) for own, n in zip(self.sub_axes, shape))


def is_long(n) -> bool:
    """Whether an axis of this length has more elements than one; one of unknown length is taken to."""
    return n not in (0, 1)


def length(sub_axes: SubAxes) -> int:
    return math.prod(n for *_, n in sub_axes)


def merged(sub_axes: Iterable[tuple[int, ...]]) -> SubAxes:
    """The same with neighbours that are one larger sub-axis as one, and those of length 1 left out."""
    out: list[tuple[int, ...]] = []
    for *axis, stride, n in sub_axes:
        if n == 1:
            continue
        if out and out[-1][:-1] == (*axis, stride * n):
            n *= out.pop()[-1]
        out.append((*axis, stride, n))
    return tuple(out)


def _divides(n, of) -> bool:
    return n == of or is_long(n) and is_long(of) and of % n == 0


def _ends(sub_axes: SubAxes) -> Iterator[int]:
    """How many elements lie in what follows each sub-axis, and in all."""
    return itertools.accumulate([n for *_, n in reversed(sub_axes)], operator.mul, initial=1)
