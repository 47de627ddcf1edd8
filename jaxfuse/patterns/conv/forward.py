"""Convolution with what comes before and after it: zero padding, transposes; bias or inference batch norm, residual, activation."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxfuse.analysis.layout import channels_last, only_moved
from jaxfuse.analysis.normal import constant, varying_axes
from jaxfuse.ops.conv.config import batch_groups_as_features
from jaxfuse.ops.conv.conv import OP, ConvConfig
from jaxfuse.ops.stage import Kernel
from jaxfuse.patterns.contraction import NARROW, Axes, Contraction, require_no_sharding
from jaxfuse.patterns.conv import space_to_batch
from jaxfuse.patterns.walk import Chain, Walk
from jaxfuse.program.autodiff import backward
from jaxfuse.program.graph import Node, Value
from jaxfuse.program.liveness import reader_index
from jaxfuse.program.site import Match, Refusal, Unfit, UnfusedStep
from jaxfuse.program.transposes import is_transposed, transposed
from jaxfuse.runtime.reasons import no_kernel

BLOCKS = "space_to_batch+conv+batch_to_space"


def anchors(graph):
    """Last first: where two convolutions meet in a residual add, the later one takes the add."""
    return [node for node in reversed(graph.nodes) if node.primitive == "conv_general_dilated"]


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields one Match or Refusal for the convolution, and a Refusal for the step that its epilogue could not take, or for
    the padding that it could not take in. A space-to-batch convolution is matched as the dilated one that it is, if it can be."""
    try:
        config = config_of(node, node.index in backward(graph))
    except Unfit as unfit:
        yield Refusal("conv", node, tuple(node.inputs), unfit.reason)
        return
    x, w = node.inputs
    heads = [_head(graph, config, x, w, node.out)]
    try:
        if not _batch_moved(config) and (dilated := space_to_batch.dilated(graph, node, config)):
            heads.insert(0, _without_blocks(graph, node, dilated))
    except Unfit as unfit:
        yield Refusal(BLOCKS, node, tuple(node.inputs), unfit.reason)
    for head in heads:
        rows = list(_rows(graph, node, head, claimed, unprofitable))
        yield from rows
        if any(isinstance(row, Match) for row in rows):
            return


def _rows(graph, node: Node, head: "Head", claimed: set[int], unprofitable):
    (x, w), channels = head.operands, head.config.out_spec[1]
    walk = Walk(graph, channels, claimed, frozenset({reader_index(node)}), adds_last=True)
    groups = node.params["batch_group_count"]
    regrouped = functools.partial(batch_groups_as_features, groups=groups, spec=head.config.lhs_spec) if groups > 1 else None
    conv = Convolution(graph, graph, node, x, w, head.out, (channels,), *walk.chains(head.out), head.nodes, regrouped, head)
    for row in conv.rows(head.operands, unprofitable):
        yield row
        if isinstance(row, Match) and head.refused:
            yield UnfusedStep("pad+conv", node, head.operands, head.refused)


def config_of(node: Node, is_backward: bool = False) -> ConvConfig:
    """The op's config for this convolution; groups of the batch are groups of features. Raises `Unfit` if the op does not cover it."""
    params, (x, w) = node.params, node.inputs
    widened = node.out.dtype == jnp.float32 and x.dtype in NARROW
    if x.dtype != w.dtype or not (node.out.dtype == x.dtype or widened):
        raise Unfit(f"dtypes {x.dtype}, {w.dtype} -> {node.out.dtype}: the kernel takes one dtype and gives that or float32")
    dn = params["dimension_numbers"]
    if not 3 <= x.ndim <= 5:
        raise Unfit(f"{x.ndim - 2} spatial axes: the kernel takes 1 to 3")
    if is_weight_gradient(node, is_backward):
        raise Unfit(no_kernel(f"batch at axis {dn.lhs_spec[0]} -> {dn.out_spec[0]}, as a weight gradient has it"))
    require_no_sharding(node)
    return ConvConfig(
        tuple(params["window_strides"]), tuple(map(tuple, params["padding"])), tuple(params["rhs_dilation"]),
        params["feature_group_count"] * params["batch_group_count"], dn.lhs_spec, dn.rhs_spec, dn.out_spec, tuple(params["lhs_dilation"]),
        precision=params["precision"], out_dtype=str(node.out.dtype) if widened else None)


def _batch_moved(spec: ConvConfig | lax.ConvDimensionNumbers) -> bool:
    return spec.lhs_spec[0] != 0 or spec.out_spec[0] != 0


def is_weight_gradient(node: Node, is_backward: bool) -> bool:
    """Whether its batch is not the first axis because that is where a weight gradient has the features. A layer may have it
    there too, but not with a filter larger than what it gives."""
    dn = node.params["dimension_numbers"]
    window, positions = (math.prod(v.shape[d] for d in spec[2:]) for v, spec in ((node.inputs[1], dn.rhs_spec), (node.out, dn.out_spec)))
    return _batch_moved(dn) and (is_backward or window > positions)


