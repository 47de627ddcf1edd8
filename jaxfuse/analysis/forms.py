"""Full-size values as what they are in each channel, or in each row: Σ coefficient_k · tensor_k + offset.

Whatever autodiff makes of a batch norm has this form in the normalised tensor x and in the cotangent g of the result,
however the user spelled it: sums over the batch of such values and of their products need only Σg and Σg·x. What a norm
of rows makes of x has it too (analysis/rows.py).

x enters as x - mean where it has one: where the program subtracts the mean too, nothing is left of it, and nothing cancels.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxfuse.analysis.axes import IndexMap
from jaxfuse.analysis.canonical import ADD, chosen, is_float_cast, is_square, per_channel, scaled, size, unwidened, varying_axes
from jaxfuse.analysis.layout import RESHAPES, is_reshape
from jaxfuse.analysis.statistics import reductions, views
from jaxfuse.program.graph import Node, Value

MOST_TENSORS = 4  # in one form; what has more is a tensor of its own


class Vector(NamedTuple):
    """One number for each channel, still to be computed: `of(read)` once all `needs` can be read."""

    needs: tuple[Value, ...]
    of: Callable

    def __add__(self, other):
        return Vector(self.needs + other.needs, lambda read: self.of(read) + other.of(read))

    def __mul__(self, other):
        return Vector(self.needs + other.needs, lambda read: self.of(read) * other.of(read))

    def __neg__(self):
        return Vector(self.needs, lambda read: -self.of(read))

    def __rtruediv__(self, one):
        return Vector(self.needs, lambda read: one / self.of(read))


def number(value: float) -> Vector:
    return Vector((), lambda read: jnp.float32(value))


def vector(value: Value) -> Vector:
    def of(read):
        array = jnp.asarray(read(value))
        return array.astype(jnp.promote_types(array.dtype, jnp.float32)).reshape(-1)

    return Vector(() if value.literal is not None else (value,), of)


class Parameter(NamedTuple):
    """Of a norm of rows: which of a value's elements it is where, x's flat index // stride % length."""

    value: Value
    stride: int
    length: int


Factors = tuple[Any, ...]  # tensors, as Values, and Parameters


class Form(NamedTuple):
    """Σ coefficient · product of tensors (and of parameters): `terms` maps (x,), (x, g), … to coefficients, and () to the offset."""

    terms: dict[Factors, Any]

    @property
    def degree(self) -> int:
        """In tensors; where it is 2, only a sum over the batch can take it further."""
        return max(sum(isinstance(factor, Value) for factor in product) for product in self.terms)

    @property
    def tensors(self) -> set[Value]:
        return {factor for product in self.terms for factor in product if isinstance(factor, Value)}

    @property
    def needs(self) -> tuple[Value, ...]:
        """What the coefficients are computed from."""
        return tuple(need for coefficient in self.terms.values() for need in coefficient.needs)

    def __add__(self, other):
        return _collected((*self.terms.items(), *other.terms.items()))

    def __neg__(self):
        return Form({product: -coefficient for product, coefficient in self.terms.items()})

    def __mul__(self, other):
        return _collected((tuple(sorted(left + right, key=hash)), a * b)
                          for left, a in self.terms.items() for right, b in other.terms.items())


def _collected(terms: Iterable[tuple[Factors, Any]]) -> Form:
    sums: dict[Factors, Any] = {}
    for product, coefficient in terms:
        sums[product] = sums[product] + coefficient if product in sums else coefficient
    return Form(sums)


def combined(primitive: str, left: Form, right: Form, degree: int) -> Form | None:
    """left + right, left - right, left · right or left / right, where that is a form of at most this degree."""
    if primitive == "mul":
        return left * right if left.degree + right.degree <= degree else None
    if primitive == "div":
        return left * Form({(): 1 / right.terms[()]}) if set(right.terms) == {()} else None
    if left.degree > 1 or right.degree > 1 or primitive not in (*ADD, "sub"):
        return None
    return left + (-right if primitive == "sub" else right)


