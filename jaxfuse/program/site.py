"""A place of the program that a pattern speaks of: what is fused there, or why it is not."""

import dataclasses

from jaxfuse.program.graph import Emission, Node, Value


@dataclasses.dataclass(frozen=True)
class Match:
    """A place to rewrite: the emissions compute what they define instead of its producers; `nodes` belong to this match."""

    pattern: str
    anchor: Node
    nodes: tuple[Node, ...]
    emissions: tuple[Emission, ...]
    operands: tuple[Value, ...]
    bytes_saved: int
    direction: str = "forward"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A place that stays as it is, or a step that was not taken, and why. `nodes` are those that this row speaks of: no
    later pattern makes a row of them. What it `covers` a later pattern may match; it has no other refusal."""

    pattern: str
    anchor: Node
    operands: tuple[Value, ...]
    reason: str
    direction: str = "forward"
    nodes: tuple[Node, ...] = ()
    covers: tuple[Node, ...] = ()


class Unfit(Exception):
    """A place that no fused op takes as it is; `reason` is what the report says of it."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class UnfusedStep(Refusal):
    """The layer itself is fused: `pattern` names it with a step before or after it that stays XLA's."""
