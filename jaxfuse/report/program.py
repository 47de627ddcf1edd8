"""The program that a report is of, as plain data: its equations, and an estimate of the memory that is alive."""

import dataclasses
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence

from jaxfuse.program import autodiff
from jaxfuse.program.graph import Emission, Node, Value
from jaxfuse.program.liveness import dead
from jaxfuse.program.plan import Plan
from jaxfuse.program.site import Match, Refusal
from jaxfuse.report import memory


@dataclasses.dataclass(frozen=True)
class Equation:
    """One equation of the traced program, inner jits taken in.

    primitive: JAX's name of it; inputs, outputs: types, like "float32[8,16]"; bytes: of its outputs; reads: indices of the
    equations whose outputs it reads; source: "file:line"; scope: as in `Site.scopes`; direction: "forward" or "backward";
    parent: the index of the loop, branch or function that it stands in the body of.
    """

    primitive: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bytes: int
    reads: tuple[int, ...]
    source: str
    scope: str
    direction: str
    parent: int | None = None


@dataclasses.dataclass(frozen=True)
class Memory:
    """An estimate of the bytes alive while each equation of the program runs, in the order of `Program.equations`, bodies aside.

    before: of the program as it is written; after: of the rewritten one. Counted from the program's values and their last
    readers. XLA assigns buffers in its own way, and writes fewer values than either has.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """name: of the function; platform, policy: that it was explained for; folder: that the files of `source` lie in;
    equations: those of the program in order, then those of bodies; memory: that is alive, by equation."""

    name: str
    platform: str
    policy: str
    folder: str
    equations: tuple[Equation, ...]
    memory: Memory


class Listing:
    """The equations of a plan and of the plans of its bodies, with an index for each, and which of them a row stands for."""

    def __init__(self, plan: Plan):
        self.equations: list[Equation] = []
        self._plans: list[Plan] = []
        self._index: dict[tuple[int, int], int] = {}  # (which plan, index of its node)
        self._places: dict[tuple[int, int], list[int]] = defaultdict(list)  # the plans that have this equation at this index
        self._seen: dict[tuple, int] = defaultdict(int)
        self._add(plan, None)

    def program(self, name: str, platform: str, policy: str) -> Program:
        plan = self._plans[0]
        alive = [node.index for node in _alive(plan)]
        before, after = (memory.timeline(plan, replacements) for replacements in ({}, plan.replacements))
        steps = Memory(tuple(before[i] for i in alive), tuple(after[i] for i in alive))
        return Program(name, platform, policy, os.getcwd(), tuple(self.equations), steps)

    def place(self, row: Match | Refusal) -> tuple[Plan, tuple[int, ...]]:
        """(the plan that the row is of, the indices of its equations). Call it once for each row, in their order: a body that
        is run in two places has rows in both."""
        key = id(row.anchor.eqn), row.anchor.index
        plans = self._places.get(key)
        if not plans:
            return self._plans[0], ()
        count = self._seen[*key, row.pattern, row.direction]
        self._seen[*key, row.pattern, row.direction] += 1
        number = plans[count % len(plans)]
        nodes = {row.anchor.index, *(node.index for node in row.nodes)}
        if isinstance(row, Match):
            nodes |= {index for index, emission in self._plans[number].owners.items() if _is_among(emission, row.emissions)}
        found = (self._index.get((number, index)) for index in nodes)
        return self._plans[number], tuple(sorted(index for index in found if index is not None))

    def _add(self, plan: Plan, parent: int | None) -> None:
        number, alive, backward = len(self._plans), _alive(plan), autodiff.backward(plan.graph)
        self._plans.append(plan)
        self._index |= {(number, node.index): len(self.equations) + i for i, node in enumerate(alive)}
        for node in alive:
            self._places[id(node.eqn), node.index].append(number)
            producers = dict.fromkeys(value.producer for value in node.inputs)
            reads = tuple(self._index[number, p.index] for p in producers if p is not None and (number, p.index) in self._index)
            direction = "backward" if node.index in backward else "forward"
            self.equations.append(Equation(node.primitive, _types(node.inputs), _types(node.outputs), sum(map(memory.size, node.outputs)),
                                           reads, node.source(), node.scope(), direction, parent))
        for index, plans in plan.inner.items():
            for inner in plans:
                self._add(inner, self._index.get((number, index)))


def _alive(plan: Plan) -> list[Node]:
    """Without the nodes that nobody needs, before or after."""
    unneeded = dead(plan.graph)
    return [node for node in plan.graph.nodes if node.index not in unneeded]


def _types(values: Sequence[Value]) -> tuple[str, ...]:
    def text(value: Value) -> str:
        return f"{value.dtype}[{','.join(map(str, value.shape))}]" if hasattr(value.aval, "shape") else str(value.aval)

    return tuple(map(text, values))


def _is_among(emission: Emission, emissions: Iterable[Emission]) -> bool:
    return any(emission is other for other in emissions)
