"""What a norm of rows makes of x, as a form:  coefficient · (x - mean) + offset  (analysis/forms.py).

Both are sums of products  t(mean, var) · parameters. A coefficient t is a table of its values at some points (mean, var), so that
every spelling of epsilon and of the root is told by what it computes. Parameters stay values of the program.
"""

from typing import NamedTuple

import numpy as np

from jaxfuse.analysis.axes import IndexMap, merged
from jaxfuse.analysis.canonical import CAST, constant, is_square, per_channel, varying_axes
from jaxfuse.analysis.elementwise import RULES
from jaxfuse.analysis.forms import Form, Parameter, combined
from jaxfuse.analysis.statistics import Statistics
from jaxfuse.program.graph import Node, Value

_random = np.random.default_rng(0)
MEAN = _random.normal(size=24)
VAR = np.geomspace(1e-6, 10, 24)  # small ones too: there epsilon shows
ONE = np.ones_like(MEAN)

SAME = (CAST, "stop_gradient")


class Known(NamedTuple):
    """`places` is None for a number, which is everywhere."""

    places: IndexMap | None
    form: Form

    @property
    def table(self) -> np.ndarray | None:
        """Of a value that is one number for each row, and no parameter."""
        return self.form.terms[()] if set(self.form.terms) == {()} else None


class Rows:
    """What the values are that `nodes` compute from x, its statistics, and parameters. `same` are x in other shapes and dtypes."""

    def __init__(self, statistics: Statistics, same: list[Value], nodes: list[Node]):
        self._shapes = {value.shape: IndexMap.of(value.shape) for value in same}
        self._mine = {node.index for node in nodes}
        itself = Form({(statistics.x,): ONE, (): MEAN})
        self.known = {value: Known(self._shapes[value.shape], itself) for value in same}
        for value, places in statistics.places.items():
            self.known.setdefault(value, Known(places, Form({(): statistics.known[value].of(MEAN, VAR)})))
        with np.errstate(all="ignore"):
            for node in sorted(nodes, key=lambda node: node.index):
                if node.out not in self.known and (made := self._made(node)):
                    self.known[node.out] = made

    def _made(self, node: Node) -> Known | None:
        operands = [known for value in node.inputs if (known := self._operand(value, node.out))]
        if len(operands) < len(node.inputs):
            return None
        first = operands[0]
        if first.places is not None and len(operands) == 1:
            moved = first.places if node.primitive in SAME else first.places.then(node)
            if moved is not None:
                return Known(moved, first.form)
        form = _computed(node, operands)
        places: IndexMap | None = IndexMap(tuple(((0, n),) for n in node.out.shape))
        for known in operands:
            if known.places is not None and known.places.runs:  # of no number
                places = places and places.merged_with(known.places.repeated_to(node.out.shape))
        return Known(places, form) if form and places else None

    def _operand(self, value: Value, out: Value) -> Known | None:
        """What is known, a number, or a parameter: then `out` tells its axes."""
        if value in self.known:
            return self.known[value]
        if (number := constant(value)) is not None:
            return Known(None, Form({(): number * ONE}))
        if value.producer is not None and value.producer.index in self._mine:
            return None
        axes = tuple(sorted(varying_axes(value)))
        runs = [next((places.runs[d] for shape, places in self._shapes.items()
                      if len(shape) == value.ndim == len(out.shape) and shape[d] == value.shape[d]), None) for d in axes]
        source = per_channel(value, value, axes)
        if None in runs or not isinstance(source, Value):
            return None
        run = merged(digit for run in runs if run for digit in run)
        if len(run) > 1:
            return None
        (own,) = run or ((1, 1),)
        places = IndexMap(tuple(runs[axes.index(d)] or () if d in axes else ((0, n),) for d, n in enumerate(value.shape)))
        return Known(places, Form({(Parameter(source, *own),): ONE}))


def _computed(node: Node, operands: list[Known]) -> Form | None:
    """The form of an elementwise node's value."""
    tables = [known.table for known in operands]
    forms = [known.form for known in operands]
    if all(t is not None for t in tables):
        return Form({(): np.asarray(RULES[node.primitive](node.params, *tables))}) if node.primitive in RULES else None
    if node.primitive == "neg":
        return -forms[0]
    if len(forms) == 2 or is_square(node, node.inputs[0]):
        return combined("mul" if len(forms) == 1 else node.primitive, forms[0], forms[-1], 1)
    return None
