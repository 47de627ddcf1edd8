"""Convolution with what comes before and after it: zero padding, transposes; bias or inference batch norm, residual, activation."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfuse.analysis.canonical import constant, size, varying_axes
from jaxfuse.analysis.layout import channels_last, inverse, is_transposed, only_moved, to_layout, transposed
from jaxfuse.ops.activations import NO_ACTIVATION
from jaxfuse.ops.conv.config import batch_groups_as_features
from jaxfuse.ops.conv.conv import OP, ConvConfig
from jaxfuse.patterns.activations import name_activation
from jaxfuse.patterns.conv import space_to_batch
from jaxfuse.patterns.kernel import require
from jaxfuse.patterns.walk import NARROW, Chain, Walk, as_vector, ends_wide, longest, require_no_sharding
from jaxfuse.program.autodiff import backward
from jaxfuse.program.graph import Emission, Node, Value
from jaxfuse.program.liveness import reader_index
from jaxfuse.program.site import Match, Refusal, Unfit, UnfusedStep
from jaxfuse.runtime.reasons import no_kernel

BLOCKS = "space_to_batch+conv+batch_to_space"


def anchors(graph):
    """Last first: where two convolutions meet in a residual add, the later one takes the add."""
    return [node for node in reversed(graph.nodes) if node.primitive == "conv_general_dilated"]


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields one Match or Refusal for the convolution, and a Refusal for the step that its epilogue could not take, or for
    the padding that it could not take in. One of blocks in its batch is taken for the dilated one that it is, if it can be."""
    try:
        config = config_of(node)
        if is_weight_gradient(node, node.index in backward(graph)):
            raise _as_weight_gradient(config)
    except Unfit as unfit:
        yield Refusal("conv", node, tuple(node.inputs), unfit.reason)
        return
    try:
        spread = space_to_batch.dilated(graph, node, config) if not _batch_moved(config) else None
    except Unfit as unfit:
        yield Refusal(BLOCKS, node, tuple(node.inputs), unfit.reason)
        spread = None
    if spread:
        rows = list(_rows(graph, node, _without_blocks(graph, node, spread), claimed, unprofitable))
        yield from rows
        if any(isinstance(row, Match) for row in rows):
            return
    x, w = node.inputs
    yield from _rows(graph, node, _head(graph, config, x, w, node.out), claimed, unprofitable)


def _rows(graph, node: Node, head: "Head", claimed: set[int], unprofitable):
    walk = Walk(graph, head.config.out_spec[1], claimed, name_activation, frozenset({reader_index(node)}), adds_last=True)
    chains, stop = walk.chains(head.out)
    attempt = functools.partial(_fused, graph, node, head, unprofitable=unprofitable)
    found, chain, refused = longest(chains, node.out.dtype, attempt, also=lambda chain: ends_wide(graph, node, chain))
    if found:
        yield found
        if head.refused:
            yield UnfusedStep("pad+conv", node, head.operands, head.refused)
    if refused:
        row = UnfusedStep if found else Refusal
        yield row(_label(head, refused[0]), node, head.operands, refused[1].reason)
    elif stop.unfused:
        yield UnfusedStep(f"{_label(head, chain)}+{stop.unfused}", node, head.operands, stop.reason)


def config_of(node: Node) -> ConvConfig:
    """The op's config for this convolution; groups of the batch are groups of features. Raises `Unfit` if the op does not cover it."""
    params = node.params
    x, w = node.inputs
    widened = node.out.dtype == jnp.float32 and x.dtype in NARROW
    if x.dtype != w.dtype or not (node.out.dtype == x.dtype or widened):
        raise Unfit(f"dtypes {x.dtype}, {w.dtype} -> {node.out.dtype}: the kernel takes one dtype and gives that or float32")
    dn = params["dimension_numbers"]
    if not 3 <= x.ndim <= 5:
        raise Unfit(f"{x.ndim - 2} spatial axes: the kernel takes 1 to 3")
    if is_weight_gradient(node):
        raise _as_weight_gradient(dn)
    require_no_sharding(node)
    return ConvConfig(
        tuple(params["window_strides"]), tuple(map(tuple, params["padding"])), tuple(params["rhs_dilation"]),
        params["feature_group_count"] * params["batch_group_count"], dn.lhs_spec, dn.rhs_spec, dn.out_spec, tuple(params["lhs_dilation"]),
        precision=params["precision"], out_dtype=str(node.out.dtype) if widened else None)


