"""Convolutions of every r-th position, spelled by moving blocks of r positions into the batch and back: one dilated by r.

    x[N, h·r, w·r, C] → [N, h, r, w, r, C] → [r, r, N, h, w, C] → [r·r·N, h, w, C] → conv → and back
"""

from jaxfuse.graph import Node, Value
from jaxfuse.match import Refusal
from jaxfuse.reasons import no_kernel


def anchors(graph):
    return [node for node in graph.nodes if node.primitive == "conv_general_dilated"]


def match(graph, node: Node, claimed: set[int], measured):
    """Yields a Refusal beside the convolution's own row."""
    blocks = _moved_into_batch(node.inputs[0])
    if blocks and blocks == _moved_back(node.out):
        yield Refusal("space_to_batch+conv+batch_to_space", node, tuple(node.inputs), no_kernel())


def _moved_into_batch(value: Value) -> tuple[int, ...] | None:
    """The lengths r of the blocks, if the value is made so."""
    merge = _made_by(value, "reshape")
    turn = merge and _made_by(merge.inputs[0], "transpose")
    split = turn and _made_by(turn.inputs[0], "reshape")
    return _blocks(split.out.shape, turn.params["permutation"], value.ndim) if split else None


def _moved_back(value: Value) -> tuple[int, ...] | None:
    split = _only_reader(value, "reshape")
    turn = split and _only_reader(split.out, "transpose")
    merge = turn and _only_reader(turn.out, "reshape")
    if not merge:
        return None
    backwards = [turn.params["permutation"].index(d) for d in range(split.out.ndim)]
    return _blocks(turn.out.shape, tuple(backwards), value.ndim)


def _blocks(shape, permutation, ndim: int) -> tuple[int, ...] | None:
    """Of a transpose from [N, h, r, w, r, C] to [r, r, N, h, w, C]."""
    spatial = ndim - 2
    blocks, positions = range(2, 2 * spatial + 1, 2), range(1, 2 * spatial, 2)
    if len(shape) != 2 + 2 * spatial or tuple(permutation) != (*blocks, 0, *positions, 2 * spatial + 1):
        return None
    return tuple(shape[d] for d in blocks)


def _made_by(value: Value, primitive: str) -> Node | None:
    return value.producer if value.producer is not None and value.producer.primitive == primitive else None


def _only_reader(value: Value, primitive: str) -> Node | None:
    return value.users[0] if len(value.users) == 1 and value.users[0].primitive == primitive else None
