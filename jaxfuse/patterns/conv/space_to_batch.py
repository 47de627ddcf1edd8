"""Convolutions of every r-th position, spelled by moving blocks of r positions into the batch and back: one dilated by r.

    x[N, h·r, w·r, C] → [N, h, r, w, r, C] → [r, r, N, h, w, C] → [r·r·N, h, w, C] → conv → and back

Position r·i + a of the output sums positions r·(i + d·k - low) + a of x over the filter's k: those of a filter dilated by
r·d, with r times the padding. Channels may be any axis.
"""

import dataclasses
import math
from typing import NamedTuple

from jaxfuse.analysis.axes import IndexMap
from jaxfuse.analysis.layout import moves
from jaxfuse.ops.conv.conv import ConvConfig
from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.program.site import Unfit


class Dilated(NamedTuple):
    """The same convolution without blocks: of `x`, giving the output of the last of `nodes`, which follow the original."""

    config: ConvConfig
    x: Value
    nodes: tuple[Node, ...]


def dilated(graph: Graph, node: Node, config: ConvConfig) -> Dilated | None:
    """None if the convolution's input is not made of blocks. Raises `Unfit` if it is, and is no dilated convolution all the same."""
    x, blocks = _unmoved(node.inputs[0], config.lhs_spec)
    if not blocks:
        return None
    back: list[Node] = []
    index_map, whole = IndexMap.of(node.out.shape), _unblocked(node.out.shape, blocks, config.out_spec)
    while not index_map.is_same(whole):
        reader = _only_reader(graph, back[-1].out if back else node.out)
        after = index_map.then(reader) if reader and moves(reader) else None
        if reader is None or after is None:
            raise Unfit(f"{node.out!r} is not moved back from the batch as its input was moved there, in blocks of {blocks}")
        back, index_map = [*back, reader], after
    groups = node.params["batch_group_count"]
    if any(n != 1 for n in (*config.window_strides, *config.lhs_dilation, groups)):
        raise Unfit(f"window_strides {config.window_strides}, lhs_dilation {config.lhs_dilation}, batch_group_count {groups}: "
                    "blocks are a dilation only without")
    config = dataclasses.replace(
        config, padding=tuple((low * r, high * r) for (low, high), r in zip(config.padding, blocks)),
        rhs_dilation=tuple(d * r for d, r in zip(config.rhs_dilation, blocks)))
    return Dilated(config, x, tuple(back))


def cropped(graph: Graph, config: ConvConfig, out: Value) -> tuple[ConvConfig, Node] | None:
    """The config with less padding, if all that is read of the output is a piece of it between its borders; and the slice."""
    crop = _only_reader(graph, out)
    if crop is None or crop.primitive != "slice" or any(step != 1 for step in crop.params["strides"] or ()):
        return None
    starts, limits = crop.params["start_indices"], crop.params["limit_indices"]
    if any(crop.out.shape[d] != out.shape[d] for d in config.out_spec[:2]):
        return None
    padding = tuple((low - starts[d], high - (out.shape[d] - limits[d]))
                    for (low, high), d in zip(config.padding, config.out_spec[2:]))
    return (dataclasses.replace(config, padding=padding), crop) if min(map(min, padding)) >= 0 else None


def _unmoved(value: Value, spec: tuple[int, ...]) -> tuple[Value, tuple[int, ...]]:
    """(x, blocks): what the value [r·r·N, h, w, C] is made of, and the lengths r; no lengths where it is not made of blocks."""
    source, path = value, list[Node]()
    while source.producer is not None and moves(source.producer):
        path.insert(0, source.producer)
        source = source.producer.inputs[0]
        if source.ndim == value.ndim and 0 not in value.shape:
            blocks = tuple(source.shape[d] // value.shape[d] for d in spec[2:])
            index_map: IndexMap | None = _unblocked(value.shape, blocks, spec)
            for node in path if index_map and index_map.shape == source.shape else ():
                index_map = index_map and index_map.then(node)
            is_transposed = any(node.primitive == "transpose" for node in path)
            if is_transposed and math.prod(blocks) > 1 and index_map and index_map.is_same(IndexMap.of(value.shape)):
                return source, blocks
    return value, ()


def _unblocked(shape: tuple[int, ...], blocks: tuple[int, ...], spec: tuple[int, ...]) -> IndexMap:
    """[N, h·r, w·r, C] by the elements of [r·r·N, h, w, C], axes as `spec` has them."""
    batch, _, *spatial = spec
    sub_axes = [*IndexMap.of(shape).sub_axes]
    stride, n = sub_axes[batch][0][0], shape[batch] // max(1, math.prod(blocks))
    sub_axes[batch] = ((stride, n),)
    stride *= n
    for axis, r in reversed([*zip(spatial, blocks)]):
        sub_axes[axis] = (*sub_axes[axis], (stride, r))
        stride *= r
    return IndexMap(tuple(sub_axes))


def _only_reader(graph: Graph, value: Value) -> Node | None:
    return value.users[0] if len(value.users) == 1 and not graph.is_returned(value) else None
