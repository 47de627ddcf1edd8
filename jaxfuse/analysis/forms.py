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

from jaxfuse.analysis.axes import IndexMap, merged
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

    def inverse(self):
        return Vector(self.needs, lambda read: 1 / self.of(read))


def number(value: float) -> Vector:
    return Vector((), lambda read: jnp.float32(value))


def vector(value: Value) -> Vector:
    def of(read):
        array = jnp.asarray(read(value))
        return array.astype(jnp.promote_types(array.dtype, jnp.float32)).reshape(-1)

    return Vector(() if value.literal is not None else (value,), of)


class Form(NamedTuple):
    """Σ coefficient · tensor + offset. Coefficients can be added, multiplied, negated and, where `inverse` is not None, divided by."""

    terms: dict[Value, Any]
    offset: Any = None

    def __add__(self, other):
        terms = dict(self.terms)
        for tensor, coefficient in other.terms.items():
            terms[tensor] = terms[tensor] + coefficient if tensor in terms else coefficient
        offsets = [offset for offset in (self.offset, other.offset) if offset is not None]
        return Form(terms, sum(offsets[1:], offsets[0]) if offsets else None)

    def __neg__(self):
        return Form({tensor: -coefficient for tensor, coefficient in self.terms.items()}, None if self.offset is None else -self.offset)

    def times(self, factor) -> "Form":
        terms = {tensor: coefficient * factor for tensor, coefficient in self.terms.items()}
        return Form(terms, None if self.offset is None else self.offset * factor)


class Product(NamedTuple):
    """left · right, element by element; only a sum over the batch can take it further."""

    left: Form
    right: Form

    def __neg__(self):
        return Product(-self.left, self.right)

    def times(self, factor) -> "Product":
        return Product(self.left.times(factor), self.right)


def combined(primitive: str, left: Form | Product, right: Form | Product) -> Form | Product | None:
    """What the operation makes of two forms, where that is one:  f ± g,  k·f,  f/k,  and f·g as a product."""
    if primitive == "mul":
        for one, other in ((left, right), (right, left)):
            if isinstance(other, Form) and not other.terms:
                return one.times(other.offset)
        return Product(left, right) if isinstance(left, Form) and isinstance(right, Form) else None
    if isinstance(right, Product):
        return None
    if primitive == "div":
        inverse = None if right.terms else right.offset.inverse()
        return None if inverse is None else left.times(inverse)
    if isinstance(left, Product) or primitive not in (*ADD, "sub"):
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
        self.of: dict[Value, Form | Product] = {}
        self.sums: list[tuple[Value, Form | Product]] = []
        self.nodes: set[int] = set()
        self._summed: set[Value] = set()
        self._pending: list[tuple[int, Node]] = []
        for tensor in cotangents:
            self._found(tensor, Form({tensor: number(1)}))
        self.offset = vector(means[0]) if means else None
        self._found(self.x, Form({self.x: number(1)}, self.offset))
        while self._pending:
            _, node = heapq.heappop(self._pending)
            if node.index not in self.nodes:
                self._look_through(node)

    def _found(self, value: Value, form: Form | Product):
        self.of[value] = form
        places = IndexMap.of(value.shape)
        channels = merged(places.runs[self._axes[value.shape]])
        for reduction in reductions(value, places):
            self.nodes.add(reduction.first.index)
            if reduction.places.flat == channels and reduction.value not in self._summed:
                self._summed.add(reduction.value)
                self.sums.append((reduction.value, form.times(number(reduction.weight))))
        for node in value.users:
            if node.index >= 0 and len(node.outputs) == 1:
                heapq.heappush(self._pending, (node.index, node))

    def _look_through(self, node: Node):
        form = self._form(node) if node.out.shape in self._axes else None
        if form is not None and (isinstance(form, Product) or len(form.terms) <= MOST_TENSORS):
            self.nodes.add(node.index)
            self._found(node.out, form)

    def _form(self, node: Node) -> Form | Product | None:
        name = node.primitive
        if is_float_cast(node) or is_reshape(node):
            return self.of[node.inputs[0]]
        if name == "neg":
            return -self.of[node.inputs[0]]
        if name == "select_n" and chosen(node.out) is not node.out:
            return self._operand(chosen(node.out), node.out)
        if is_square(node, node.inputs[0]):
            form = self._operand(node.inputs[0], node.out)
            return Product(form, form) if isinstance(form, Form) else None
        if name not in (*ADD, "sub", "mul", "div"):
            return None
        left, right = (self._operand(value, node.out) for value in node.inputs)
        if left is None or right is None:
            return None
        if name == "sub" and self._is_x(left) and self._is_mean(node.inputs[1], node.inputs[0]):
            return Form({self.x: number(1)})  # x - mean: exactly what the tensor stands for
        return combined(name, left, right)

    def _operand(self, value: Value, like: Value) -> Form | Product | None:
        value = value if value in self.of else chosen(value)
        if value in self.of:
            return self.of[value]
        if small := self._small(value, like):
            return Form({}, small)
        tensor = unwidened(value)
        return Form({tensor: number(1)}) if tensor.shape == self.x.shape else None

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

    def _is_x(self, form: Form | Product) -> bool:
        return isinstance(form, Form) and form.offset is self.offset and set(form.terms) == {self.x}


def tensors_of(form: Form | Product) -> list[Value]:
    sides = (form,) if isinstance(form, Form) else form
    return [tensor for side in sides for tensor in side.terms]


def needs_of(form: Form | Product) -> list[Value]:
    """What the coefficients are computed from."""
    sides = (form,) if isinstance(form, Form) else form
    return [need for side in sides for vector in (*side.terms.values(), side.offset) if vector is not None for need in vector.needs]


def is_sum_of_gradient(form: Form | Product, x: Value) -> bool:
    """Of one g and x, or of g alone times a form of x: never its square."""
    if len({*tensors_of(form)} - {x}) != 1:
        return False
    if isinstance(form, Form):
        return True
    with_g = [side for side in form if {*side.terms} - {x}]
    return len(with_g) == 1 and len(with_g[0].terms) == 1 and with_g[0].offset is None


def batch_sum(form: Form | Product, x: Value, g: Value, sum_g, sum_gx, count: int, read):
    """The sum over the batch, where Σx is 0: of p·g + q·x + r it is p·Σg + count·r, and of the product of one with g and
    one without, q·x + r, it is p·q·Σg·x + p·r·Σg."""

    def of(vector: Vector | None):
        return 0 if vector is None else vector.of(read)

    if isinstance(form, Form):
        return of(form.terms.get(g)) * sum_g + count * of(form.offset)
    with_g, without = form if g in form.left.terms else (form.right, form.left)
    return of(with_g.terms.get(g)) * (of(without.terms.get(x)) * sum_gx + of(without.offset) * sum_g)