class Forms:
    """Forms of what the program computes from x and from `cotangents`, tensor by tensor as far as they stay per channel.

    `sums` are the values that sum one of them over the batch; `nodes` are the indices of the nodes looked through.
    """

    def __init__(self, x: Value, axis: int, means: Sequence[Value] = (), cotangents: Iterable[Value] = ()):
        self.x = x
        seen = ((view.shape, layout.axes(axis)) for view, layout in views(x, (axis,)))
        self._axes = {shape: axes[0] for shape, axes in seen if axes}  # of the channels, in the shapes that x is seen in
        self._means = means
        self.of: dict[Value, Form] = {}
        self.sums: list[tuple[Value, Form]] = []
        self.nodes: set[int] = set()
        self._summed: set[Value] = set()
        self._pending: list[tuple[int, Node]] = []
        for tensor in cotangents:
            self._found(tensor, Form({(tensor,): number(1)}))
        self.offset = vector(means[0]) if means else None
        self._found(self.x, Form({(self.x,): number(1)} | ({(): self.offset} if self.offset else {})))
        while self._pending:
            _, node = heapq.heappop(self._pending)
            if node.index not in self.nodes:
                self._look_through(node)

    def _found(self, value: Value, form: Form):
        self.of[value] = form
        for reduction in reductions(value, IndexMap.of(value.shape)):
            self.nodes.add(reduction.first.index)
            if reduction.left(value.shape) == (self._axes[value.shape],) and reduction.value not in self._summed:
                self._summed.add(reduction.value)
                self.sums.append((reduction.value, form * Form({(): number(reduction.weight)})))
        for node in value.users:
            if node.index >= 0 and len(node.outputs) == 1:
                heapq.heappush(self._pending, (node.index, node))

    def _look_through(self, node: Node):
        form = self._form(node) if node.out.shape in self._axes else None
        if form is not None and (form.degree > 1 or len(form.tensors) <= MOST_TENSORS):
            self.nodes.add(node.index)
            self._found(node.out, form)

    def _form(self, node: Node) -> Form | None:
        name = node.primitive
        if is_float_cast(node) or is_reshape(node):
            return self.of[node.inputs[0]]
        if name == "neg":
            return -self.of[node.inputs[0]]
        if name == "select_n" and chosen(node.out) is not node.out:
            return self._operand(chosen(node.out), node.out)
        square = is_square(node, node.inputs[0])
        if not square and name not in (*ADD, "sub", "mul", "div"):
            return None
        left, right = (self._operand(value, node.out) for value in (node.inputs * 2 if square else node.inputs)[:2])
        if left is None or right is None:
            return None
        if name == "sub" and self._is_x(left) and self._is_mean(node.inputs[1], node.inputs[0]):
            return Form({(self.x,): number(1)})  # x - mean: exactly what the tensor stands for
        return combined("mul" if square else name, left, right, 2)

    def _operand(self, value: Value, like: Value) -> Form | None:
        value = value if value in self.of else chosen(value)
        if value in self.of:
            return self.of[value]
        if small := self._small(value, like):
            return Form({(): small})
        tensor = unwidened(value)
        return Form({(tensor,): number(1)}) if tensor.shape == self.x.shape else None

    def _small(self, value: Value, like: Value) -> Vector | None:
        """One number per channel, also where it is multiplied by a number after it was broadcast."""
        axis = self._axes[like.shape]
        if value.ndim not in (0, like.ndim) or varying_axes(value) - {axis}:
            return None
        factor = 1.0
        while size(value) not in (1, like.shape[axis]):
            node = value.producer
            if node is None:
                return None
            if step := scaled(node):
                value, factor = step[0], factor * step[1]
            elif node.primitive in RESHAPES or unwidened(value) is not value:
                value = node.inputs[0]
            else:
                return None
        return vector(value) if factor == 1 else vector(value) * number(factor)

    def _is_mean(self, value: Value, like: Value) -> bool:
        small = per_channel(value, like, self._axes[like.shape])
        return value in self._means or small in self._means

    def _is_x(self, form: Form) -> bool:
        return form.tensors == {self.x} and form.degree == 1 and form.terms.get(()) is self.offset


def is_sum_of_gradient(form: Form, x: Value) -> bool:
    """Of one g and x, or of g alone times a form of x: never its square."""
    products = [[tensor for tensor in product if tensor is not x] for product in form.terms]
    return len(form.tensors - {x}) == 1 and (form.degree == 1 or all(len(others) == 1 for others in products))


def batch_sum(form: Form, x: Value, g: Value, sum_g, sum_gx, count: int, read):
    """The sum over the batch, where Σx is 0: of p·g·x + q·g + r·x + s it is p·Σg·x + q·Σg + count·s."""
    sums = {(): count, (g,): sum_g, (g, x): sum_gx, (x, g): sum_gx}
    return sum(coefficient.of(read) * sums[product] for product, coefficient in form.terms.items() if product in sums)
