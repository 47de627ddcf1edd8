"""Full-size values as what they are in each row: sums of terms  t(mean, var) · (x - mean)^p · parameters.

The mean and the variance are x's own, over the normalised axes. A factor t is a table of its values at some points (mean, var),
so that every spelling of epsilon and of the root is told by what it computes; parameters stay values of the program.

Where an element is, through reshapes, broadcasts and transposes, is told by digits: for each axis of a value, most significant
first, pairs (stride, n), meaning (flat index in x // stride) % n; stride 0 is an axis along which the value repeats.
"""

import math
from typing import NamedTuple

import numpy as np

from jaxfuse.analysis.canonical import CAST, constant, is_square, per_channel, size, varying_axes
from jaxfuse.analysis.elementwise import RULES
from jaxfuse.program.graph import Node, Value
from jaxfuse.runtime import private

_random = np.random.default_rng(0)
MEAN = _random.normal(size=24)
VAR = np.geomspace(1e-6, 10, 24)  # small ones too: there epsilon shows

Digits = tuple[tuple[tuple[int, int], ...], ...]
Key = tuple[tuple[int, int, int], ...]  # parameters, as (id, stride, length), in order


class Known(NamedTuple):
    """terms: (power of x - mean, parameters) -> table"""

    digits: Digits
    terms: dict[tuple[int, Key], np.ndarray]

    @property
    def table(self) -> np.ndarray | None:
        """Of a value that is one number for each row."""
        return self.terms.get((0, ())) if set(self.terms) == {(0, ())} else None


def row_major(shape) -> Digits:
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return tuple(((stride, n),) for stride, n in zip(strides, shape))


class Rows:
    """What the values that `nodes` compute from x are; `known` maps id(value) to Known, `parameters` the ids in keys to
    values. `same` are x in other shapes and dtypes."""

    def __init__(self, x: Value, axes: set[int], same: list[Value], nodes: list[Node]):
        self.known: dict[int, Known] = {}
        self.parameters: dict[int, Value] = {}
        self.count = math.prod(x.shape[d] for d in axes)
        self.kept = merged(sum((row_major(x.shape)[d] for d in range(x.ndim) if d not in axes), ()))
        self.shapes = {v.shape: row_major(v.shape) for v in same}
        for value in same:
            self.known[id(value)] = Known(row_major(value.shape), {(1, ()): np.ones_like(MEAN), (0, ()): MEAN})
        self.mine = {node.index for node in nodes}
        for node in sorted(nodes, key=lambda node: node.index):
            if id(node.out) not in self.known and (made := self._made(node)):
                self.known[id(node.out)] = made

    def _made(self, node: Node) -> Known | None:
        operands = [self._operand(v, node.out) for v in node.inputs]
        if None in operands:
            return None
        name, first = node.primitive, operands[0]
        if name == "reduce_sum":
            return self._summed(node, first)
        if (digits := _moved(node, first.digits)) is not None:
            return Known(digits, first.terms)
        digits = _joined([k.digits for k in operands if k.digits], node.out.shape)
        terms = digits and _combined(node, operands)
        return Known(digits, terms) if terms else None

    def _operand(self, value: Value, out: Value) -> Known | None:
        """What is known, a number, or a parameter: then `out` tells its axes."""
        if id(value) in self.known:
            return self.known[id(value)]
        if (number := constant(value)) is not None:
            return Known((), {(0, ()): np.full_like(MEAN, number)})
        if value.producer is not None and value.producer.index in self.mine:
            return None
        axes = tuple(sorted(varying_axes(value)))
        found = [next((digits[d] for shape, digits in self.shapes.items()
                       if len(shape) == value.ndim == len(out.shape) and shape[d] == value.shape[d]), None) for d in axes]
        source = per_channel(value, value, axes)
        if None in found or not isinstance(source, Value):
            return None
        run = merged(sum(found, ()))
        if len(run) > 1:
            return None
        (stride, length), = run or ((1, 1),)
        self.parameters[id(source)] = source
        digits = tuple(found[axes.index(d)] if d in axes else ((0, n),) for d, n in enumerate(value.shape))
        return Known(digits, {(0, ((id(source), stride, length),)): np.ones_like(MEAN)})

    def _summed(self, node: Node, of: Known) -> Known | None:
        """Over the normalised axes: Σ(x - mean) = 0, Σ(x - mean)² = count·var."""
        axes = node.params["axes"]
        digits = tuple(digit for d, digit in enumerate(of.digits) if d not in axes)
        if merged(sum(digits, ())) != self.kept or size(node.inputs[0]) != size(node.out) * self.count:
            return None
        if any(parameters or power > 2 for power, parameters in of.terms):
            return None
        factors = (1, 0, VAR)
        return Known(digits, {(0, ()): sum(t * factors[power] * self.count for (power, _), t in of.terms.items())})


