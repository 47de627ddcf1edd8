"""The time of every site, fused and unfused: its own program compiled alone, and run on random inputs of its shapes."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.program.graph import Emission, Node, Value
from jaxfuse.program.plan import Plan
from jaxfuse.program.site import Match, Refusal
from jaxfuse.report.site import Times
from jaxfuse.runtime import platforms
from jaxfuse.runtime.reasons import heading
from jaxfuse.runtime.settings import unwatched
from jaxfuse.runtime.turns import in_turns

ROUNDS, SECONDS = 7, 0.01  # of each turn


class Part(NamedTuple):
    """A program of some values of the graph: `run` takes arrays for `needs`."""

    needs: Sequence[Value]
    run: Callable[..., list]


class Clock:
    """Measures sites; those with equal programs once."""

    def __init__(self, platform: str):
        here = platforms.here()
        self._elsewhere = "" if platform == here else f"explained for {platform}; JAX runs on {here} here"
        self._known: dict[tuple[str, ...], list[float]] = {}

    @unwatched
    def times(self, plan: Plan, row: Match | Refusal) -> Times:
        """The milliseconds of one site. Never raises for a site that cannot run alone: says why."""
        if self._elsewhere:
            return Times(None, None, self._elsewhere)
        nodes = {row.anchor.index, *(node.index for node in row.nodes)}
        try:
            if isinstance(row, Refusal):
                (unfused,) = self._milliseconds([_unfused(nodes, _read_outside(plan, nodes))])
                return Times(None, unfused, f"not fused: {heading(row.reason)}")
            nodes |= {index for index, emission in plan.owners.items() if any(emission is e for e in row.emissions)}
            defines = [value for emission in row.emissions for value in emission.defines]
            unfused, fused = self._milliseconds([_unfused(nodes, defines), _fused(row.emissions)])
            return Times(fused, unfused)
        except Exception as error:  # such a site runs in its program only
            return Times(None, None, f"cannot run alone: {type(error).__name__}: {error}".splitlines()[0])

    def _milliseconds(self, parts: list[Part]) -> list[float]:
        types = [[jax.ShapeDtypeStruct(value.shape, value.dtype) for value in part.needs] for part in parts]
        # without the addresses of functions, such as derivative rules, that are in the text
        key = tuple(re.sub(r" at 0x\w+", "", str(jax.make_jaxpr(part.run)(*given))) for part, given in zip(parts, types))
        if key not in self._known:
            calls = [functools.partial(jax.jit(part.run), *map(_drawn, given)) for part, given in zip(parts, types)]
            self._known[key] = [1e3 * seconds for seconds in in_turns(calls, ROUNDS, SECONDS)]
        return self._known[key]


def _fused(emissions: Sequence[Emission]) -> Part:
    """The emissions of a match: each may read what one before it gives."""
    made = dict.fromkeys(value for emission in emissions for value in emission.defines)
    needs = list(dict.fromkeys(v for emission in emissions for v in emission.needs if v.literal is None and v not in made))

    def run(*arrays):
        known = dict(zip(needs, arrays))
        waiting = list(emissions)
        while waiting:
            ready = next(e for e in waiting if all(value.literal is not None or value in known for value in e.needs))
            waiting.remove(ready)
            known |= dict(ready.run(lambda value: value.literal if value.literal is not None else known[value]))
        return [known[value] for value in made]

    return Part(needs, run)


def _unfused(nodes: set[int], wanted: Sequence[Value]) -> Part:
    """The user's own equations, those of `nodes` that the wanted values need; what a kernel gives beyond them is no part of it."""
    outputs = [value for value in wanted if value.producer is not None and value.producer.index >= 0]
    if not outputs:
        raise ValueError("the unfused program has none of its values")
    inside = nodes | {value.producer.index for value in outputs if value.producer}
    needed: dict[int, Node] = {}
    needs: dict[Value, None] = {}
    stack = list(outputs)
    while stack:
        value = stack.pop()
        node = value.producer
        if node is None or node.index not in inside:
            needs |= {value: None} if value.literal is None else {}
        elif node.index not in needed:
            needed[node.index] = node
            stack += node.inputs

    def run(*arrays):
        known = dict(zip(needs, arrays))
        for index in sorted(needed):
            node = needed[index]
            made = node.replay([value.literal if value.literal is not None else known[value] for value in node.inputs])
            known |= dict(zip(node.outputs, made))
        return [known[value] for value in outputs]

    return Part(list(needs), run)


def _read_outside(plan: Plan, nodes: set[int]) -> list[Value]:
    """What these nodes give to others, or to the caller."""
    graph = plan.graph
    inside = [graph.nodes[index] for index in nodes if 0 <= index < len(graph.nodes)]
    read = {value for node in graph.nodes if node.index not in nodes for value in node.inputs}
    return [value for node in inside for value in node.outputs if value in read or graph.is_returned(value)]


def _drawn(type_: jax.ShapeDtypeStruct) -> Any:
    """Random numbers of this type: between 0.1 and 1, so that roots and logarithms of them are numbers; 0 and 1 where they may be
    indices."""
    if jnp.issubdtype(type_.dtype, jax.dtypes.extended):
        raise TypeError(f"no random input of type {type_.dtype}")
    random = np.random.default_rng(0)
    if jnp.issubdtype(type_.dtype, jnp.inexact):
        return jnp.asarray(random.uniform(0.1, 1, type_.shape), type_.dtype)
    return jnp.asarray(random.integers(0, 2, type_.shape), type_.dtype)
