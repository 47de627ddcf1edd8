"""Which values of the program are statistics of another over some of its axes, however they are written: sums, means of means,
E[x²]-E[x]², E[(x-E[x])²]. A batch norm keeps the channels' axis, a norm of rows those before the row.

A statistic is known by what it computes: a coefficient is a table of its values at some points (mean, var).
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.axes import IndexMap
from jaxfuse.analysis.forms import Form, Forms, Known
from jaxfuse.analysis.normal import ADD, constant
from jaxfuse.analysis.sums import Reduction
from jaxfuse.program.graph import Node, Value
from jaxfuse.runtime import private

_random = np.random.default_rng(0)
MEAN = _random.normal(size=24)
VAR = np.geomspace(1e-6, 10, 24)  # small ones too: there epsilon shows
ONE = np.ones_like(MEAN)


# In terms of the two statistics that a kernel computes robustly: E[x²] - E[x]² is never evaluated by that subtraction.
KINDS: dict[str, Callable] = {"E[x]": lambda mean, var: mean, "E[(x - E[x])²]": lambda mean, var: var,
                              "E[x²]": lambda mean, var: var + mean * mean}
TABLES = {kind: of(MEAN, VAR) for kind, of in KINDS.items()}


class Moment(NamedTuple):
    """weight · that of the kind"""

    kind: str
    weight: float = 1.0

    def of(self, mean, var):
        value = KINDS[self.kind](mean, var)
        return value if self.weight == 1 else value * self.weight


def _moment(table: np.ndarray, near: float) -> Moment | None:
    """Whose table it is, but for a factor and the rounding of float64, so that an epsilon shows; weights so `near` to 1 are 1."""
    for kind, exact in TABLES.items():
        weight = float(table[-1] / exact[-1])
        if weight and np.all(np.abs(table - weight * exact) <= 1e-14 * abs(weight) * (np.abs(exact) + TABLES["E[x²]"])):
            return Moment(kind, 1.0 if abs(weight - 1) < near else weight)
    return None


class Statistics(Forms):
    """The values of the program that are statistics of `x` over all axes but those that are `kept`.

    `moments` says what they are.
    """

    of_sizes = True

    def __init__(self, x: Value, kept: tuple[int, ...], same: Iterable[Value] = ()):
        super().__init__(x, kept, same)
        self.moments: dict[Value, Moment] = {}
        self.itself = Form({(x,): ONE, (): MEAN})
        with np.errstate(all="ignore"):
            for value in self.same:
                self._found(value, Known(IndexMap.of(value.shape), self.itself))
            self._follow()

    @property
    def axis(self) -> int:
        """The one axis that is kept: a batch norm's channels."""
        (axis,) = self.kept
        return axis

    @property
    def means(self) -> dict[Value, IndexMap | None]:
        """The values that are the mean itself, and their index maps."""
        return {value: self.known[value].index_map for value, moment in self.moments.items() if moment == Moment("E[x]")}

    def __bool__(self):
        return {"E[x]", "E[(x - E[x])²]"} <= {moment.kind for moment in self.moments.values()}

    def _found(self, value: Value, known: Known):
        table = known.form.table
        unknown = private.is_symbolic_size(self.count)  # then other weights are no numbers of the program
        moment = None if table is None else _moment(table, 1e-12 if unknown else 1e-6)
        moment = None if moment and moment.weight != 1 and unknown else moment
        if moment and known.index_map and known.index_map.flat == self.kept_sub_axes:
            self.moments[value] = moment
        if moment and moment.weight == 1:  # its roundings must not grow where it is subtracted
            known = Known(known.index_map, Form.number(TABLES[moment.kind]))
        super()._found(value, known)

    def _made(self, node: Node) -> Known | None:
        return None if self._is_unseen(node) else super()._made(node)

    def _is_unseen(self, node: Node) -> bool:
        """Whether it adds a number to a statistic, or bounds it by one, that the values at (MEAN, VAR) cannot show."""
        if node.primitive not in ("max", *ADD, "sub") or any(map(self.is_tensor, node.inputs)):
            return False
        numbers = [n for v in node.inputs if v not in self.known and (n := constant(v)) is not None]
        if node.primitive != "max":
            return any(0 < abs(n) < 5e-13 for n in numbers)
        tables = [table for v in node.inputs if v in self.known and (table := self.known[v].form.table) is not None]
        return any(0 < n <= table.min() for n in numbers for table in tables)

    def _summed(self, value: Value, reduction: Reduction, form: Form):
        """Σ(x - mean) is 0, Σ(x - mean)² is count·var. Of what is rounded, or scaled by a statistic, they are not x's."""
        square, offset = form.terms.get((self.x, self.x), 0.0), form.terms.get((), 0.0)
        rounded = value not in self.same and jnp.promote_types(value.dtype, self.x.dtype) != value.dtype
        if rounded or form.needs or np.ptp(form.terms[max(form.terms, key=len)]) > 0:
            return
        total = reduction.weight * private.example(self.count) * (offset + square * VAR)
        if np.any(total) and reduction.value not in self.known:
            self._found(reduction.value, Known(reduction.index_map, Form.number(total)))
