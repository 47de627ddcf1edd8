"""A loop over cells and the loop that autodiff made of it: one fused sequence in each direction.

JAX is asked for the gradient of the forward loop. If the program's backward loop does the same in every step, which
the merged graph of both tells, its results are the gradients that the fused sequence's own derivative gives.
"""

import functools
import itertools
from typing import NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval

from jaxfuse.analysis.canonical import CAST, constant
from jaxfuse.analysis.gradients import Sums
from jaxfuse.analysis.layout import RESHAPES
from jaxfuse.analysis.scan_pairs import ScanPair, Loop
from jaxfuse.program.autodiff import backward
from jaxfuse.program.graph import CUSTOM_DERIVATIVE_CALLS, Emission, Graph, Node, Value, compute
from jaxfuse.program.site import Match, Unfit
from jaxfuse.runtime.private import scan_over

REARRANGED = (*RESHAPES, CAST, "transpose", "concatenate", "slice", "split", "stack")
DEEPEST = 6  # nodes before the loop that a constant of it is followed back over
MOST_CHOICES = 4  # of slices that may be those of a gradient
OTHER = "the loop that computes its gradient is not the one that JAX makes of it"


def second_of(graph: Graph, node: Node) -> Node | None:
    """The loop of the backward pass that reads what this one saves."""
    back = backward(graph)
    readers = {user.index: user for v in node.outputs for user in v.users if user.index in back and user.primitive == "scan"}
    return next(iter(readers.values())) if len(readers) == 1 else None


def matches(graph: Graph, node: Node, loop) -> tuple[Match, Match]:
    """The loop and its gradient as fused sequences; `loop(graph, node)` is the Match of a loop by itself. Raises `Unfit`."""
    other = second_of(graph, node)
    if other is None or node.eqn.effects or other.eqn.effects:
        raise Unfit(OTHER)
    first, second = Loop(node), Loop(other)
    if any(first.options[name] != second.options[name] for name in ("length", "unroll")):
        raise Unfit(OTHER)
    joint = ScanPair(graph, first, second)
    leaves, moving = _leaves(joint)
    alone = _alone(joint, leaves)
    if any(n.primitive in (*CUSTOM_DERIVATIVE_CALLS, "stop_gradient") for n in Graph(alone.nodes[0].params["jaxpr"]).nodes):
        raise Unfit(OTHER)  # JAX's gradient of the loop is not that of its values
    found = loop(alone, alone.nodes[0])
    if found is None:
        raise Unfit(OTHER)
    outside = [*leaves, *node.inputs[first.consts :]]
    for gradient in _candidates(joint, alone, len(leaves), moving):
        computed = gradient.computed_by(graph, joint, outside)
        if computed:
            return _fused(joint, alone, found, gradient, computed, outside)
    raise Unfit(OTHER)


def _leaves(joint: ScanPair) -> tuple[list[Value], int]:
    """What the loop's constants are made of, for JAX computes before the loop what every step would compute of them alone.
    The backward loop sums gradients of so many of these, the first ones, in any order among those of one type. Raises `Unfit`
    where it sums something else."""
    first, second = joint.first, joint.second
    sums = second.node.outputs[: second.carried - first.carried]
    wanted = {(v.shape, v.dtype) for v in sums}
    leaves: dict[Value, None] = {}
    stack = [(v, DEEPEST) for v in first.node.inputs[: first.consts][::-1]]
    while stack:
        value, depth = stack.pop()
        node = value.producer
        if (value.shape, value.dtype) in wanted or depth == 0 or node is None or node.primitive not in REARRANGED:
            leaves[value] = None
        else:
            stack += [(v, depth - 1) for v in node.inputs[::-1] if v.literal is None]
    values = list(leaves)
    moving: list[int] = []
    for total in sums:
        fitting = (i for i, v in enumerate(values) if i not in moving and (v.shape, v.dtype) == (total.shape, total.dtype))
        place = next(fitting, None)
        if place is None:
            raise Unfit(OTHER)
        moving.append(place)
    return [values[i] for i in moving] + [v for i, v in enumerate(values) if i not in moving], len(moving)


