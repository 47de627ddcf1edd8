"""A scan and the scan that autodiff made of it, matched as one.

Where layers are scanned over, one body computes a layer and saves what the other, run backwards, computes its gradients from.
In neither is there both x and the cotangent, which the patterns of a train step begin with. Fused, the two bodies are such a
step: iteration i of the second reads what iteration i of the first saved. Once that is rewritten it is split into two loops again:
the first computes what it always gave, and saves what the second reads of it, mostly less than before.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxfuse.analysis.normal import constant, nbytes
from jaxfuse.program.bodies import filled
from jaxfuse.program.graph import Emission, Graph, Node, Value, compute

CONST, CARRIED, SLICED = range(3)
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

    def split(self, inputs: Sequence) -> tuple[list, list, list]:
        """(consts, carried, sliced) of its inputs, or of what stands for them."""
        return list(inputs[: self.consts]), list(inputs[self.consts : self.first_x]), list(inputs[self.first_x :])

    def kind(self, i: int) -> int:
        """Of its i-th input: CONST, CARRIED or SLICED."""
        return (i >= self.consts) + (i >= self.first_x)


def pairs(graph: Graph, backward: frozenset[int], free: Callable[[Node], bool]) -> Iterator[tuple[Loop, Loop]]:
    """Scans with the scan of the backward pass that reads most of what they stack up; each in one pair, of those that are `free`."""
    taken: set[int] = set()

    def is_one(node: Node | None) -> bool:
        return node is not None and node.primitive == "scan" and node.index not in taken and free(node) and not node.eqn.effects

    for node in graph.nodes:
        if node.index in backward and is_one(node):
            second = Loop(node)
            sources = Counter(v.producer for v in second.split(node.inputs)[SLICED] if is_one(v.producer)).most_common()
            firsts = (Loop(source) for source, _ in sources if source is not None)
            first = next((loop for loop in firsts if loop.options["length"] == second.options["length"]), None)
            if first:
                taken |= {first.node.index, node.index}
                yield first, second


class ScanPair:
    """Both bodies as one program. Its inputs are those of the first, then those of the second that are not known from the
    first: `shared` maps the second's inputs to (True, output) or (False, input) of the first, `own` are the others. Its
    outputs are the live ones of the first, which are read elsewhere too, at `live`, then those of the second."""

    def __init__(self, graph: Graph, first: Loop, second: Loop):
        self.first, self.second, self.shared = first, second, {}
        self.live = [i for i, v in enumerate(first.node.outputs) if i < first.carried or graph.is_returned(v)
                     or any(user is not second.node for user in v.users)]
        stacked = {v: i for i, v in enumerate(first.node.outputs) if i >= first.carried}
        given = {v: i for i, v in enumerate(first.node.inputs)}
        for k, value in enumerate(second.node.inputs):
            source = given.get(value)
            if second.kind(k) == SLICED and value in stacked:
                self.shared[k] = True, stacked[value]
            elif source is not None and first.kind(source) == second.kind(k) != CARRIED:
                self.shared[k] = False, source
        self.own = [k for k in range(len(second.node.inputs)) if k not in self.shared]

    def fused(self) -> ClosedJaxpr:
        first, second = self.first.body, self.second.body

        def both(*arrays):
            given, own = self.first.with_numbers(arrays[: len(first.jaxpr.invars)]), iter(arrays[len(first.jaxpr.invars):])
            made = jaxpr_as_fun(first)(*given)
            inputs = [(made if self.shared[k][0] else given)[self.shared[k][1]] if k in self.shared else next(own)
                      for k in range(len(second.jaxpr.invars))]
            with jax.named_scope("transpose(scan)"):
                return *[made[i] for i in self.live], *jaxpr_as_fun(second)(*self.second.with_numbers(inputs))

        types = [v.aval for v in first.jaxpr.invars] + [second.jaxpr.invars[k].aval for k in self.own]
        return jax.make_jaxpr(both)(*types)


def rewritten(graph: Graph, first: Loop, second: Loop, plan) -> tuple[list[Emission], Any] | None:
    """(the two scans over rewritten bodies, the plan of both as one program), or None: nothing is rewritten, or not in two, or it would
    have to save much more than before. `plan(closed)` rewrites a program."""
    pair = ScanPair(graph, first, second)
    inner = plan(pair.fused())
    if not inner.replacements:
        return None
    split = _Split(pair, inner)
    if split.reads_second or split.too_large:
        return None
    try:
        return split.emissions(), inner
    except (TypeError, ValueError):  # JAX finds a body unfit: a carry of another type
        return None


class _Split:
    """The rewritten program of a fused pair, as two loops again. `saved` are its values that the first stacks up for the second.
    `reads_second`: a kernel of the second now gives what the first needs, so that they cannot be split."""

    def __init__(self, pair: ScanPair, inner):
        self.pair, self.inner = pair, inner
        first, second, program = pair.first, pair.second, inner.graph
        self.wanted, self.results = program.outputs[: len(pair.live)], program.outputs[len(pair.live) :]
        self.inputs, own = program.inputs[: len(first.node.inputs)], program.inputs[len(first.node.inputs) :]
        made, inputs = _reached(self.wanted, inner.replacements, {*program.inputs, *program.constants})
        self.reads_second = any(v in inputs for v in own)
        _, read = _reached(self.results, inner.replacements, {*program.inputs, *program.constants, *made})
        _, carried, _ = first.split(self.inputs)
        self.saved = [v for v in read if v in made or v in carried]
        dropped = [v for i, v in enumerate(first.node.outputs) if i not in pair.live]
        self.too_large = sum(map(nbytes, self.saved)) * first.options["length"] > MOST_SAVED * sum(map(nbytes, dropped))
        # what else the second reads, each with the outer program's value, as CONST, CARRIED or SLICED
        read_again = [(first.kind(i), v, outer) for i, (v, outer) in enumerate(zip(self.inputs, first.node.inputs)) if v in read]
        of_second = [(second.kind(k), v, second.node.inputs[k]) for k, v in zip(pair.own, own)]
        known = [*[known for known in read_again if known[0] != CARRIED], *of_second]
        self.known = [[(v, outer) for kind, v, outer in known if kind == wanted] for wanted in range(3)]

    def emissions(self) -> list[Emission]:
        first, second = self.pair.first.node, self.pair.second.node
        forward = jax.make_jaxpr(self._forward)(*[v.aval for v in first.inputs])
        live = [first.outputs[i] for i in self.pair.live]
        stacks = [Value(aval) for aval in forward.out_avals[len(live) :]]
        needs = [stacks, *[[outer for _, outer in known] for known in self.known]]
        backward = jax.make_jaxpr(self._backward)(*[[v.aval for v in values] for values in needs])
        for value, aval in zip((*live, *second.outputs), (*forward.out_avals[: len(live)], *backward.out_avals)):
            if (value.shape, value.dtype) != (aval.shape, aval.dtype):
                raise TypeError(f"{aval} instead of {value!r}")
        return [Emission.of(first.inputs, (*live, *stacks), jaxpr_as_fun(forward)),
                Emission.of(sum(needs, []), second.outputs, jaxpr_as_fun(backward))]

    def _forward(self, *arrays):
        consts, carried, xs = self.pair.first.split(arrays)
        return self._scan(self.pair.first, carried, xs, (*self.wanted, *self.saved),
                          lambda carried, xs: zip(self.inputs, (*consts, *carried, *xs)))

    def _backward(self, stacks, consts, carried, xs):
        inner = [*self.saved, *[v for known in self.known for v, _ in known]]
        return self._scan(self.pair.second, carried, (stacks, xs), self.results,
                          lambda carried, slices: zip(inner, (*slices[0], *consts, *carried, *slices[1])))

    def _scan(self, loop: Loop, carried, xs, wanted: Sequence[Value], known: Callable):
        """A loop like this one, which gives the wanted values of the fused pair from those that are `known` of a step."""
        graph = self.inner.graph

        def step(carried, xs):
            given = dict([*zip(graph.constants, graph.constant_arrays), *known(carried, xs)])
            outs = compute(wanted, given, self.inner.replacements)
            return outs[: loop.carried], outs[loop.carried :]

        carried, stacked = jax.lax.scan(step, carried, xs, **loop.options)
        return *carried, *stacked


def _reached(wanted, replacements, known: set[Value]) -> tuple[dict[Value, None], dict[Value, None]]:
    """(what is computed on the way to the wanted values, the known ones that it is computed from), each in its order."""
    made: dict[Value, None] = {}
    given: dict[Value, None] = {}
    stack = list(wanted)
    while stack:
        value = stack.pop()
        if value in known:
            given[value] = None
        elif value not in made and value.literal is None:
            emission = replacements.get(value)
            made |= dict.fromkeys(emission.defines if emission else value.node.outputs)
            stack += emission.needs if emission else value.node.inputs
    return made, given
