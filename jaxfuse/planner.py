"""The plan of a program: pattern by pattern what is fused, then the bodies of its loops and branches, each with a plan of its own."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from jaxfuse import patterns, scan_pairs
from jaxfuse.program import autodiff, symbolic
from jaxfuse.program.bodies import inside, programs, retraced, subprograms
from jaxfuse.program.equations import CUSTOM_DERIVATIVE_CALLS
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.liveness import accept, circular
from jaxfuse.program.plan import Plan
from jaxfuse.program.site import Match, Refusal, UnfusedStep
from jaxfuse.runtime import private, versions
from jaxfuse.runtime.reasons import LeftOut, asks_nothing
from jaxfuse.runtime.settings import unwatched
from jaxfuse.selection import Decider

PARTIAL = "a sum over mesh axes is still to be taken of its values or of their gradients: no kernel can follow"
CIRCULAR = "what it needs is computed from what it gives by another fused site"


@unwatched
def plan(closed: ClosedJaxpr, decider: Decider, outer: tuple[Graph, Node] | None = None) -> Plan:
    """Finds every site of the program, the bodies of its loops and branches included; `outer` as in `Graph`. Where matching fails
    nothing is fused, and the plan says why. Raises what `Graph` raises for a program that it cannot read."""
    versions.warn_if_newer()
    graph, before = Graph(closed, outer), len(decider.taken)
    try:
        return _plan(closed, graph, decider.of_symbolic_shapes() if graph.is_symbolic else decider)
    except Exception as error:
        decider.give_up(decider.taken[before:])
        return Plan(closed, graph, {}, found=[Refusal("program", graph.nodes[0], (), _unread(graph, "this program", error))])


def _plan(closed: ClosedJaxpr, graph: Graph, decider: Decider) -> Plan:
    planner = _Planner(graph, decider)
    planner.match_patterns()
    planner.enter_bodies()
    planner.take_back_circles()
    return Plan(closed, graph, planner.replacements, planner.in_order(), planner.inner, planner.owners)


class _Row(NamedTuple):
    """A row of the report, and the index of the node in whose body it is."""

    row: Match | Refusal
    body_of: int | None = None


class _Planner:
    """What is found in one graph: its rows, and what of the `Plan` follows from them."""

    def __init__(self, graph: Graph, decider: Decider):
        self.graph, self.decider = graph, decider
        self.rows: list[_Row] = []
        self.claimed: set[int] = set()  # nodes that rows speak of
        self.replacements: dict[Value, Emission] = {}
        self.owners: dict[int, Emission] = {}
        self.inner: dict[int, list[Plan]] = {}

    def match_patterns(self) -> None:
        graph, covered = self.graph, set[int]()
        partial = [node for node in graph.nodes if any(value.is_partial for value in (*node.inputs, *node.outputs))]
        self.rows += [_Row(Refusal("program", node, (), PARTIAL)) for node in partial[:1]]
        self.claimed |= {node.index for node in partial}
        for pattern in patterns.ORDER:
            for anchor in pattern.anchors(graph):
                if anchor.index in self.claimed:
                    continue
                for result in self._results(pattern, anchor):
                    if isinstance(result, Match) and (reason := self._left_out(pattern, result)):
                        result = Refusal(result.pattern, result.anchor, result.operands, reason, result.direction)
                    elif type(result) is Refusal and not asks_nothing(result.reason):
                        unwanted = self.decider.unwanted(patterns.name_of(pattern), result)
                        result = dataclasses.replace(result, reason=unwanted or result.reason)
                    if type(result) is Refusal and result.anchor.index in covered:
                        continue
                    self.rows.append(_Row(result))
                    self.claimed |= {node.index for node in result.nodes}
                    if isinstance(result, Match):
                        self._accept(result)
                    else:
                        covered |= {node.index for node in result.covers}

    def _results(self, pattern, anchor: Node) -> Iterator[Match | Refusal]:
        """What the pattern finds at the anchor, under its mesh. A program that it cannot read must not fail for that."""
        results = pattern.match(self.graph, anchor, self.claimed, self.decider.unprofitable)

        def following():
            with anchor.eqn.ctx.manager:
                return next(results, None)

        try:
            yield from iter(following, None)
        except Exception as error:
            yield Refusal(patterns.name_of(pattern), anchor, (), _unread(self.graph, f"what follows {anchor}", error))

    def _left_out(self, pattern, match: Match) -> str:
        """Why the match is not made though a kernel takes it: the user says so, of it or of what makes the values that it needs; or ""."""
        given = {*self.graph.inputs, *self.graph.constants}
        for need in (need for emission in match.emissions for need in emission.needs):
            if need.producer is None and need.literal is None and need not in given and need not in self.replacements:
                return LeftOut("the forward op that would save what it needs is left out")
        return self.decider.left_out(patterns.name_of(pattern), match) or ""

    def _accept(self, match: Match) -> None:
        fused_away = accept(self.graph, match)
        self.claimed |= fused_away
        self._replace(match.emissions)
        self.owners = dict.fromkeys((*fused_away, *(node.index for node in match.nodes)), match.emissions[0]) | self.owners

    def _replace(self, emissions: Iterable[Emission]) -> None:
        self.replacements |= {value: emission for emission in emissions for value in emission.defines}

    def enter_bodies(self) -> None:
        pairs = self._scan_pairs()
        for node in self.graph.nodes:
            bodies = {} if node.index in self.graph.marks.fused_away else subprograms(node)
            emissions: Sequence[Emission] = ()
            rows: list = []
            plans: list[Plan] = []
            if node.index in pairs:
                emissions, plans = pairs[node.index]
                rows = _rows(plans)
            elif bodies:
                emissions, rows, plans = self._enter(node, bodies)
            elif node.primitive in CUSTOM_DERIVATIVE_CALLS:
                reason = f"it is inside a {node.primitive}: a function with rules of its own stays as it is"
                plans = [plan(_closed(body), self.decider) for body in programs(node).values()]
                rows = self._given_up(plans, reason)
            self._replace(emissions)
            self.rows += [_Row(row, node.index) for row in rows]
            self.inner |= {node.index: plans} if rows or bodies or node.index in pairs else {}

    def _scan_pairs(self) -> dict[int, tuple[Sequence[Emission], list[Plan]]]:
        """What `scan_pairs.rewritten` gives for the scans whose backward scan is in this program too; the backward scan's own is empty."""
        graph, taken = self.graph, self.claimed | self.graph.marks.fused_away
        results: dict[int, tuple[Sequence[Emission], list[Plan]]] = {}
        before = len(self.decider.taken)
        try:
            for first, second in scan_pairs.pairs(graph, autodiff.backward(graph), lambda node: node.index not in taken):
                before = len(self.decider.taken)
                result = scan_pairs.rewritten(graph, first, second, lambda closed: plan(closed, self.decider))
                if result is None:
                    self.decider.give_up(self.decider.taken[before:])
                else:
                    results |= {first.node.index: (result[0], [result[1]]), second.node.index: ((), [])}
        except Exception as error:  # each loop is still looked at by itself
            self.decider.give_up(self.decider.taken[before:])
            _unread(graph, "a loop and the loop of its gradient", error)
        return results

    def _enter(self, node: Node, bodies: dict) -> tuple[Sequence[Emission], list, list[Plan]]:
        """The same control-flow node over rewritten bodies, if anything in them is rewritten; its rows; the bodies' plans."""
        plans: list[Plan] = []

        def rewritten(body):
            if isinstance(body, tuple):
                return tuple(map(rewritten, body))
            known = scan_pairs.Loop(node).body_with_numbers() if node.primitive == "scan" else _closed(body)
            inner = plan(known, self.decider, (self.graph, node))
            plans.append(inner)
            if not inner.replacements:
                return body

            def run(*arrays):
                return inner(list(arrays))

            # the rules of loops and branches know of no constants: a jit keeps them
            return retraced(body, jax.jit(run) if inner.graph.constant_arrays else run)

        try:
            params = inside(node, lambda: {name: rewritten(body) for name, body in bodies.items()})
            if all(params[name] is body for name, body in bodies.items()):
                return (), _rows(plans), plans
            changed = Node(private.with_params(node.eqn, params), node.index, [], node.name_stack)
        except (TypeError, ValueError) as error:  # JAX finds the rewritten body unfit where the user's own was not
            return (), self._given_up(plans, f"the body of {node} cannot be rewritten: {error}".splitlines()[0]), plans
        except Exception as error:
            reason = _unread(self.graph, f"the body of {node}", error)
            return (), [Refusal("program", node, (), reason), *self._given_up(plans, reason)], plans

        return [Emission.of(node.inputs, node.outputs, lambda *arrays: changed.replay(list(arrays)))], _rows(plans), plans

    def _given_up(self, plans: list[Plan], reason: str) -> list:
        """Their rows, of which none is rewritten, for this reason unless they have another."""
        rows = [row for row in _rows(plans) if not isinstance(row, UnfusedStep)]
        self.decider.give_up([row for row in rows if isinstance(row, Match)])
        return [Refusal(row.pattern, row.anchor, row.operands, reason, row.direction) if isinstance(row, Match) else row for row in rows]

    def take_back_circles(self) -> None:
        """Gives up the last of matches that wait for each other, and those that need what only this one makes: what a forward op saves
        for its gradient."""
        while self.replacements and (waiting := circular(self.graph, self.replacements)):
            matches = [row for row, _ in self.rows if isinstance(row, Match)]
            last = next(match for match in reversed(matches) if set(match.emissions) & set(waiting))
            saved = {v for emission in last.emissions for v in emission.defines if v.producer is None}
            given_up = [match for match in matches if match is last or
                        any(v in saved for emission in match.emissions for v in emission.needs)]
            self.decider.give_up(given_up)
            emissions = [emission for match in given_up for emission in match.emissions]
            self.replacements = {value: emission for value, emission in self.replacements.items() if emission not in emissions}
            self.rows = [_Row(Refusal(row.pattern, row.anchor, row.operands, CIRCULAR, row.direction) if row in given_up else row, body_of)
                         for row, body_of in self.rows]

    def in_order(self) -> list:
        """The rows in program order, a backward row after its forward row; those of a loop's body where the loop is. What autodiff made
        is backward, whatever pattern found it."""
        backward = autodiff.backward(self.graph)

        def place(found: _Row) -> tuple[int, bool]:
            row, body_of = found
            if body_of is not None:
                return body_of, False
            return min([row.anchor.index, *(node.index for node in row.nodes)]), row.direction == "backward"

        def directed(found: _Row) -> Match | Refusal:
            row, body_of = found
            is_backward = body_of is None and row.anchor.index in backward
            return dataclasses.replace(row, direction="backward") if is_backward else row

        return [directed(found) for found in sorted(self.rows, key=place)]


def _unread(graph: Graph, what: str, error: Exception) -> str:
    """The reason why `what` is left alone. Of unknown sizes JAX itself cannot tell all, so nobody is warned there."""
    return symbolic.cannot_be_told(error) if graph.is_symbolic else versions.unread(what, error)


def _rows(plans: list[Plan]) -> list:
    return [row for inner in plans for row in inner.found]


def _closed(body) -> ClosedJaxpr:
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