def _alone(joint: ScanPair, leaves: list[Value]) -> Graph:
    """A program of the forward loop alone, without what it saves for the other, and with its constants made of the leaves
    in every step."""
    first = joint.first
    body, consts = first.body, list(first.node.inputs[: first.consts])
    used = [i in joint.kept for i in range(len(first.node.outputs))]
    inner, _ = partial_eval.dce_jaxpr(body.jaxpr, used, instantiate=True)
    step = jaxpr_as_fun(body.replace(jaxpr=inner))

    def one(*arrays):
        given = dict(zip(leaves, arrays))
        return step(*compute(consts, given, {}), *arrays[len(leaves) :])

    of_step = jax.make_jaxpr(one)(*[v.aval for v in leaves], *[v.aval for v in body.jaxpr.invars[first.consts :]])
    params = scan_over(first.node.eqn, of_step, len(leaves), used)
    loop = functools.partial(first.node.eqn.primitive.bind, **params)
    return Graph(jax.make_jaxpr(loop)(*[v.aval for v in (*leaves, *first.node.inputs[first.consts :])]))


class _Computed(NamedTuple):
    """How the program's loops compute a gradient of JAX's: what its loops read besides, each with the program's own value, and for
    each result of the program's second loop the place of the same result of its own."""

    own: list[tuple[Value, Value]]
    places: list[int]


class _Gradient:
    """JAX's gradient of the loop, by the inputs `moving` and for cotangents of the outputs `driven`."""

    def __init__(self, alone: Graph, moving: list[int], driven: list[int]):
        self.moving, self.driven, (node,) = moving, driven, alone.nodes
        inputs = [v.aval for v in node.inputs]

        def gradient(arrays, cotangents):
            def value(*given):
                full = list(arrays)
                for i, array in zip(moving, given):
                    full[i] = array
                outs = node.replay(full)
                return [outs[i] for i in driven]

            return jax.vjp(value, *[arrays[i] for i in moving])[1](cotangents)

        self.graph = Graph(jax.make_jaxpr(gradient)(inputs, [node.outputs[i].aval for i in driven]))
        self.arguments, self.cotangents = self.graph.inputs[: len(inputs)], self.graph.inputs[len(inputs) :]
        self.scans = [n for n in self.graph.nodes if n.primitive == "scan"]

    def computed_by(self, graph: Graph, joint: ScanPair, outside: list[Value]) -> _Computed | None:
        """If every step of the program's loops gives what a step of these gives; `outside` are the program's values for the
        arguments."""
        if len(self.scans) != 2:
            return None
        first, second = map(Loop, self.scans)
        other = ScanPair(self.graph, first, second)
        if second.options != joint.second.options or len(other.own) != len(joint.own):
            return None
        values = self._outside(graph, outside)
        given = {v: i for i, v in enumerate(joint.first.node.inputs[: joint.first.consts])}
        known = [given[values[v]] for v in first.node.inputs[: first.consts] if values.get(v) in given]
        if len(known) < first.consts:
            return None
        sources = [*known, *range(joint.first.consts, len(joint.first.node.inputs))]
        rest = self.arguments[len(self.arguments) - len(sources[first.consts :]) :]
        if first.node.inputs[first.consts :] != rest:
            return None
        own = [(second.node.inputs[k], joint.second.node.inputs[i]) for k, i in zip(other.own, joint.own)]
        if not all(self._is_same(values, *pair) for pair in own):
            return None
        places = _same_step(joint, other, sources)
        return None if places is None else _Computed(own, places)

    def _outside(self, graph: Graph, outside: list[Value]) -> dict[Value, Value]:
        """The program's own values for what this gradient computes before its loops."""
        values = dict(zip(self.arguments, outside))
        for node in self.graph.nodes:
            if node.primitive != "scan" and all(v.literal is not None or v in values for v in node.inputs):
                known = graph.known(node.eqn, [values.get(v, v) for v in node.inputs])
                values |= zip(node.outputs, known.outputs if known else ())
        return values

    def _is_same(self, values: dict[Value, Value], mine: Value, own: Value) -> bool:
        """Whether what the loops read besides is the same value, zero in both, or a cotangent."""
        if (mine.shape, mine.dtype) != (own.shape, own.dtype):
            return False
        number = constant(mine)
        return values.get(mine) is own or any(mine is v for v in self.cotangents) or number is not None and number == constant(own)


def _candidates(joint: ScanPair, alone: Graph, leaves: int, moving: int):
    """Gradients by these leaves, by all states, and by as many of the slices as the backward loop has results for."""
    first, second, node = joint.first, joint.second, alone.nodes[0]
    slices = leaves + first.carried
    moved = _subsets(node.inputs, range(slices, len(node.inputs)), second.node.outputs[second.carried :])
    steps = [second.node.inputs[k] for k in joint.own if second.is_x(k)]
    driven = _subsets(node.outputs, range(first.carried, len(node.outputs)), steps)
    for xs, ys in itertools.product(moved, driven):
        yield _Gradient(alone, [*range(moving), *range(leaves, slices), *xs], [*range(first.carried), *ys])


