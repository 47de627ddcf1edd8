"""Convolutions of every r-th position, spelled by moving blocks of r positions into the batch and back: one dilated by r.

    x[N, h·r, w·r, C] → [N, h, r, w, r, C] → [r, r, N, h, w, C] → [r·r·N, h, w, C] → conv → and back

Position r·i + a of the output sums positions r·(i + d·k - low) + a of x over the filter's k: those of a filter dilated by
r·d, with r times the padding. Channels may be any axis.
"""

import dataclasses
import math
from typing import NamedTuple

from jaxfuse.analysis.layout import inverse, is_reshape
from jaxfuse.ops.conv.conv import ConvConfig
from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.program.site import Unfit


class Dilated(NamedTuple):
    """The same convolution without blocks: of `x`, giving `out`. `nodes` lead from the original's output to `out`."""

    config: ConvConfig
    x: Value
    out: Value
    nodes: tuple[Node, ...]


def dilated(graph: Graph, node: Node, config: ConvConfig) -> Dilated | None:
    """None if the convolution's input is not made of blocks. Raises `Unfit` if it is, and is no dilated convolution all the same."""
    merge = _made_by(node.inputs[0], "reshape")
    turn = merge and _made_by(merge.inputs[0], "transpose")
    split = turn and _made_by(turn.inputs[0], "reshape")
    if not (merge and turn and split):
        return None
    blocks = _blocks(split, turn, merge, config.lhs_spec)
    if blocks is None:
        return None
    back = _moved_back(graph, node.out)
    if back is None or _blocks(*back, config.out_spec, backwards=True) != blocks:
        raise Unfit(f"{node.out!r} is not moved back from the batch as its input was moved there, in blocks of {blocks}")
    groups = node.params["batch_group_count"]
    if any(n != 1 for n in (*config.window_strides, *config.lhs_dilation, groups)):
        raise Unfit(f"window_strides {config.window_strides}, lhs_dilation {config.lhs_dilation}, batch_group_count {groups}: "
                    "blocks are a dilation only without")
    config = dataclasses.replace(
        config, padding=tuple((low * r, high * r) for (low, high), r in zip(config.padding, blocks)),
        rhs_dilation=tuple(d * r for d, r in zip(config.rhs_dilation, blocks)))
    return Dilated(config, split.inputs[0], back[-1].out, back)


def cropped(graph: Graph, config: ConvConfig, out: Value) -> tuple[ConvConfig, Node] | None:
    """The config with less padding, if all that is read of the output is a piece of it between its borders; and the slice."""
    crop = _only_reader(graph, out, "slice")
    if crop is None or any(step != 1 for step in crop.params["strides"] or ()):
        return None
    starts, limits = crop.params["start_indices"], crop.params["limit_indices"]
    if any(crop.out.shape[d] != out.shape[d] for d in config.out_spec[:2]):
        return None
    padding = tuple((low - starts[d], high - (out.shape[d] - limits[d]))
                    for (low, high), d in zip(config.padding, config.out_spec[2:]))
    return (dataclasses.replace(config, padding=padding), crop) if min(map(min, padding)) >= 0 else None


def _moved_back(graph: Graph, value: Value) -> tuple[Node, Node, Node] | None:
    split = _only_reader(graph, value, "reshape")
    turn = split and _only_reader(graph, split.out, "transpose")
    merge = turn and _only_reader(graph, turn.out, "reshape")
    return (split, turn, merge) if split and turn and merge else None


def _blocks(split: Node, turn: Node, merge: Node, spec, backwards: bool = False) -> tuple[int, ...] | None:
    """The lengths r, if these nodes lead from [N, h·r, w·r, C] by way of [N, h, r, w, r, C] and [r, r, N, h, w, C] to
    [r·r·N, h, w, C], or backwards; axes as `spec` has them, the batch first."""
    permutation = turn.params["permutation"]
    whole, shape, moved = split.inputs[0].shape, split.out.shape, merge.out.shape
    if backwards:
        whole, shape, moved, permutation = moved, turn.out.shape, whole, inverse(permutation)
    batch, _, *spatial = spec
    place = [d + sum(other < d for other in spatial) for d in range(len(spec))]  # of axis d, or of its h
    if tuple(permutation) != (*[place[d] + 1 for d in spatial], *place):
        return None
    blocks = {d: shape[place[d] + 1] for d in spatial}
    in_batch = {batch: math.prod(blocks.values())}
    for lengths, factors in ((whole, blocks), (moved, in_batch)):
        if tuple(lengths) != tuple(shape[place[d]] * factors.get(d, 1) for d in range(len(spec))):
            return None
    return tuple(blocks.values())


def _made_by(value: Value, primitive: str) -> Node | None:
    node = value.producer
    return node if node is not None and node.primitive == primitive and _moves(node) else None


def _only_reader(graph: Graph, value: Value, primitive: str) -> Node | None:
    node = value.users[0] if len(value.users) == 1 and not graph.is_returned(value) else None
    return node if node is not None and node.primitive == primitive and _moves(node) else None


def _moves(node: Node) -> bool:
    return node.primitive != "reshape" or is_reshape(node)
