"""What autodiff has made of a convolution: the gradients of its input, its filter and its bias, also where an activation or a
scale for each channel lies between it and the cotangent, as batch norm with frozen statistics has it.

Scaled by s, it is the convolution by the filter w·s. So its gradients begin at the cotangent g of the scaled value, and the
sum Σ g·conv(x, w), of which the scale's gradient is made, is <Σ x·g, w>: nothing needs the convolution's own value.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfuse.analysis.forms import ChannelForms, Form, batch_sum, is_sum_of_gradient
from jaxfuse.analysis.layout import channels_last, in_place, is_reshape
from jaxfuse.analysis.normal import channel_factor, constant, is_float_cast, unwidened
from jaxfuse.ops.arrays import beside, other_axes, wide
from jaxfuse.ops.conv.conv import OP, ConvConfig
from jaxfuse.patterns.contraction import Axes, Gradients
from jaxfuse.patterns.conv.forward import config_of, reordered
from jaxfuse.patterns.walk import Walk
from jaxfuse.program.autodiff import forward
from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.program.site import Match, Refusal, Unfit, UnfusedStep
from jaxfuse.program.transposes import is_transposed
from jaxfuse.runtime.reasons import no_kernel


class Scaled(NamedTuple):
    """The convolution's own cotangent is factor·g; `sums`, over that many `places`, are those of g and of its products with `y`."""

    g: Value
    y: Value
    axis: int
    places: int
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
        return (w * beside(w, axis, factor)).astype(w.dtype)

    def results(self, read, w, axis: int, dw, sum_g) -> Iterator[tuple[Value, object]]:
        """The sums, from the gradients of w·factor and of the bias."""
        sum_gy = jnp.sum(wide(dw) * wide(w), other_axes(w, axis))
        for value, form in self.sums:
            yield value, batch_sum(value, form, self.y, self.g, sum_g, sum_gy, self.places, read)