def _subsets(values: list[Value], among: range, like: list[Value]) -> list[tuple[int, ...]]:
    """Choices of some of the values, in their order, whose types are these; `MOST_CHOICES` at most."""
    wanted = [(v.shape, v.dtype) for v in like]
    fitting = (c for c in itertools.combinations(among, len(wanted)) if [(values[i].shape, values[i].dtype) for i in c] == wanted)
    return list(itertools.islice(fitting, MOST_CHOICES))


def _same_step(joint: ScanPair, other: ScanPair, sources: list[int]) -> list[int] | None:
    """For every result of the program's second loop the result of the other's whose steps compute the same; None if there is
    none. Input i of the other's first loop is input `sources[i]` of this one's."""
    program, asked = joint.program(), other.program()
    inputs, second = len(joint.first.node.inputs), joint.second
    skipped = len(joint.kept), len(other.kept)

    def both(*arrays):
        given = [arrays[i] for i in sources]
        results = (run(*of)[skip:] for run, of, skip in zip(
            map(jaxpr_as_fun, (program, asked)), (arrays, (*given, *arrays[inputs:])), skipped))
        return [list(result) for result in results]

    merged = Graph(jax.make_jaxpr(both)(*[v.aval for v in program.jaxpr.invars]))
    sums, half, count = Sums(merged), len(merged.outputs) // 2, second.carried - joint.first.carried
    totals = [inputs + joint.own.index(k) for k in range(second.consts, second.consts + count) if k in joint.own]
    if len(merged.outputs) != 2 * half or len(totals) < count:
        return None
    made = [sums.addends(v) for v in merged.outputs]
    for i, position in enumerate(totals):  # what a step adds to the sum that it is handed
        handed = sums.addends(merged.inputs[position])
        if not (handed <= made[i] and handed <= made[half + i]):
            return None
        made[i], made[half + i] = made[i] - handed, made[half + i] - handed
    steps = [(form, v.aval) for form, v in zip(made, merged.outputs)]
    places: list[int] = []
    for i in range(half):
        fitting = (k for k in (range(count) if i < count else (i,)) if k not in places and steps[half + k] == steps[i])
        places.append(next(fitting, half))
    return places if half not in places else None


def _fused(joint: ScanPair, alone: Graph, found: Match, gradient: _Gradient, computed: _Computed,
           outside: list[Value]) -> tuple[Match, Match]:
    node, second, own = joint.first.node, joint.second.node, alone.nodes[0]
    results = {v: i for i, v in zip(gradient.moving, gradient.graph.outputs)}
    of_result = [results.get(gradient.scans[1].outputs[place]) for place in computed.places]
    if any(i is None and v.users for i, v in zip(of_result, second.outputs)):
        raise Unfit(OTHER)
    (emission,), moving = found.emissions, gradient.moving
    own_of = dict(reversed(computed.own))
    if any(ct not in own_of for ct in gradient.cotangents):
        raise Unfit(OTHER)
    cotangents = [own_of[ct] for ct in gradient.cotangents]

    def differentiated(*arrays):
        def value(*given):
            full = dict(zip(own.inputs, arrays)) | {own.inputs[i]: a for i, a in zip(moving, given)}
            outs = [array for _, array in emission.run(lambda v: full[v])]
            return [outs[i] for i in gradient.driven], outs

        _, back, outs = jax.vjp(value, *[arrays[i] for i in moving], has_aux=True)
        return outs, back

    outs, back = jax.eval_shape(differentiated, *[v.aval for v in outside])
    leaves, structure = jax.tree.flatten(back)
    kept, saved = [node.outputs[i] for i in joint.kept], [Value(leaf) for leaf in leaves]

    def run(read):
        outs, back = differentiated(*map(read, outside))
        yield from zip((*kept, *saved), (*outs, *jax.tree.leaves(back)), strict=True)

    def run_back(read):
        grads = jax.tree.unflatten(structure, map(read, saved))([read(v) for v in cotangents])
        made = dict(zip(moving, grads))
        yield from ((v, made[i]) for v, i in zip(second.outputs, of_result) if i is not None)

    defines = tuple(v for v, i in zip(second.outputs, of_result) if i is not None)
    forward = Match(found.pattern, node, (node,), (Emission(tuple(outside), (*kept, *saved), run),), tuple(node.inputs), 0)
    needs = (*saved, *cotangents)
    return forward, Match(found.pattern, second, (), (Emission(needs, defines, run_back),), tuple(cotangents), 0, "backward")
