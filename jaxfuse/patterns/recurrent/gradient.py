"""A loop over cells and the loop that autodiff made of it: one fused sequence in each direction.

JAX is asked for the gradient of one step of the forward loop. If a step of the program's backward loop does the same, which the
merged graph of both tells, its results are the gradients that the fused sequence's own derivative gives.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

from jaxfuse.analysis.gradients import Sums
from jaxfuse.analysis.normal import constant
from jaxfuse.patterns.dense.site import REARRANGED
from jaxfuse.program.autodiff import backward
from jaxfuse.program.equations import CUSTOM_DERIVATIVE_CALLS
from jaxfuse.program.graph import Emission, Graph, Node, Value, compute
from jaxfuse.program.site import Match, Unfit
from jaxfuse.runtime.private import scan_over
from jaxfuse.scan_pairs import CONST, Loop, ScanPair, pairs

DEEPEST = 6  # nodes before the loop that a constant of it is followed back over
MOST_CHOICES = 4  # of outputs that cotangents may be of
OTHER = "the loop that computes its gradient is not the one that JAX makes of it"


def matches(graph: Graph, node: Node, sequences) -> tuple[Match, Match]:
    """The loop and its gradient as fused sequences; `sequences(graph, node)` is the Match of a loop by itself. Raises `Unfit`."""
    found = next((pair for pair in pairs(graph, backward(graph), lambda node: True) if pair[0].node is node), None)
    if found is None:
        raise Unfit(OTHER)
    loops = _Loops(graph, *found)
    (alone,) = loops.alone.nodes
    if any(n.primitive in (*CUSTOM_DERIVATIVE_CALLS, "stop_gradient") for n in Graph(alone.params["jaxpr"]).nodes):
        raise Unfit(OTHER)  # JAX's gradient of the loop is not that of its values
    match = sequences(loops.alone, alone)
    for outputs in loops.differentiated_outputs() if match and loops.is_reversed else ():
        if gradients := loops.gradients(outputs):
            return loops.fused(match, outputs, gradients)
    raise Unfit(OTHER)


class _Loops:
    """A loop and the one of the backward pass that reads what it saves. That one carries sums of gradients of what the first one's
    constants are made of, `leaves`, and the cotangents of its states, and is given those of its outputs."""

    def __init__(self, graph: Graph, first: Loop, second: Loop):
        self.first, self.second, self.pair = first, second, ScanPair(graph, first, second)
        self.sums = max(0, second.carried - first.carried)
        self.own = [k for k in self.pair.own if second.kind(k) != CONST]
        self.leaves, others = self._leaves(first), self._leaves(second)
        self.others = [v for v in others if v not in self.leaves]
        self.alone = self._alone()

    @property
    def is_reversed(self) -> bool:
        """Whether the second goes the other way, and begins its sums with 0."""
        mine, its = self.first.options, self.second.options
        totals = self.second.node.inputs[self.second.consts :][: self.sums]
        return mine == its | dict(reverse=not its["reverse"]) and all(constant(v) == 0 for v in totals)

    def _leaves(self, loop: Loop) -> list[Value]:
        """What the loop's constants are made of, for JAX computes before the loop what every step would compute of them alone, as far
        as gradients are summed of it."""
        sums = set(map(_type, self.second.node.outputs[: self.sums]))
        leaves: dict[Value, None] = {}
        stack = [(v, DEEPEST) for v in loop.node.inputs[: loop.consts][::-1]]
        while stack:
            value, depth = stack.pop()
            node = value.producer
            if _type(value) in sums or depth == 0 or node is None or node.primitive not in (*REARRANGED, "stack"):
                leaves[value] = None
            else:
                stack += [(v, depth - 1) for v in node.inputs[::-1] if v.literal is None]
        return list(leaves)

    def _alone(self) -> Graph:
        """A program of the forward loop alone, without what it saves for the other, and with its constants made of the leaves in
        every step."""
        first, count = self.first, len(self.leaves)
        used = [i in self.pair.live for i in range(len(first.node.outputs))]
        inner, _ = partial_eval.dce_jaxpr(first.body.jaxpr, used, instantiate=True)
        step = jaxpr_as_fun(first.body.replace(jaxpr=inner))

        def one(*arrays):
            consts = compute(first.node.inputs[: first.consts], dict(zip(self.leaves, arrays)), {})
            return step(*consts, *arrays[count:])

        of_step = jax.make_jaxpr(one)(*[v.aval for v in self.leaves], *[v.aval for v in first.body.jaxpr.invars[first.consts :]])
        loop = functools.partial(first.node.eqn.primitive.bind, **scan_over(first.node.eqn, of_step, count, used))
        return Graph(jax.make_jaxpr(loop)(*[v.aval for v in self.outside]))

    @property
    def outside(self) -> list[Value]:
        """The program's values for the arguments of `alone`."""
        return [*self.leaves, *self.first.node.inputs[self.first.consts :]]

    def cotangents(self) -> tuple[Value, ...]:
        """Of the states, then of outputs."""
        return tuple(self.second.node.inputs[k] for k in self.own[self.sums :])

    def differentiated_outputs(self) -> list[tuple[int, ...]]:
        """Which outputs the cotangents may be of: all states, and some of the others in their order; `MOST_CHOICES` at most."""
        outputs, states = self.alone.nodes[0].outputs, range(self.first.carried)
        wanted = list(map(_type, self.cotangents()))
        others = itertools.combinations(range(len(states), len(outputs)), max(0, len(wanted) - len(states)))
        choices = ((*states, *other) for other in others)
        fitting = (chosen for chosen in choices if [_type(outputs[i]) for i in chosen] == wanted)
        return list(itertools.islice(fitting, MOST_CHOICES))

    def gradients(self, differentiated: tuple[int, ...]) -> dict[Value, int] | None:
        """The second loop's results, each with the argument of `alone` whose gradient it is; None if there is another one that is
        read."""
        step: ClosedJaxpr = self.alone.nodes[0].params["jaxpr"]
        count, second = len(self.leaves), self.second
        floats = [i for i, v in enumerate(step.in_avals) if jnp.issubdtype(v.dtype, jnp.floating)]

        def both(arguments, others, own):
            cotangents = own[self.sums :]

            def value(*primals):
                new = dict(zip(floats, primals))
                outs = jaxpr_as_fun(step)(*[new.get(i, array) for i, array in enumerate(arguments)])
                return [outs[i] for i in differentiated]

            return self._second(arguments, others, own), jax.vjp(value, *[arguments[i] for i in floats])[1](cotangents)

        own = [second.body.in_avals[k] for k in self.own]
        merged = Graph(jax.make_jaxpr(both)(list(step.in_avals), [v.aval for v in self.others], own))
        sums, results = Sums(merged), len(second.node.outputs)
        made = [(sums.addends(v), _type(v)) for v in merged.outputs]
        asked = dict(zip(floats, made[results:]))
        totals = merged.inputs[len(step.in_avals) + len(self.others) :]
        found: dict[Value, int] = {}
        for i, (value, (form, kind)) in enumerate(zip(second.node.outputs, made)):
            among = range(count + self.first.carried, len(step.in_avals))
            if i < self.sums:  # what a step adds to the sum that it is handed
                handed, among = sums.addends(totals[i]), range(count)
                if not handed <= form:
                    return None
                form = form - handed
            elif i < second.carried:  # of a state
                among = range(count + i - self.sums, count + i - self.sums + 1)
            place = next((k for k in among if k not in found.values() and asked.get(k) == (form, kind)), None)
            if place is not None:
                found[value] = place
            elif value.users:
                return None
        return found

    def _second(self, arguments, others, own) -> list:
        """A step of the second loop, for these arguments of a step of `alone`."""
        first, second, shared, count = self.first, self.second, self.pair.shared, len(self.leaves)
        known = dict(zip([*self.leaves, *self.others], [*arguments[:count], *others]))
        given = [*compute(first.node.inputs[: first.consts], known, {}), *arguments[count:]]
        saved, consts, rest = jaxpr_as_fun(first.body)(*given), compute(second.node.inputs[: second.consts], known, {}), iter(own)
        steps = [(saved if shared[k][0] else given)[shared[k][1]] if k in shared else next(rest)
                 for k in range(second.consts, len(second.node.inputs))]
        return jaxpr_as_fun(second.body)(*consts, *steps)

    def fused(self, match: Match, differentiated: tuple[int, ...], gradients: dict[Value, int]) -> tuple[Match, Match]:
        (alone,), (emission,), primals = self.alone.nodes, match.emissions, tuple(gradients.values())

        def outs_and_pullback(*arrays):
            def value(*given):
                read = dict(zip(alone.inputs, arrays)) | {alone.inputs[i]: array for i, array in zip(primals, given)}
                outs = [array for _, array in emission.run(lambda v: read[v])]
                return [outs[i] for i in differentiated], outs

            _, pullback, outs = jax.vjp(value, *[arrays[i] for i in primals], has_aux=True)
            return outs, pullback

        outside, cotangents = self.outside, self.cotangents()
        leaves, structure = jax.tree.flatten(jax.eval_shape(outs_and_pullback, *[v.aval for v in outside])[1])
        live, saved = [self.first.node.outputs[i] for i in self.pair.live], list(map(Value, leaves))

        def run(*arrays):
            outs, pullback = outs_and_pullback(*arrays)
            return *outs, *jax.tree.leaves(pullback)

        def run_back(*arrays):
            return jax.tree.unflatten(structure, arrays[: len(saved)])(list(arrays[len(saved) :]))

        first, second = self.first.node, self.second.node
        forward, back = Emission.of(outside, (*live, *saved), run), Emission.of((*saved, *cotangents), gradients, run_back)
        return (Match(match.pattern, first, (first,), (forward,), tuple(first.inputs), 0),
                Match(match.pattern, second, (), (back,), cotangents, 0, "backward"))


def _type(value: Value) -> tuple:
    return value.shape, value.dtype
