"""A scan and the scan that autodiff made of it, matched as one.

Where layers are scanned over, one body computes a layer and saves what the other, run backwards, computes its gradients from.
In neither is there both x and the cotangent, which the patterns of a train step begin with. Joined, the two bodies are such a
step: iteration i of the second reads what iteration i of the first saved. What is then computed is taken apart again: the
first scan computes what it always gave, and saves what the second meets of it, mostly less than before.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxfuse.analysis.canonical import constant, filled
from jaxfuse.program.graph import Emission, Graph, Node, Value, compute

MOST_SAVED = 2  # times as much as before; a relu's mask takes a byte, the value that serves it four


class Loop:
    """A scan's inputs and body, taken apart as `jax.lax.scan` takes them."""

    def __init__(self, node: Node):
        self.node, self.body = node, node.params["jaxpr"]
        self.consts, self.carried = node.params["num_consts"], node.params["num_carry"]
        self.first_x = self.consts + self.carried
        self.options = {name: node.params[name] for name in ("length", "reverse", "unroll")}
        self.numbers = {i: n for i, v in enumerate(node.inputs[: self.consts]) if (n := constant(v)) is not None}

    def with_numbers(self, arrays) -> list:
        """The body's inputs, those consts that are one number as that: JAX takes what no step changes out of a loop, the number
        with which a mask fills too."""
        return [filled(self.node.inputs[i], self.numbers[i]) if i in self.numbers else a for i, a in enumerate(arrays)]

    def body_with_numbers(self) -> ClosedJaxpr:
        """The body with these numbers written into it."""
        if not self.numbers:
            return self.body
        return jax.make_jaxpr(lambda *arrays: jaxpr_as_fun(self.body)(*self.with_numbers(arrays)))(*self.body.in_avals)

    def is_const(self, i: int) -> bool:
        return i < self.consts

    def is_x(self, i: int) -> bool:
        return i >= self.first_x


def pairs(graph: Graph, backward: frozenset[int], free: Callable[[Node], bool]) -> Iterator[tuple[Loop, Loop]]:
    """Scans with the scan of the backward pass that reads what they stack up; each in one pair, of those that are `free`."""
    taken: set[int] = set()
    for node in graph.nodes:
        if node.primitive != "scan" or node.index not in backward or not free(node):
            continue
        second = Loop(node)
        sources = [v.producer for v in node.inputs[second.first_x:] if v.producer is not None]
        for source in sources:
            first = Loop(source) if source.primitive == "scan" and source.index not in taken and free(source) else None
            if first and first.options["length"] == second.options["length"] and not (source.eqn.effects or node.eqn.effects):
                taken |= {source.index, node.index}
                yield first, second
                break


class ScanPair:
    """Both bodies as one program. Its inputs are those of the first, then those of the second that are not known from the
    first: `shared` maps the second's inputs to (True, output) or (False, input) of the first, `own` are the others. Its
    outputs are what of the first is read elsewhere, `kept`, then those of the second."""

    def __init__(self, graph: Graph, first: Loop, second: Loop):
        self.first, self.second, self.shared = first, second, {}
        self.kept = [i for i, v in enumerate(first.node.outputs) if i < first.carried or graph.is_returned(v)
                     or any(user is not second.node for user in v.users)]
        stacked = {v: i for i, v in enumerate(first.node.outputs) if i >= first.carried}
        given = {v: i for i, v in enumerate(first.node.inputs)}
        for k, value in enumerate(second.node.inputs):
            source = given.get(value)
            if second.is_x(k) and value in stacked:
                self.shared[k] = True, stacked[value]
            elif source is not None and (first.is_x(source) and second.is_x(k) or first.is_const(source) and second.is_const(k)):
                self.shared[k] = False, source
        self.own = [k for k in range(len(second.node.inputs)) if k not in self.shared]

    def program(self) -> ClosedJaxpr:
        first, second = self.first.body, self.second.body

        def joint(*arrays):
            given, own = self.first.with_numbers(arrays[: len(first.jaxpr.invars)]), iter(arrays[len(first.jaxpr.invars):])
            made = jaxpr_as_fun(first)(*given)
            inputs = [(made if self.shared[k][0] else given)[self.shared[k][1]] if k in self.shared else next(own)
                      for k in range(len(second.jaxpr.invars))]
            with jax.named_scope("transpose(scan)"):
                return *[made[i] for i in self.kept], *jaxpr_as_fun(second)(*self.second.with_numbers(inputs))

        types = [v.aval for v in first.jaxpr.invars] + [second.jaxpr.invars[k].aval for k in self.own]
        return jax.make_jaxpr(joint)(*types)


def joined(graph: Graph, first: Loop, second: Loop, plan) -> tuple[list[Emission], Any] | None:
    """(the two scans over rewritten bodies, the plan of both as one program), or None: nothing is rewritten, or not in two, or it would
    have to save much more than before. `plan(closed)` rewrites a program."""
    joint = ScanPair(graph, first, second)
    inner = plan(joint.program())
    if not inner.replacements:
        return None
    parts = _Parts(joint, inner)
    if parts.reads_second or parts.too_large:
        return None
    try:
        return parts.emissions(), inner
    except (TypeError, ValueError):  # JAX finds a body unfit: a carry of another type
        return None


