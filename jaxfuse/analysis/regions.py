"""What is between values: the nodes from some to another, and what is done to a value as one elementwise function, with the table of
what that computes."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.normal import constant, is_float_cast
from jaxfuse.program.bodies import filled
from jaxfuse.program.elementwise import POINTS, Traced, is_elementwise, table_of
from jaxfuse.program.graph import Node, Transposed, Value


@dataclasses.dataclass(frozen=True)
class Region:
    """The elementwise function that `nodes` compute from `start` alone. Of them only `end` is read outside, and `masks`,
    comparisons that autodiff keeps of it."""

    start: Value
    end: Value
    nodes: tuple[Node, ...]
    masks: tuple[Value, ...] = ()

    def replay(self, array, wanted: tuple[Value, ...]) -> list:
        """The wanted values for another array in place of `start`."""
        made = replayed(self.nodes, {self.start: array})
        return [made[v] for v in wanted]

    def table(self, points: np.ndarray = POINTS) -> np.ndarray | None:
        """Value and derivative of the function on these points, by default those of program/elementwise.py."""
        return table_of(lambda x: self.replay(x, (self.end,))[0], self.start.aval, points)

    def values(self, wanted: tuple[Value, ...], points: np.ndarray) -> np.ndarray | None:
        """What values of the region are at these points of its argument."""
        return Traced(lambda x: self.replay(x, wanted), self.start.aval)(points)

    @functools.cached_property
    def between(self) -> np.ndarray:
        """Points between and beside those at which what the region compares changes sides."""
        return Traced(lambda x: self.replay(x, (self.end, *self.masks)), self.start.aval).between()

    def mask_tables(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """What the masks are on the points of program/elementwise.py and those between which they change, and what they would be if they
        were computed from the function's value instead of its argument. Where both agree, as for x > 0 and relu(x) > 0, nothing needs to
        keep the argument."""
        points = np.concatenate([POINTS, self.between])
        ends = self.values((self.end,), points)
        return (None, None) if ends is None else (self.values(self.masks, points), self.values(self.masks, ends[0]))


def replayed(nodes: Iterable[Node], made: dict[Value, Any]) -> dict[Value, Any]:
    """With what the nodes, of one output each, make of the values that are made already and of constants."""
    def read(value: Value):
        return made[value] if value in made else value.literal if value.literal is not None else filled(value, constant(value))

    for node in nodes:
        (made[node.out],) = node.replay(list(map(read, node.inputs)))
    return made


def cone(ends: Iterable[Value], takes: Callable[[Value], bool], most: int | None = None) -> list[Node]:
    """The nodes, in program order, that compute the ends, back over the values that the function takes; more than `most` are not all."""
    nodes: dict[Node, None] = {}
    stack = [*ends]
    while stack and (most is None or len(nodes) <= most):
        value = stack.pop()
        node = value.producer
        if node is not None and node not in nodes and takes(value):
            nodes[node] = None
            stack += node.inputs
    return sorted(nodes, key=lambda node: node.index)


def depends_on(values: Collection[Value], targets: Collection[Value], behind: Collection[Value] = ()) -> bool:
    """Whether any of the values is a target or computed from one; what lies behind the values `behind` is not looked at."""
    first = min((v.index for v in targets if not isinstance(v, Transposed)), default=0)
    nodes = cone(values, lambda v: v not in targets and v not in behind and (v.index >= first or isinstance(v, Transposed)))
    return any(v in targets for v in (*values, *[v for n in nodes for v in n.inputs]))


def reached(start: Value, most: int, takes: Callable[[Node, set[Value]], bool]) -> Iterator[Node]:
    """At most so many elementwise nodes, in program order, that are computed from the value and that the function takes; it is given
    the values made so far."""
    made, frontier, count = {start}, {n.index: n for n in start.users}, 0
    while frontier and count < most:
        node = frontier.pop(min(frontier))
        if is_elementwise(node) and takes(node, made):
            made.add(node.out)
            frontier |= {n.index: n for n in node.out.users}
            count += 1
            yield node


LONGEST_FUNCTION = 24  # nodes; jax.nn.gelu with tanh is 8, mish by hand 10


def regions(start: Value, is_returned: Callable[[Value], bool], ignored: frozenset[int] = frozenset()) -> list[Region]:
    """Every region that starts here, shortest first; readers with an index in `ignored` do not count."""
    inside: dict[int, Node] = {}
    values, found = [start], []

    def takes(node: Node, made: set[Value]) -> bool:  # a cast is a step of its own: dtypes decide how far a kernel may go
        return not (node.index in ignored or is_float_cast(node)) and all(v in made or constant(v) is not None for v in node.inputs)

    for node in reached(start, LONGEST_FUNCTION, takes):
        inside[node.index] = node
        values.append(node.out)
        read = [v for v in values if is_returned(v) or any(n.index not in inside and n.index not in ignored for n in v.users)]
        masks = tuple(v for v in read if v.dtype == bool)
        ends = [v for v in read if v not in masks]
        if len(ends) == 1 and ends[0] is not start and jnp.issubdtype(ends[0].dtype, jnp.floating):
            found.append(Region(start, ends[0], tuple(inside[i] for i in sorted(inside)), masks))
    return found