def _batch_moved(spec: ConvConfig | lax.ConvDimensionNumbers) -> bool:
    return spec.lhs_spec[0] != 0 or spec.out_spec[0] != 0


def is_weight_gradient(node: Node, is_backward: bool = False) -> bool:
    """Whether its batch is not the first axis because that is where a weight gradient has the features. A layer may have it
    there too, but not with a filter larger than what it gives."""
    dn = node.params["dimension_numbers"]
    return _batch_moved(dn) and (is_backward or _places(node.inputs[1], dn.rhs_spec) > _places(node.out, dn.out_spec))


def _places(value: Value, spec: tuple[int, ...]) -> int:
    return math.prod(value.shape[d] for d in spec[2:])


def _as_weight_gradient(spec: ConvConfig | lax.ConvDimensionNumbers) -> Unfit:
    return Unfit(no_kernel(f"batch at axis {spec.lhs_spec[0]} -> {spec.out_spec[0]}, as a weight gradient has it"))


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


def _without_blocks(graph, node: Node, spread: space_to_batch.Dilated) -> Head:
    head = _head(graph, spread.config, spread.x, node.inputs[1], spread.out)
    into, name = BLOCKS.split("+", 1)
    head = head._replace(steps=(*head.steps, into), name=name, nodes=spread.nodes)
    if found := space_to_batch.cropped(graph, head.config, spread.out):
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
            x, steps = source, (*_turned(moved), *steps)
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
        moved = inverse(order)
        config, x = dataclasses.replace(config, lhs_spec=tuple(moved[d] for d in config.lhs_spec)), transposed(graph, x, order)
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
    return tuple((low + more * spread, high + beyond * spread)  # a pixel of a dilated x is `spread` wide
                 for (low, high), (more, beyond, _), spread in zip(config.padding, added, config.lhs_dilation))


# --- the whole ---------------------------------------------------------------------------------------------------


def _label(head: Head, chain: Chain) -> str:
    return "+".join([*head.steps, chain.label(head.name), *_turned(chain.layout.axis_order)])


def _turned(order: tuple[int, ...]) -> tuple[str, ...]:
    """The step's name where it changes the order of axes."""
    return () if order == tuple(sorted(order)) else ("transpose",)


def _configured(config: ConvConfig, chain: Chain, permutation) -> ConvConfig:
    """With what the chain does; the output's axes are written in the order of `permutation`."""
    kinds = {kind for kind, _ in chain.affine}
    moved = inverse(permutation)
    return dataclasses.replace(
        config, out_spec=tuple(moved[d] for d in config.out_spec), has_scale=bool(kinds & {"mul", "div"}),
        has_bias=bool(kinds & {"add", "sub"}), has_residual=chain.residual is not None, activation=chain.activation or NO_ACTIVATION,
        residual_last=chain.residual_last)


def _target(graph, chain: Chain, channel_axis: int):
    """(permutation, twin): the output's axes as they lie at the chain's end, or channels-last if another fused op wants
    the end so, as the value `channels_last_copy`."""
    layout = chain.layout
    permutation = layout.permutation
    if permutation is not None and layout.is_permutation:
        order = channels_last(chain.end.ndim, permutation.index(channel_axis))
        if is_transposed(graph, chain.end, order):
            return tuple(permutation[d] for d in order), transposed(graph, chain.end, order)
    return layout.axis_order, None