class _Parts:
    """The rewritten joint program, in two again. `saved` are its values that the first scan stacks up for the second.
    `reads_second`: a kernel of the second now gives what the first needs, so that they cannot be parted."""

    def __init__(self, joint: ScanPair, inner):
        self.joint, self.inner = joint, inner
        first, program = joint.first, inner.graph
        self.wanted, self.results = program.outputs[: len(joint.kept)], program.outputs[len(joint.kept) :]
        self.inputs = program.inputs
        start = {*program.inputs, *program.constants}
        made, read = _reached(self.wanted, inner.replacements, start)
        self.reads_second = any(v in read for v in self.inputs[len(first.node.inputs) :])
        _, met = _reached(self.results, inner.replacements, start | made.keys())
        carries = set(self.inputs[first.consts : first.first_x])
        self.saved = [v for v in met if v in made or v in carries]
        self.met = [i for i, v in enumerate(self.inputs) if v in met and v not in carries]
        dropped = [v for i, v in enumerate(first.node.outputs) if i not in joint.kept]
        self.too_large = sum(map(_bytes, self.saved)) * first.options["length"] > MOST_SAVED * sum(map(_bytes, dropped))

    def emissions(self) -> list[Emission]:
        first, second, joint = self.joint.first, self.joint.second, self.joint
        forward = jax.make_jaxpr(self._forward)(*[v.aval for v in first.node.inputs])
        kept = [first.node.outputs[i] for i in joint.kept]
        stacks = [Value(aval) for aval in forward.out_avals[len(kept):]]
        outer = [*first.node.inputs, *[second.node.inputs[k] for k in joint.own]]
        indices = sorted({*self.met, *range(len(first.node.inputs), len(outer))})
        needs = [outer[i] for i in indices]
        backward = jax.make_jaxpr(functools.partial(self._backward, indices))(*[v.aval for v in (*stacks, *needs)])
        for value, aval in zip((*kept, *second.node.outputs), (*forward.out_avals[: len(kept)], *backward.out_avals)):
            if (value.shape, value.dtype) != (aval.shape, aval.dtype):
                raise TypeError(f"{aval} instead of {value!r}")
        return [_emission(forward, first.node.inputs, (*kept, *stacks)), _emission(backward, (*stacks, *needs), second.node.outputs)]

    def _forward(self, *arrays):
        first = self.joint.first
        consts, carry, xs = arrays[: first.consts], arrays[first.consts : first.first_x], arrays[first.first_x :]

        def step(carry, xs):
            outs = self._compute((*self.wanted, *self.saved), zip(self.inputs, (*consts, *carry, *xs)))
            return tuple(outs[: first.carried]), tuple(outs[first.carried :])

        carry, stacked = jax.lax.scan(step, carry, xs, **first.options)
        return *carry, *stacked

    def _backward(self, indices, *arrays):
        """`indices` are those of the joint inputs that follow what was saved."""
        first, second, offset = self.joint.first, self.joint.second, len(self.joint.first.node.inputs)
        stacks, given = arrays[: len(self.saved)], dict(zip(indices, arrays[len(self.saved) :]))
        sources = {offset + n: k for n, k in enumerate(self.joint.own)}

        def is_x(i):
            return first.is_x(i) if i < offset else second.is_x(sources[i])

        carried = [i for i in indices if i >= offset and not second.is_const(sources[i]) and not is_x(i)]
        sliced = [i for i in indices if is_x(i)]
        fixed = [i for i in indices if i not in carried and i not in sliced]

        def step(carry, slices):
            saved, xs = slices
            known = [*zip(self.saved, saved), *zip([self.inputs[i] for i in (*carried, *sliced, *fixed)],
                                                   (*carry, *xs, *[given[i] for i in fixed]))]
            outs = self._compute(self.results, known)
            return tuple(outs[: second.carried]), tuple(outs[second.carried :])

        carry, stacked = jax.lax.scan(step, tuple(given[i] for i in carried), (stacks, tuple(given[i] for i in sliced)),
                                      **second.options)
        return *carry, *stacked

    def _compute(self, wanted, known):
        graph = self.inner.graph
        constants = zip(graph.constants, graph.constant_arrays)
        return compute(wanted, dict([*constants, *known]), self.inner.replacements)


def _emission(closed: ClosedJaxpr, needs, defines) -> Emission:
    def run(read):
        return zip(defines, jaxpr_as_fun(closed)(*map(read, needs)))

    return Emission(tuple(needs), tuple(defines), run)


def _reached(wanted, replacements, known: set[Value]) -> tuple[dict[Value, None], dict[Value, None]]:
    """(what is computed on the way to the wanted values, the known ones that it is computed from), each in its order."""
    made: dict[Value, None] = {}
    met: dict[Value, None] = {}
    stack = list(wanted)
    while stack:
        value = stack.pop()
        if value in known:
            met[value] = None
        elif value not in made and value.literal is None:
            emission = replacements.get(value)
            made |= dict.fromkeys(emission.defines if emission else value.node.outputs)
            stack += emission.needs if emission else value.node.inputs
    return made, met


def _bytes(value: Value) -> int:
    return value.aval.size * value.dtype.itemsize
