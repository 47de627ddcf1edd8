"""What autodiff has made of a convolution that is scaled for each channel, as batch norm with frozen statistics does.

Scaled by s, it is the convolution by the filter w·s. So its gradients begin at the cotangent g of the scaled value, and the
sum Σ g·conv(x, w), of which the scale's gradient is made, is <Σ x·g, w>: nothing needs the convolution's own value.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp

from jaxfuse.analysis.forms import ChannelForms, Form, batch_sum, is_sum_of_gradient
from jaxfuse.analysis.layout import in_place, is_reshape
from jaxfuse.analysis.normal import NotPerChannel, constant, is_float_cast, per_channel, unwidened
from jaxfuse.program.graph import Graph, Node, Value


class Scaled(NamedTuple):
    """The convolution's own cotangent is factor·g; `sums` over the batch are those of g and of its products with `y`."""

    g: Value
    y: Value
    axis: int
    factor: Form
    sums: tuple[tuple[Value, Form], ...]

    @property
    def is_number(self) -> bool:
        return not self.factor.needs

    @property
    def needs(self) -> tuple[Value, ...]:
        return (*self.factor.needs, *[need for _, form in self.sums for need in form.needs])

    def times(self, read, w, axis: int):
        """The filter, or its gradient, times the factor; `axis` is the convolution's output channels."""
        factor = jnp.broadcast_to(self.factor.vector(read).reshape(-1), (w.shape[axis],))
        return (w * jnp.expand_dims(factor, [d for d in range(w.ndim) if d != axis])).astype(w.dtype)

    def results(self, read, w, axis: int, dw, sum_g) -> Iterator[tuple[Value, object]]:
        """The sums, from the gradients of w·factor and of the bias."""
        others = [d for d in range(w.ndim) if d != axis]
        wide = jnp.promote_types(w.dtype, jnp.float32)
        sum_gy = jnp.sum(dw.astype(wide) * w.astype(wide), others)
        for value, form in self.sums:
            yield value, batch_sum(value, form, self.y, self.g, sum_g, sum_gy, 0, read)


def ways(graph: Graph, node: Node, dz: Value, axis: int) -> Iterator[Scaled]:
    """How the cotangent `dz` of the convolution `node` comes from that of a value scaled along `axis`: by parameters, by numbers."""
    y, dz = _reshaped(node.out), in_place(dz)
    for g in _unscaled(graph, dz, axis):
        forms = ChannelForms(y, axis, [g])
        known = forms.known.get(dz)
        if known is None or set(known.form.coefficients) != {(g,)}:
            continue
        sums = [(value, form) for value, form in forms.sums.items()
                if is_sum_of_gradient(form, y) and g in form.tensors]
        if not any(form.degree == 1 and len(form.tensors) > 1 for _, form in sums):
            yield Scaled(g, y, axis, known.form.coefficients[g,], tuple(sums))


def _reshaped(value: Value) -> Value:
    """The furthest value that is this one after reshapes and back, as `vmap` makes of a convolution's."""
    furthest = reshaped = value
    while len(reshaped.users) == 1 and is_reshape(reshaped.users[0]):
        reshaped = reshaped.users[0].out
        furthest = reshaped if reshaped.shape == value.shape else furthest
    return furthest


def _unscaled(graph: Graph, dz: Value, axis: int) -> Iterator[Value]:
    """The furthest values of which `dz` is a multiple for each channel: by what is not constant, and by numbers too."""
    by_parameters, value = dz, dz
    while value.producer is not None and value not in graph.marks.replaced:
        node = value.producer
        if is_float_cast(node) or node.primitive == "neg":
            value = node.inputs[0]
        elif factor := _factor(node, value, axis):
            value = node.inputs[1] if factor is node.inputs[0] else node.inputs[0]
            by_parameters = unwidened(value) if constant(factor) is None else by_parameters
        else:
            break
    return iter(dict.fromkeys(v for v in (by_parameters, unwidened(value)) if v is not dz and v.dtype == dz.dtype))


def _factor(node: Node, value: Value, axis: int) -> Value | None:
    """The factor for each channel, or the divisor."""
    if node.primitive not in ("mul", "div") or node.inputs[0] is node.inputs[1]:
        return None
    for factor in node.inputs[node.primitive == "div":]:
        other = node.inputs[factor is node.inputs[0]]
        if other.shape == value.shape and not isinstance(per_channel(factor, value, axis), NotPerChannel):
            return factor
    return None
