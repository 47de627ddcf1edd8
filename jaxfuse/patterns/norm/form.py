"""What a recognised norm computes, as the op's config and its parameters: read from its form in each row (analysis/statistics.py)."""

import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.axes import is_long
from jaxfuse.analysis.forms import Form, Parameter
from jaxfuse.analysis.statistics import MEAN, ONE, VAR, Statistics
from jaxfuse.ops.norm_config import NormConfig
from jaxfuse.program.graph import Value
from jaxfuse.program.site import Unfit
from jaxfuse.runtime import private

UNREAD = "its steps are not those of a normalisation by mean and variance"


class Root(NamedTuple):
    """factor/sqrt(var + epsilon), or factor/(sqrt(var) + epsilon); not centered: of the mean square."""

    factor: float
    epsilon: float
    outside: bool
    centered: bool


class NormForm(NamedTuple):
    """inner: (spatial, groups, length), the axes of x from `first` on. gammas and betas: sums of products of parameters,
    (number, which parameters)."""

    root: Root
    first: int
    inner: tuple[int, int, int]
    repeats: int
    gammas: list[tuple[float, tuple[Parameter, ...]]]
    betas: list[tuple[float, tuple[Parameter, ...]]]

    def config(self, rank: int, **options) -> NormConfig:
        return NormConfig(self.inner, rank - self.first, self.root.epsilon, self.repeats,
                          self.root.outside, self.root.centered, **options)

    def used(self) -> list[Value]:
        return list(dict.fromkeys(p.value for _, product in (*self.gammas, *self.betas) for p in product))

    def arrays(self, read):
        """gamma and beta, [groups, length/repeats], from what the program has."""
        groups, length = self.inner[1], self.inner[2] // self.repeats

        def per_channel(parameter):
            vector = parameter.vector(read).astype(jnp.float32)
            inside = parameter.stride // self.repeats if parameter.length > 1 else 1
            repeated = jnp.broadcast_to(vector[:, None], (groups * length // (inside * parameter.length), parameter.length, inside))
            return repeated.reshape(groups, length)

        def total(terms, otherwise):
            products = [math.prod(map(per_channel, product), start=jnp.float32(c)) for c, product in terms]
            return jnp.broadcast_to(sum(products[1:], products[0]) if products else otherwise, (groups, length))

        return total(self.gammas, jnp.float32(1)), total(self.betas, jnp.float32(0))


def read_form(norm: Statistics, end: Value) -> NormForm:
    """The form of `end`. Raises `Unfit` where it is no norm's."""
    x, known = norm.x, norm.known[end]
    if known.index_map is None or known.index_map.flat != norm.index_map.flat:
        raise Unfit(f"{end!r} has the elements of {x!r} in another order")
    scales, offsets = (known.form.coefficients.get(tensors, Form({})).terms for tensors in ((x,), ()))
    if private.is_symbolic_size(norm.count):
        raise Unfit("a symbolic shape, which the kernel would have to know")
    root = next((_root(table) for table in scales.values()), None)
    if root is None:
        raise Unfit(UNREAD)
    unit = next(iter(scales.values())) / root.factor
    gammas, betas = [], []
    for key in dict.fromkeys((*scales, *offsets)):
        table, rest = ONE * scales.get(key, 0), ONE * offsets.get(key, 0)
        rest = rest if root.centered else rest - MEAN * table
        factor, shift = (table / unit).mean(), rest.mean()
        if not np.allclose(table, factor * unit, 1e-6, 0) or not np.allclose(rest, shift, 1e-6, 1e-7 * np.abs(table).max()):
            raise Unfit(UNREAD)
        if factor:
            gammas.append((float(factor), key))
        beside = (table, rest) if key else (table, rest, root.factor * unit)
        if abs(shift) > 1e-10 * max(np.abs(a).max() for a in beside):  # else what arithmetic in float64 left
            betas.append((float(shift), key))
    if len(gammas) == 1 and not gammas[0][1] and abs(gammas[0][0] - 1) < 1e-6:
        gammas = []
    used = {p for _, product in (*gammas, *betas) for p in product}
    view = _view(x, set(range(x.ndim)) - set(norm.kept), [(p.stride, p.length) for p in used if p.length > 1])
    return NormForm(root, *view, gammas, betas)


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
            if abs(epsilon) < 1e-13 * at[i]:
                epsilon = 0.0
            if epsilon >= 0 and np.allclose(made, (at + epsilon) * steepness, rtol=1e-13, atol=0):
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
