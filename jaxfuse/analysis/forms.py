"""Full-size values as what they are per channel: Σ coefficient_k[channel] · tensor_k + offset[channel].

Whatever autodiff makes of a normalisation has this form in the normalised tensor x and in the cotangent g of the result,
however the user spelled it: sums over the batch of such values and of their products need only Σg and Σg·x.

x enters as x - mean where it has one: where the program subtracts the mean too, nothing is left of it, and nothing cancels.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jaxfuse.analysis.canonical import ADD, chosen, is_float_cast, is_square, per_channel, scaled, size, unwidened, varying_axes
from jaxfuse.analysis.layout import RESHAPES, is_reshape
from jaxfuse.analysis.moments import reductions, views
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
    """Σ coefficient · tensor + offset; `terms` maps id(tensor) to (tensor, coefficient)."""

    terms: dict[int, tuple[Value, Vector]]
    offset: Vector | None = None

    def __add__(self, other):
        terms = dict(self.terms)
        for key, (tensor, coefficient) in other.terms.items():
            terms[key] = tensor, terms[key][1] + coefficient if key in terms else coefficient
        return Form(terms, _sum(self.offset, other.offset))

    def times(self, factor: Vector) -> "Form":
        terms = {key: (tensor, coefficient * factor) for key, (tensor, coefficient) in self.terms.items()}
        return Form(terms, self.offset and self.offset * factor)

    def coefficient(self, tensor: Value) -> Vector | None:
        return self.terms[id(tensor)][1] if id(tensor) in self.terms else None


class Product(NamedTuple):
    """left · right, element by element; only a sum over the batch can take it further."""

    left: Form
    right: Form

    def times(self, factor: Vector) -> "Product":
        return Product(self.left.times(factor), self.right)


class Forms:
    """Forms of what the program computes from x and from `cotangents`, tensor by tensor as far as they stay per channel.

    `of` maps id(value) to (value, Form or Product); `sums` are the values that sum one of them over the batch; `nodes`
    are the indices of the nodes looked through.
    """

    def __init__(self, x: Value, axis: int, means: Sequence[Value] = (), cotangents: Iterable[Value] = ()):
        self.x = x
        self._axes = {view.shape: channels for view, channels in views(x, axis)}  # of the shapes that x is seen in
        self._means = set(map(id, means))
        self.of: dict[int, tuple[Value, Form | Product]] = {}
        self.sums: list[tuple[Value, Form | Product]] = []
        self.nodes: set[int] = set()
        self._summed: set[int] = set()
        self._pending: list[tuple[int, Node]] = []
        for tensor in cotangents:
            self._found(tensor, Form({id(tensor): (tensor, number(1))}))
        self.offset = vector(means[0]) if means else None
        self._found(self.x, Form({id(self.x): (self.x, number(1))}, self.offset))
        while self._pending:
            _, node = heapq.heappop(self._pending)
            if node.index not in self.nodes:
                self._look_through(node)

    def _found(self, value: Value, form: Form | Product):
        self.of[id(value)] = value, form
        for reduction in reductions(value):
            self.nodes.add(reduction.first.index)
            if reduction.left == (self._axes[value.shape],) and id(reduction.value) not in self._summed:
                self._summed.add(id(reduction.value))
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
        if is_float_cast(node) or is_reshape(node) or name == "neg":
            form = self.of[id(node.inputs[0])][1]
            return form.times(number(-1)) if name == "neg" else form
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
        if name == "mul":
            return _times(left, right)
        if isinstance(right, Product) or name == "div" and right.terms:
            return None
        if name == "div":
            return left.times(right.offset.inverse())
        if isinstance(left, Product):
            return None
        difference = name == "sub"
        if difference and right.offset is not None and not right.terms and self._is_mean(*node.inputs[::-1]):
            without = self._without_mean(left)
            if without is not None:
                return without
        return left + (right.times(number(-1)) if difference else right)

    def _operand(self, value: Value, like: Value) -> Form | Product | None:
        value = value if id(value) in self.of else chosen(value)
        if id(value) in self.of:
            return self.of[id(value)][1]
        if small := self._small(value, like):
            return Form({}, small)
        tensor = unwidened(value)
        return Form({id(tensor): (tensor, number(1))}) if tensor.shape == self.x.shape else None

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
        return id(value) in self._means or id(small) in self._means

    def _without_mean(self, form: Form) -> Form | None:
        """x - mean, if the form is x's own: exactly what the tensor stands for."""
        return Form(form.terms) if form.offset is self.offset and set(form.terms) == {id(self.x)} else None


def _sum(left: Vector | None, right: Vector | None) -> Vector | None:
    return left + right if left and right else left or right


def _times(left: Form | Product, right: Form | Product) -> Form | Product | None:
    for one, other in ((left, right), (right, left)):
        if isinstance(other, Form) and not other.terms:
            return one.times(other.offset)
    return Product(left, right) if isinstance(left, Form) and isinstance(right, Form) else None


def tensors_of(form: Form | Product) -> list[Value]:
    sides = (form,) if isinstance(form, Form) else form
    return [tensor for side in sides for tensor, _ in side.terms.values()]


def needs_of(form: Form | Product) -> list[Value]:
    """What the coefficients are computed from."""
    sides = (form,) if isinstance(form, Form) else form
    return [need for side in sides for vector in (*[k for _, k in side.terms.values()], side.offset) if vector
            for need in vector.needs]


def is_sum_of_gradient(form: Form | Product, x: Value) -> bool:
    """Of one g and x, or of g alone times a form of x: never its square."""
    if len({id(t) for t in tensors_of(form)} - {id(x)}) != 1:
        return False
    if isinstance(form, Form):
        return True
    with_g = [side for side in form if set(side.terms) - {id(x)}]
    return len(with_g) == 1 and len(with_g[0].terms) == 1 and with_g[0].offset is None


def batch_sum(form: Form | Product, x: Value, g: Value, sum_g, sum_gx, count: int, read):
    """The sum over the batch, where Σx is 0: of p·g + q·x + r it is p·Σg + count·r, and of the product of one with g and
    one without, q·x + r, it is p·q·Σg·x + p·r·Σg."""

    def of(vector):
        return 0 if vector is None else vector.of(read)

    if isinstance(form, Form):
        return of(form.coefficient(g)) * sum_g + count * of(form.offset)
    with_g, without = form if form.left.coefficient(g) else (form.right, form.left)
    return of(with_g.coefficient(g)) * (of(without.coefficient(x)) * sum_gx + of(without.offset) * sum_g)