@dataclasses.dataclass(frozen=True)
class ConvGradients(Gradients):
    """`scaled`: dz is the cotangent of the convolution times a number for each channel."""

    op = OP
    scaled: Scaled | None = None

    @property
    def bias_type(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        if not self.scaled:
            return super().bias_type
        return (jax.ShapeDtypeStruct((self.node.out.shape[self.scaled.axis],), jnp.float32),) if self.scaled.sums else ()

    def label(self, with_dz: bool = False) -> str:
        """Like that of the layer; where the cotangent is computed too it is that of what is added."""
        steps = ["conv", "bias"] if self.bias_type else ["conv"]
        if self.scaled:
            steps = ["conv", "bn"] if self.bias_type and not self.scaled.is_number else [*steps, "scale"]
        if with_dz:
            steps.append("add")
        if self.saved:
            steps.append(self.activation.name)
        return "+".join(steps)

    def computed(self, made, backward, read, operands):
        if not self.scaled:
            yield from super().computed(made, backward, read, operands)
            return
        w, filters = operands[1], self.node.params["dimension_numbers"].rhs_spec[0]
        operands[1] = self.scaled.times(read, w, filters)
        arrays = [*backward(*operands)]
        at = int(self.dx is not None)  # of the filter's gradient
        sum_g = arrays.pop(at + 1) if self.bias_type else None
        yield from self.scaled.results(read, w, filters, arrays[at], sum_g)
        arrays[at] = self.scaled.times(read, arrays[at], filters)
        yield from zip(made, arrays)


def anchors(graph: Graph):
    return [node for node in graph.nodes if node.primitive == "conv_general_dilated"]


def match(graph: Graph, node: Node, claimed: set[int], unprofitable):
    """Yields a Match or a Refusal for every pair of gradients of this convolution; nothing if it is not differentiated."""
    try:
        config = config_of(node)
    except Unfit:
        return  # the forward pass has a row that says why
    if config.out_dtype or node.params["batch_group_count"] != 1:
        return
    for found in ConvGradients.found(graph, node, claimed, _may_be_alone):
        yield from _rows(graph, config, _ways(graph, config, found, claimed), unprofitable)


def _rows(graph: Graph, config: ConvConfig, gradients: Iterator[ConvGradients], unprofitable):
    """The Match of the first way to these gradients that a kernel takes, or why the last is refused."""
    for way in gradients:
        operands = (way.dz, *way.node.inputs)
        try:
            yield _fused(graph, config, way, unprofitable)
        except Unfit as unfit:
            refused = Refusal(way.label(), way.node, operands, unfit.reason, "backward", covers=way.nodes)
            continue
        readers = way.dx.users if way.dx and not graph.is_returned(way.dx) else []
        if [n.primitive for n in readers] == ["add_any"]:  # with another gradient of the same value, as a skip connection has it
            reason = no_kernel(f"{readers[0]} of the input's gradient")
            yield UnfusedStep("conv+residual gradient", way.node, operands, reason, "backward")
        return
    yield refused


def _may_be_alone(gradients: Gradients) -> bool:
    """Whether no convolution has the cotangent where it makes the other operand's gradient: as its filter, or as its input."""
    other = 1 if gradients.dx else 0
    return not any(n.primitive == "conv_general_dilated" and n.inputs[other] is gradients.dz for n in gradients.dz.users)


def _ways(graph: Graph, config: ConvConfig, found: ConvGradients, claimed: set[int]) -> Iterator[ConvGradients]:
    """The same gradients from a cotangent behind a scale, and behind an activation, if there is one: the furthest first. To
    look behind a number that no parameter makes is worth it only where there is an activation behind it. A float16 filter times
    the scale, or its gradient without, might overflow."""
    channels = config.out_spec[1]
    plain = found.with_bias(tuple(other_axes(found.dz, channels)))
    looks_behind = found.dw and found.dw.dtype != jnp.float16
    scales = list(_scaled(graph, found.node, found.dz, channels)) if looks_behind else []
    behind = [dataclasses.replace(found, dz=s.g, dy=s.g, scaled=s, sums=tuple(v for v, _ in s.sums), parameters=s.needs) for s in scales]
    by_parameters, by_numbers = ([way for way in behind if way.scaled and way.scaled.is_number == number] for number in (False, True))
    part, own = forward(graph), forward(graph).node_in_subgraph(found.node)
    walk = Walk(part if own else graph, channels, claimed)
    chains, _ = walk.chains((own or found.node).out)
    for way in (*by_parameters, plain, *by_numbers):
        if through := way.through_activation(graph, chains):
            yield through
        if way in by_parameters:
            yield way
    yield plain


def _fused(graph: Graph, config: ConvConfig, gradients: ConvGradients, unprofitable) -> Match:
    """Channels last where another fused op gives or wants values so. Raises `Unfit` where no kernel takes them."""
    gradients = dataclasses.replace(gradients, dy=in_place(gradients.dy))
    like_x = [v for v in (gradients.node.inputs[0], gradients.dx) if v]
    like_y = (gradients.dz, gradients.dy, *gradients.saved)
    x_order, y_order = _order(graph, config.lhs_spec, like_x), _order(graph, config.out_spec, like_y)
    config = dataclasses.replace(
        config, lhs_spec=reordered(config.lhs_spec, x_order), out_spec=reordered(config.out_spec, y_order))
    orders = dict.fromkeys(like_x, x_order) | dict.fromkeys(like_y, y_order)
    return gradients.fused(graph, config, unprofitable, orders)


def _order(graph: Graph, spec: Axes, values) -> Axes:
    """Channels last, if another fused op gives or wants one of the values so; else as they are."""
    order = channels_last(len(spec), spec[1])
    return order if any(is_transposed(graph, v, order) for v in values) else tuple(range(len(spec)))


# --- behind a scale -----------------------------------------------------------------------------------------------


def _scaled(graph: Graph, node: Node, dz: Value, axis: int) -> Iterator[Scaled]:
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
            yield Scaled(g, y, axis, forms.count, known.form.coefficients[g,], tuple(sums))


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
        elif known := channel_factor(node, axis):
            value, factor = known
            by_parameters = unwidened(value) if constant(factor) is None else by_parameters
        else:
            break
    return iter(dict.fromkeys(v for v in (by_parameters, unwidened(value)) if v is not dz and v.dtype == dz.dtype))
