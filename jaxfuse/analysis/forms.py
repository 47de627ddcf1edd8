"""Values as forms of a tensor x: Σ coefficient · product of tensors. The coefficients vary along the kept axes of x only.

A batch norm keeps the channels' axis, a norm of rows those before the row. Whatever autodiff makes of a batch norm is a form of
the normalised tensor x and of the cotangent g of the result, however the user spelled it. Its sums need only Σg and Σg·x.
x enters as x - mean where it has one: where the program subtracts the mean too, nothing is left of it, and nothing cancels.

One walk finds the forms, in program order, by the normal form of each node (normal.py). Its subclasses say what a
coefficient is: a value of the program here, a function of mean and variance in statistics.py.
"""

import functools
import heapq
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.axes import IndexMap, length, merged
from jaxfuse.analysis.layout import RESHAPES
from jaxfuse.analysis.normal import (
    Sum, chosen, constant, is_float_cast, is_rounded, narrowest, normal, per_channel, scaled, size, unwidened, varying_axes)
from jaxfuse.analysis.sums import Reduction, reductions
from jaxfuse.program.graph import Node, Value
from jaxfuse.runtime import private

MOST_TENSORS = 4  # in one form; what has more is a tensor of its own


class Parameter(NamedTuple):
    """A value of the program of which x's element at the flat index i has the number i // stride % length; or one over that."""

    value: Value
    stride: int
    length: int
    inverted: bool = False

    def vector(self, read):
        array = jnp.asarray(read(self.value))
        array = array.astype(jnp.promote_types(array.dtype, jnp.float32)).reshape(-1)
        return 1 / array if self.inverted else array


class Form:
    """Σ number · product of tensors and parameters: `terms` maps the factors to the number, which may be a table of numbers."""

    def __init__(self, terms: dict[tuple, Any]):
        self.terms = terms

    @classmethod
    def of(cls, factor: Value | Parameter) -> Self:
        return cls({(factor,): 1.0})

    @classmethod
    def number(cls, number) -> Self:
        return cls({(): number})

    @functools.cached_property
    def coefficients(self) -> "dict[tuple[Value, ...], Form]":
        """What each product of tensors is multiplied by, and what is added: that of ()."""
        found: dict[tuple, dict] = {}
        for factors, number in self.terms.items():
            tensors = tuple(factor for factor in factors if isinstance(factor, Value))
            found.setdefault(tensors, {})[tuple(factor for factor in factors if factor not in tensors)] = number
        return {tensors: Form(terms) for tensors, terms in found.items()}

    @property
    def degree(self) -> int:
        """In tensors; where it is 2, only a sum can take it further."""
        return max(map(len, self.coefficients), default=0)

    @property
    def tensors(self) -> set[Value]:
        return {tensor for product in self.coefficients for tensor in product}

    @property
    def table(self) -> Any | None:
        """Where it has no factors."""
        return self.terms[()] if set(self.terms) == {()} else None

    @property
    def needs(self) -> tuple[Value, ...]:
        """What the coefficients are computed from."""
        return tuple(p.value for factors in self.terms for p in factors if isinstance(p, Parameter) and p.value.literal is None)

    def vector(self, read):
        """That of a coefficient, or one number."""
        products = [math.prod([p.vector(read) for p in factors if isinstance(p, Parameter)], start=jnp.float32(number))
                    for factors, number in self.terms.items()]
        return sum(products[1:], products[0]) if products else jnp.float32(0)

    def __add__(self, other: Self) -> Self:
        return self._collected((*self.terms.items(), *other.terms.items()))

    def __mul__(self, other: Self) -> Self:
        return self._collected((tuple(sorted(left + right, key=hash)), a * b)
                               for left, a in self.terms.items() for right, b in other.terms.items())

    def _collected(self, terms: Iterable[tuple[tuple, Any]]) -> Self:
        """Without what cancels."""
        sums: dict[tuple, Any] = {}
        for factors, number in terms:
            if factors not in sums:
                sums[factors] = number
            elif np.any(total := sums.pop(factors) + number):
                sums[factors] = total
        return type(self)(sums)

    def __pow__(self, power: float) -> Self | None:
        """Where that is a form too."""
        if power in (1, 2) or len(self.terms) != 1:
            return self if power == 1 else self * self if power == 2 else None
        ((factors, number),) = self.terms.items()
        parameters = [p._replace(inverted=not p.inverted) for p in factors if isinstance(p, Parameter)]
        known = not factors or power == -1 and len(parameters) == len(factors)
        return type(self)({tuple(sorted(parameters, key=hash)): number**power}) if known else None


