"""An estimate of the memory that a program's values take, from who reads them last."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxfuse.program.graph import Emission, Node, Value
from jaxfuse.program.plan import Plan
from jaxfuse.runtime.private import known

VIEWS = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "stop_gradient")  # XLA writes nothing for them


class Step(NamedTuple):
    """What computes `defines` from `needs` at the place of a node; `inside`: bytes that its body takes meanwhile."""

    position: int
    needs: tuple[Value, ...]
    defines: tuple[Value, ...]
    inside: int = 0
    is_view: bool = False


def timeline(plan: Plan, replacements: dict[Value, Emission]) -> list[int]:
    """Bytes alive while each node of the plan's graph runs, with these replacements. A node that does not run has those of the
    one before it. Arguments and constants are alive all the time; they are the caller's."""
    graph = plan.graph
    steps = list(_steps(plan, replacements))
    root: dict[Value, Value] = {}  # of a view, what it is a view of
    last: dict[Value, int] = {}
    for time, step in enumerate(steps):
        if step.is_view:
            root[step.defines[0]] = root.get(step.needs[0], step.needs[0])
        for value in (*step.needs, *step.defines):
            last[root.get(value, value)] = time
    for value in (*graph.outputs, *graph.inputs, *graph.constants):
        last[root.get(value, value)] = len(steps)
    living = {value: size(value) for value in (*graph.inputs, *graph.constants)}
    alive = sum(living.values())
    found, ending = [0] * len(graph.nodes), {-1: alive}
    for time, step in enumerate(steps):
        new = {} if step.is_view else {value: size(value) for value in step.defines if value not in living}
        living |= new
        alive += sum(new.values())
        found[step.position] = max(found[step.position], alive + step.inside)
        ended = {root.get(value, value) for value in (*step.needs, *step.defines)}
        alive -= sum(living.pop(value, 0) for value in ended if last[value] == time)
        ending[step.position] = alive
    for position, during in enumerate(found):
        alive = ending[position] = ending.get(position, ending[position - 1])
        found[position] = during or alive
    return found


def size(value: Value) -> int:
    """Bytes of a value; 0 of what is no array, and of a number in the program."""
    if value.literal is not None or not hasattr(value.aval, "shape"):
        return 0
    return math.prod(map(known, value.shape)) * getattr(value.dtype, "itemsize", 0)


def _steps(plan: Plan, replacements: dict[Value, Emission]) -> Iterator[Step]:
    """What runs, in the order of the program: a fused site where the last of what it defines was, or where it is first read."""
    graph = plan.graph
    needed = _needed(plan, replacements)
    ends: dict[Emission, int] = {}
    for value in (value for node in graph.nodes for value in node.outputs):
        if emission := replacements.get(value):
            ends[emission] = max(ends.get(emission, 0), value.producer.index if value.producer else 0)
    done: set[Emission | Node] = set()
    for node in graph.nodes:
        emissions = [replacements[value] for value in node.outputs if value in replacements]
        works: list[Emission | Node] = [*(emission for emission in emissions if ends[emission] == node.index), node]
        for work in works:
            if work in needed:
                yield from _run(plan, replacements, work, node.index, done)


def _run(plan: Plan, replacements: dict[Value, Emission], work: Emission | Node, position: int,
         done: set[Emission | Node]) -> Iterator[Step]:
    """The step of `work`, after those that it needs and that have not run."""
    stack: list[tuple[Emission | Node, bool]] = [(work, False)]
    while stack:
        work, is_ready = stack.pop()
        if work in done:
            continue
        if is_ready:
            done.add(work)
            yield _step(plan, work, position, bool(replacements))
        else:
            stack.append((work, True))
            stack += [(before, False) for before in _before(work, replacements) if before not in done]


def _needed(plan: Plan, replacements: dict[Value, Emission]) -> set[Emission | Node]:
    """The emissions and nodes that the outputs and effects need."""
    found: set[Emission | Node] = set()
    stack: list[Emission | Node] = [node for node in plan.graph.nodes if node.eqn.effects]
    stack += [work for value in plan.graph.outputs if (work := _work(value, replacements)) is not None]
    while stack:
        work = stack.pop()
        if work not in found:
            found.add(work)
            stack += _before(work, replacements)
    return found


def _before(work: Emission | Node, replacements: dict[Value, Emission]) -> list[Emission | Node]:
    values = work.inputs if isinstance(work, Node) else work.needs
    return [before for value in values if (before := _work(value, replacements)) is not None]


def _work(value: Value, replacements: dict[Value, Emission]) -> Emission | Node | None:
    """What computes the value; None for inputs and numbers."""
    return replacements.get(value) or value.producer


def _step(plan: Plan, work: Emission | Node, position: int, rewritten: bool) -> Step:
    if isinstance(work, Node):
        is_view = work.primitive in VIEWS and len(work.inputs) == 1
        return Step(position, tuple(work.inputs), tuple(work.outputs), _inside(plan, work, False), is_view)
    producer = work.defines[0].producer
    inside = _inside(plan, producer, rewritten) if producer is not None and producer.index in plan.inner else 0
    return Step(position, work.needs, work.defines, inside)


def _inside(plan: Plan, node: Node, rewritten: bool) -> int:
    """The most that a body of the node's takes beside its own inputs."""
    return max((_most(inner, rewritten) for inner in plan.inner.get(node.index, ())), default=0)


def _most(plan: Plan, rewritten: bool) -> int:
    given = sum(size(value) for value in (*plan.graph.inputs, *plan.graph.constants))
    return max(timeline(plan, plan.replacements if rewritten else {}), default=given) - given
