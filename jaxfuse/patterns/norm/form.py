"""What a recognised norm computes, as the op's config and its parameters: read from the tables of analysis/rows.py."""

import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.canonical import is_long
from jaxfuse.analysis.rows import MEAN, VAR, Key, Rows, merged, row_major
from jaxfuse.ops.norm_config import NormConfig
from jaxfuse.program.graph import Node, Value
from jaxfuse.program.site import Unfit

UNREAD = "its steps are not those of a normalisation by mean and variance"


class Root(NamedTuple):
    """factor/sqrt(var + epsilon), or factor/(sqrt(var) + epsilon); not centered: of the mean square."""

    factor: float
    epsilon: float
    outside: bool
    centered: bool


class NormForm(NamedTuple):
    """inner: (spatial, groups, length), the axes of x from `first` on. gammas and betas: sums of products of parameters,
    (number, parameters)."""

    root: Root
    first: int
    inner: tuple[int, int, int]
    repeats: int
    gammas: list[tuple[float, Key]]
    betas: list[tuple[float, Key]]
    parameters: dict[int, Value]

    def config(self, **options) -> NormConfig:
        return NormConfig(self.inner, options.pop("rank") - self.first, self.root.epsilon, self.repeats,
                          self.root.outside, self.root.centered, **options)

    def used(self) -> list[Value]:
        names = dict.fromkeys(name for _, key in (*self.gammas, *self.betas) for name, *_ in key)
        return [self.parameters[name] for name in names]

    def arrays(self, read):
        """gamma and beta, [groups, length/repeats], from what the program has."""
        groups, length = self.inner[1], self.inner[2] // self.repeats

        def spread(name, stride, count):
            vector = jnp.asarray(read(self.parameters[name])).astype(jnp.float32).reshape(-1)
            inside = stride // self.repeats if count > 1 else 1
            return jnp.tile(jnp.repeat(vector, inside), groups * length // (inside * count)).reshape(groups, length)

        def total(terms, otherwise):
            products = [math.prod([spread(*p) for p in key], start=jnp.float32(c)) for c, key in terms]
            return jnp.broadcast_to(sum(products[1:], products[0]) if products else otherwise, (groups, length))

        return total(self.gammas, jnp.float32(1)), total(self.betas, jnp.float32(0))


def read_form(x: Value, axes: set[int], same: list[Value], nodes: list[Node], end: Value) -> NormForm:
    """The form of `end`. Raises `Unfit` where it has none."""
    rows = Rows(x, axes, same, nodes)
    known = rows.known.get(id(end))
    if known is None or any(power > 1 for power, _ in known.terms):
        raise Unfit(UNREAD)
    if merged(sum(known.digits, ())) != merged(sum(row_major(x.shape), ())):
        raise Unfit(f"{end!r} has the elements of {x!r} in another order")
    scaled = {key: table for (power, key), table in known.terms.items() if power == 1 and np.abs(table).max() > 0}
    root = next((_root(table) for table in scaled.values()), None)
    if root is None:
        raise Unfit(UNREAD)
    unit = next(iter(scaled.values())) / root.factor
    gammas, betas = [], []
    for key in dict.fromkeys(key for _, key in known.terms):
        table, rest = scaled.get(key, 0 * unit), known.terms.get((0, key), 0 * unit)
        rest = rest if root.centered else rest - MEAN * table
        factor, shift = (table / unit).mean(), rest.mean()
        if not _equal(table, factor * unit) or not np.allclose(rest, shift, 1e-6, 1e-7 * np.abs(table).max()):
            raise Unfit(UNREAD)
        gammas += [(float(factor), key)] * bool(factor)
        betas += [(float(shift), key)] * bool(abs(shift) > 1e-7)
    if gammas == [(1.0, ())] or len(gammas) == 1 and not gammas[0][1] and abs(gammas[0][0] - 1) < 1e-6:
        gammas = []
    used = {p for _, key in (*gammas, *betas) for p in key}
    view = _view(x, axes, [(stride, count) for _, stride, count in used if count > 1])
    return NormForm(root, *view, gammas, betas, rows.parameters)


def _equal(a, b) -> bool:
    return np.allclose(a, b, rtol=1e-6, atol=0)


def _root(table) -> Root | None:
    """1/root² or 1/root is linear in the variance or in the deviation."""
    for centered, var in ((True, VAR), (False, VAR + MEAN**2)):
        for outside in (False, True):
            at, made = (np.sqrt(var), 1 / table) if outside else (var, 1 / table**2)
            i, j = np.argmin(at), np.argmax(at)
            steepness = (made[j] - made[i]) / (at[j] - at[i])
            if steepness == 0 or not np.isfinite(steepness):
                continue
            epsilon = made[i] / steepness - at[i]
            if abs(epsilon) < 1e-13:
                epsilon = 0.0
            if epsilon >= 0 and np.allclose(made, (at + epsilon) * steepness, rtol=1e-6, atol=0):
                factor = 1 / steepness if outside else np.sign(table[0]) / math.sqrt(steepness)
                return Root(float(factor), float(np.float32(epsilon)), outside, centered)
    return None


def _view(x: Value, axes: set[int], runs: list[tuple[int, int]]) -> tuple[int, tuple[int, int, int], int]:
    """(first, inner, repeats) for parameters that are (x's flat index // stride) % count, the `runs`."""
    kinds = [(d in axes, d) for d in range(x.ndim) if is_long(x.shape[d]) or d in axes]
    pieces = [(normalised, [d for _, d in group]) for normalised, group in itertools.groupby(kinds, lambda k: k[0])]
    batch: list[int] = []
    if pieces and not pieces[0][0]:
        (_, batch), *pieces = pieces
    lengths = [math.prod(x.shape[d] for d in group) for _, group in pieces]
    if len(pieces) == 1:
        candidates = [(batch[k] if k < len(batch) else min(pieces[0][1]), (1, math.prod(x.shape[d] for d in batch[k:]), lengths[0]))
                      for k in range(len(batch), -1, -1)]
    elif len(pieces) in (2, 3):
        candidates = [(pieces[0][1][0], (*lengths, 1)[:3])]
    else:
        raise Unfit(f"statistics over axes {sorted(axes)} of {x!r}: the kernel takes batch, places, groups and channels in this order")
    for first, inner in candidates:
        channels = inner[1] * inner[2]
        if all(channels % (stride * count) == 0 for stride, count in runs):
            repeats = math.gcd(inner[2], *[stride for stride, _ in runs]) if inner[0] == 1 else 1
            return first, inner, repeats
    raise Unfit("gamma or beta varies along an axis that is not one of the channels")