class Known(NamedTuple):
    """A form, and which elements of x the value's elements are of. A number is everywhere: it has no index map."""

    index_map: IndexMap | None
    form: Form


class Forms:
    """The forms of what the program computes from x, value by value as far as they have one: `known`.

    `kept` are the axes of x that its sums keep, `same` the values that have its elements, by default x itself; `seen` the indices of
    the nodes looked through.
    """

    of_sizes = False  # whether numbers may be of sizes that are not known: where none is emitted

    def __init__(self, x: Value, kept: tuple[int, ...], same: Iterable[Value] = ()):
        self.x, self.kept, self.index_map, self.same = x, kept, IndexMap.of(x.shape), [*same] or [x]
        self.kept_sub_axes = merged(sub_axis for axis in kept for sub_axis in self.index_map.sub_axes[axis])
        self.count = math.prod(n for axis, n in enumerate(x.shape) if axis not in kept)
        self.known: dict[Value, Known] = {}
        self.fixed = {x}
        self.seen: set[int] = set()
        self._pending: list[tuple[int, Node]] = []

    def _follow(self):
        """Goes through what reads a known value, in program order. What is fixed may be made of another tensor: it is itself."""
        while self._pending:
            _, node = heapq.heappop(self._pending)
            if node.index not in self.seen and node.out not in self.fixed and (made := self._made(node)):
                self.seen.add(node.index)
                self._found(node.out, made)

    def _found(self, value: Value, known: Known):
        self.known[value] = known
        if known.form.tensors and known.index_map and known.index_map.flat == self.index_map.flat:
            for reduction in reductions(value, known.index_map):
                self.seen.add(reduction.first.index)
                if reduction.index_map.flat == self.kept_sub_axes:
                    self._summed(value, reduction, known.form)
        for node in value.users:
            if len(node.outputs) == 1:
                heapq.heappush(self._pending, (node.index, node))

    def _summed(self, value: Value, reduction: Reduction, form: Form):
        """Notes the sum of the value, which has this form, over all but the kept axes."""
        raise NotImplementedError

    def _made(self, node: Node) -> Known | None:
        """What the node gives: one of its operands at the same or at other indices, or a sum or product of them."""
        if (same := chosen(node.out)) is not node.out:
            return self.known.get(same)
        known = self.known.get(node.inputs[0])
        if known and is_float_cast(node) and not is_rounded(node.inputs[0], map(narrowest, known.form.tensors or {self.x})):
            return known
        moved = known and known.index_map and len(node.inputs) == 1 and known.index_map.then(node)
        if known and moved:
            repeated = known.form.tensors and size(node.out) != size(node.inputs[0])
            return None if repeated else Known(moved, known.form)
        return self._computed(node)

    def _computed(self, node: Node) -> Known | None:
        """The sum or the product of what is known of its operands."""
        view = normal(node)
        if view is None:
            return None
        values = [value if value in self.known else chosen(value) for value, _ in view.terms]
        operands = [known for value in values if (known := self._operand(value, node))]
        if len(operands) < len(values):
            return None
        numbers = [number for _, number in view.terms]
        form: Form | None
        if isinstance(view, Sum):
            form = functools.reduce(operator.add, [known.form * Form.number(number) for known, number in zip(operands, numbers)])
        else:
            powers = [known.form**number for known, number in zip(operands, numbers)]
            form = None if None in powers else functools.reduce(operator.mul, powers)
        return self._placed(node, form, operands)

    def _placed(self, node: Node, form: Form | None, operands: list[Known]) -> Known | None:
        """None where the operands are of different elements."""
        index_map: IndexMap | None = IndexMap(tuple(((0, n),) for n in node.out.shape))
        for known in operands:
            if known.index_map is not None and known.index_map.sub_axes:  # of no number
                index_map = index_map and index_map.merged_with(known.index_map.repeated_to(node.out.shape))
        return Known(index_map, form) if index_map and form is not None and form.degree <= 2 else None

    def _operand(self, value: Value, node: Node) -> Known | None:
        """What is known of an operand of the node, or can be said of it at sight."""
        number = None if value in self.known else constant(value, example=self.of_sizes)
        return self.known.get(value) if number is None else Known(None, Form.number(np.float64(number)))

    def is_tensor(self, value: Value) -> bool:
        return value in self.known and bool(self.known[value].form.tensors)

    def _parameter(self, value: Value, node: Node) -> Known | None:
        """A value of the program, also where it is multiplied by a number after it was broadcast. Its axes are those of what the node
        combines it with, or of x in the same shape."""
        beside = [known.index_map for v in node.inputs if (known := self.known.get(v)) and known.index_map]
        alike = [index_map.sub_axes for index_map in (*beside, *(IndexMap.of(v.shape) for v in self.same))
                 if len(index_map.sub_axes) == value.ndim == node.out.ndim]
        varying = {d: next((axes[d] for axes in alike if length(axes[d]) == value.shape[d] and all(stride for stride, _ in axes[d])), None)
                   for d in sorted(varying_axes(value))}
        own = merged(sub_axis for sub_axes in varying.values() for sub_axis in sub_axes or ())
        found = _unrepeated(value)
        if None in varying.values() or found is None or len(own) > 1:
            return None
        (source, factor), ((stride, count),) = found, own or ((1, 1),)
        index_map = IndexMap(tuple(varying.get(d) or ((0, n),) for d, n in enumerate(value.shape)))
        return Known(index_map, Form.of(Parameter(source, stride, count)) * Form.number(factor))