# --- before it ---------------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """What a convolution reads once pads and transposes are part of its config, and what it gives, by `nodes` after it;
    `steps` and `name` are for its label, `refused` says why the next pad is not part of it."""

    config: ConvConfig
    operands: tuple[Value, Value]
    out: Value
    steps: tuple[str, ...]
    refused: str
    name: str = "conv"
    nodes: tuple[Node, ...] = ()


def _without_blocks(graph, node: Node, dilated: space_to_batch.Dilated) -> Head:
    head, (into, name) = _head(graph, dilated.config, dilated.x, node.inputs[1], dilated.nodes[-1].out), BLOCKS.split("+", 1)
    head = head._replace(steps=(*head.steps, into), name=name, nodes=dilated.nodes)
    if found := space_to_batch.cropped(graph, head.config, head.out):
        config, crop = found
        head = head._replace(config=config, out=crop.out, name=f"{name}+crop", nodes=(*head.nodes, crop))
    return head


def _head(graph, config: ConvConfig, x: Value, w: Value, out: Value) -> Head:
    w, moved = only_moved(w)
    config = dataclasses.replace(config, rhs_spec=tuple(moved[d] for d in config.rhs_spec))
    if wide := _before_rounding(graph, w):
        w, moved = only_moved(wide)
        config = dataclasses.replace(config, rhs_spec=tuple(moved[d] for d in config.rhs_spec), rounds_filter=True)
    steps: tuple[str, ...] = ()
    refused = ""
    while not refused:
        source, moved = only_moved(x)
        if source is not x:
            config = dataclasses.replace(config, lhs_spec=tuple(moved[d] for d in config.lhs_spec))
            x, steps = source, (*_transpose_step(moved), *steps)
        elif x.producer is not None and x.producer.primitive == "pad":
            try:
                config = dataclasses.replace(config, padding=_with_pad(config, x.producer))
                x, steps = x.producer.inputs[0], ("pad", *steps)
            except Unfit as unfit:
                refused = unfit.reason
        else:
            break
    order = channels_last(x.ndim, config.lhs_spec[1])
    if is_transposed(graph, x, order):
        config, x = dataclasses.replace(config, lhs_spec=reordered(config.lhs_spec, order)), transposed(graph, x, order)
    return Head(config, (x, w), out, steps, refused)


def _before_rounding(graph, w: Value) -> Value | None:
    """The float32 parameter of which the filter is the bfloat16, where nothing else reads that: the kernel rounds it while it packs
    it, and no rounded copy is written and read."""
    made = w.producer
    if made is None or made.primitive != "convert_element_type" or len(w.users) > 1 or graph.is_returned(w):
        return None
    return made.inputs[0] if (made.inputs[0].dtype, w.dtype) == (jnp.float32, jnp.bfloat16) else None


def _with_pad(config: ConvConfig, pad: Node):
    """The convolution's padding with the pad's added. Raises `Unfit` where it cannot be."""
    value, pads = constant(pad.inputs[1]), pad.params["padding_config"]
    if value != 0:
        raise Unfit(f"{pad} pads with {'a computed value' if value is None else value}, the kernel with 0")
    for axis, (low, high, interior) in enumerate(pads):
        if interior or low < 0 or high < 0:
            raise Unfit(f"{pad} has padding {(low, high, interior)} along axis {axis}: the kernel adds zeros at the borders only")
        if (low or high) and axis in config.lhs_spec[:2]:
            raise Unfit(f"{pad} pads along axis {axis}, which is not spatial")
    added = [pads[axis] for axis in config.lhs_spec[2:]]
    return tuple((low + more * dilation, high + beyond * dilation)  # a pixel of a dilated x is `dilation` wide
                 for (low, high), (more, beyond, _), dilation in zip(config.padding, added, config.lhs_dilation))


# --- the whole ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Convolution(Contraction):
    """`out` is what is given by the nodes of the head."""

    op = OP
    head: Head

    def label(self, chain: Chain) -> str:
        return "+".join([*self.head.steps, chain.label(self.head.name), *_transpose_step(chain.layout.axis_order)])

    def configured(self, chain: Chain, residual_outs: int) -> tuple[ConvConfig, Axes, tuple[Value, ...]]:
        """With the output's axes as they lie at the chain's end, or channels-last if another fused op wants the end so."""
        order, (channels,) = chain.layout.axis_order, self.features
        copies: tuple[Value, ...] = ()
        if chain.layout.is_permutation:
            last = channels_last(len(order), order.index(channels))
            if is_transposed(self.graph, chain.end, last):
                order, copies = tuple(order[d] for d in last), (transposed(self.graph, chain.end, last),)
        config = dataclasses.replace(self.head.config, out_spec=reordered(self.head.config.out_spec, order), residual_outs=residual_outs,
                                     has_scale=chain.has_scale, residual_last=chain.residual_last)
        if chain.end.dtype != self.node.out.dtype:
            config = dataclasses.replace(config, out_dtype=str(chain.end.dtype), rounds=True)
        return config, order, copies

    def cost(self, chain: Chain, kernel: Kernel) -> str:
        """A residual times a number XLA adds in one pass over it, where a kernel's operand would be another."""
        made = chain.residual.producer if chain.residual is not None and not kernel.is_plain and kernel.platform == "cpu" else None
        scales = made is not None and made.primitive in ("mul", "div") and not all(varying_axes(v) for v in made.inputs)
        if made is None or not scales or len(made.out.users) > 1 or self.graph.is_returned(made.out):
            return super().cost(chain, kernel)
        return f"{made} scales the residual: XLA makes one pass of that and of what follows"


def reordered(spec: Axes, order: Axes) -> Axes:
    """The spec of a value once its axes are in that order."""
    return tuple(map(order.index, spec))


def _transpose_step(order: Axes) -> tuple[str, ...]:
    """The step's name where it changes the order of axes."""
    return () if order == tuple(sorted(order)) else ("transpose",)