def _saved_z(node: Node, chain: Chain) -> list[Value]:
    """The activation's argument, if the convolution's fused gradient reads it. Raises `Unfit` where that reads another inner value."""
    inner = [v for n in (node, *chain.nodes) for v in n.outputs if v is not chain.end]
    read = [v for v in inner if any(user.index == reader_index(node) for user in v.users)]
    if read and (chain.region is None or read != [chain.region.start]):
        raise Unfit(f"{read[0]!r} is read by the convolution's gradient too")
    return read


def _scaled_residual(graph, chain: Chain, kernel) -> str:
    """Why a residual times a number is better added by XLA: one pass over it, where a kernel's operand would be another."""
    made = chain.residual.producer if chain.residual is not None else None
    if made is None or made.primitive not in ("mul", "div") or kernel.is_plain or kernel.platform != "cpu":
        return ""
    if all(varying_axes(v) for v in made.inputs) or len(made.out.users) > 1 or graph.is_returned(made.out):
        return ""
    return f"{made} scales the residual: XLA makes one pass of that and of what follows"


def _fused(graph, node: Node, head: Head, chain: Chain, unprofitable) -> Match:
    """Raises `Unfit` where no kernel takes the chain."""
    (x, w), end, channel_axis = head.operands, chain.end, head.config.out_spec[1]
    saved_z = _saved_z(node, chain)
    if chain.residual is not None and chain.residual.dtype != end.dtype:
        raise Unfit(f"residual {chain.residual!r} is of another dtype than {node.out!r}")
    permutation, channels_last_copy = _target(graph, chain, channel_axis)
    config = dataclasses.replace(_configured(head.config, chain, permutation), saves=len(saved_z))
    if end.dtype != node.out.dtype:
        config = dataclasses.replace(config, out_dtype=str(end.dtype), rounds=True)
    smalls = tuple(value for _, value in chain.affine)
    vector = functools.partial(as_vector, channels=head.out.shape[channel_axis])
    groups = node.params["batch_group_count"]
    spread_x = functools.partial(batch_groups_as_features, groups=groups, spec=config.lhs_spec) if groups > 1 else lambda x: x
    given = x.dtype if all(v.dtype == x.dtype for v in smalls) else jnp.float32
    given_x, given_w = (jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (x, w))
    types = [jax.eval_shape(spread_x, given_x), given_w]
    types += [jax.ShapeDtypeStruct((head.out.shape[channel_axis],), given) for has in (config.has_scale, config.has_bias) if has]
    full: tuple[Value, ...] = head.operands
    if chain.residual is not None:
        added, undo = to_layout(graph, chain.residual, chain.residual_layout, permutation)
        full = (x, w, added)
        types.append(jax.ShapeDtypeStruct([head.out.shape[d] for d in permutation], end.dtype))
    require(OP.forward, config, tuple(types), unprofitable, "conv", config, types, cost=functools.partial(_scaled_residual, graph, chain))

    def run(read):
        center, scale, offset = chain.coefficients(lambda value: vector(read(value)))
        if center is not None:  # (k - center)·scale + offset = k·scale + (offset - center·scale)
            shift = -center if scale is None else -center * scale
            offset = shift if offset is None else offset + shift
        residual = None if chain.residual is None else undo(read(added))
        operands = [a for a in (scale, offset, residual) if a is not None]
        y, *z = OP(config, spread_x(read(x)), read(w), *operands)
        yield from ((value, chain.region_layout.place(array, permutation)) for value, array in zip(saved_z, z))
        if channels_last_copy:
            yield channels_last_copy, y
        yield end, chain.layout.place(y, permutation)
        yield from chain.masks_from(chain.layout.place(y, permutation))

    saved = 2 * np.dtype(end.dtype).itemsize * size(head.out) if chain.nodes else 0
    ends = (end, channels_last_copy) if channels_last_copy else (end,)
    emission = Emission((*full, *smalls), (*ends, *chain.masks, *saved_z), run)
    return Match(_label(head, chain), node, (node, *head.nodes, *chain.nodes), (emission,), full, saved)