def _unrepeated(value: Value) -> tuple[Value, float] | None:
    """(source, number) whose product the value repeats."""
    factor = 1.0
    while not isinstance(source := per_channel(value, value, tuple(varying_axes(value))), Value):
        node = value.producer
        step = scaled(node) if node else None
        if step:
            value, factor = step[0], factor * step[1]
        elif node and (node.primitive in RESHAPES or unwidened(value) is not value):
            value = node.inputs[0]
        else:
            return None
    return source, factor


class ChannelForms(Forms):
    """The forms in x and in `cotangents`: a coefficient is a value of the program with one number for each channel.

    `sums` are the values that sum one of them over the batch. `fixed` is a cotangent although it is computed from x.
    """

    def __init__(self, x: Value, axis: int, cotangents: Iterable[Value] = (), means: Mapping[Value, IndexMap | None] | None = None,
                 fixed: Value | None = None):
        super().__init__(x, (axis,))
        self.sums: dict[Value, Form] = {}
        if fixed:
            self.fixed.add(fixed)
            cotangents = (fixed,)
        for tensor in cotangents:
            self._found(tensor, Known(self.index_map, Form.of(tensor)))
        ((stride, channels),) = self.kept_sub_axes or ((1, 1),)
        mean = Form.of(Parameter(next(iter(means)), stride, channels)) if means else Form({})
        for value, index_map in (means or {}).items():
            self._found(value, Known(index_map, mean))
        self._found(x, Known(self.index_map, Form.of(x) + mean))
        self._follow()

    def _summed(self, value: Value, reduction: Reduction, form: Form):
        self.sums.setdefault(reduction.value, form * Form.number(reduction.weight))

    def _made(self, node: Node) -> Known | None:
        """Not what is transposed: that is no gradient of x, though x be given to others so."""
        made = super()._made(node) if node.primitive != "transpose" else None
        return made if made and (made.form.degree > 1 or len(made.form.tensors) <= MOST_TENSORS) else None

    def _operand(self, value: Value, node: Node) -> Known | None:
        """Beside a tensor also one number per channel, or another tensor like x."""
        known = super()._operand(value, node)
        if known or not any(self.is_tensor(v) for v in node.inputs):
            return known
        parameter, tensor = self._parameter(value, node), unwidened(value)
        if parameter and parameter.index_map and {own for own in parameter.index_map.flat if own[0]} <= set(self.kept_sub_axes):
            return parameter
        return Known(self.index_map, Form.of(tensor)) if tensor.shape == self.x.shape else None


def is_sum_of_gradient(form: Form, x: Value) -> bool:
    """Of one g and x, or of g alone times a form of x: never its square."""
    products = [[tensor for tensor in product if tensor is not x] for product in form.coefficients]
    return len(form.tensors - {x}) == 1 and (form.degree == 1 or all(len(others) == 1 for others in products))


def batch_sum(value: Value, form: Form, x: Value, g: Value | None, sum_g, sum_gx, count, read):
    """The array of the value that sums the form over the batch, where Σx is 0: of p·g·x + q·g + r·x + s, p·Σg·x + q·Σg + count·s."""
    sums = {(): jnp.asarray(count, jnp.float32) if private.is_symbolic_size(count) else count, (g,): sum_g, (g, x): sum_gx, (x, g): sum_gx}
    parts = [coefficient.vector(read) * sums[product] for product, coefficient in form.coefficients.items() if product in sums]
    total = sum(parts, start=jnp.float32(0))
    return jnp.broadcast_to(total.astype(value.dtype), (size(value),)).reshape(value.shape)