def _combined(node: Node, operands: list[Known]) -> dict | None:
    """The terms of an elementwise node's value."""
    name = node.primitive
    if name in ("add", "add_any", "sub"):
        sign, terms = -1 if name == "sub" else 1, dict(operands[0].terms)
        for key, table in operands[1].terms.items():
            terms[key] = terms.get(key, 0) + sign * table
        return terms
    tables = [k.table for k in operands]
    if all(t is not None for t in tables):
        with np.errstate(all="ignore"):
            return {(0, ()): np.asarray(RULES[name](node.params, *tables))} if name in RULES else None
    if name == "neg":
        return {key: -table for key, table in operands[0].terms.items()}
    if name == "div" and tables[1] is not None:
        return {key: table / tables[1] for key, table in operands[0].terms.items()}
    if name == "mul" or is_square(node, node.inputs[0]):
        products: dict = {}
        for (p, left), a in operands[0].terms.items():
            for (q, right), b in operands[-1].terms.items():
                key = p + q, tuple(sorted(left + right))
                products[key] = products.get(key, 0) + a * b
        return products
    return None


# --- digits ------------------------------------------------------------------------------------------------------


def merged(run) -> tuple[tuple[int, int], ...]:
    """The same with neighbours that are one larger digit as one, and those of one value left out."""
    out: list[tuple[int, int]] = []
    for stride, n in run:
        if n == 1:
            continue
        if out and out[-1][0] == stride * n:
            stride, n = stride, out.pop()[1] * n
        out.append((stride, n))
    return tuple(out)


def _moved(node: Node, digits: Digits) -> Digits | None:
    """The digits after a node that only moves or repeats elements."""
    name, shape = node.primitive, node.out.shape
    if name in (CAST, "copy", "stop_gradient", "pvary"):
        return digits
    if name == "transpose":
        return tuple(digits[d] for d in node.params["permutation"])
    if name == "broadcast_in_dim":
        of, given = {d: i for i, d in enumerate(node.params["broadcast_dimensions"])}, node.inputs[0].shape
        return tuple(digits[of[d]] if d in of and given[of[d]] == n else ((0, n),) for d, n in enumerate(shape))
    if name in ("reshape", "squeeze", "expand_dims"):
        return _regrouped(sum(digits, ()), shape)
    return None


def _regrouped(run, shape) -> Digits | None:
    """The digits of an array's elements in their order, for the axes of another shape."""
    pending, axes = [digit for digit in reversed(run) if digit[1] != 1], []
    for n in shape:
        axis = []
        while n > 1:
            if not pending:
                return None
            stride, length = pending.pop()
            taken = math.gcd(n, length)
            if taken == 1 or taken < n and taken < length:
                return None
            axis.append((stride * (length // taken), taken))
            if taken < length:
                pending.append((stride, length // taken))
            n //= taken
        axes.append(tuple(axis))
    return tuple(axes)


def _joined(several: list[Digits], shape) -> Digits | None:
    """Those of an elementwise function of values of one shape: each digit that any of them has; they must agree."""
    joined: Digits = tuple(((0, n),) for n in shape)
    for digits in several:
        axes = []
        for n, left, right in zip(shape, joined, digits):
            right = right if math.prod(length for _, length in right) == n else ((0, n),)  # of length 1, repeated
            cuts = sorted(_ends(left) | _ends(right), key=private.known)  # JAX cannot tell whether 1 < t
            mine, theirs = _cut(left, cuts), _cut(right, cuts)
            if mine is None or theirs is None or any(a != b and a[0] and b[0] for a, b in zip(mine, theirs)):
                return None
            axes.append(tuple(a if a[0] else b for a, b in zip(mine, theirs)))
        joined = tuple(axes)
    return joined


def _ends(run) -> set[int]:
    """How many elements lie in what follows each digit."""
    ends, n = set(), 1
    for _, length in reversed(run):
        ends.add(n)
        n *= length
    return ends | {n}


def _cut(run, cuts) -> list[tuple[int, int]] | None:
    """The digits cut at these numbers of elements, each of which must divide the next."""
    out, n = [], 1
    for stride, length in reversed(run):
        inside = [c for c in cuts if n <= c <= n * length]
        for low, high in zip(inside, inside[1:]):
            if high % low:
                return None
            out.append((stride * (low // n), high // low))
        n *= length
    return out[::-1]
