"""fuse(fn): trace → graph → match → rewrite. docs/architecture.md says in which folder each of these steps is."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import jax
from jax.extend.core import ClosedJaxpr

from jaxfuse import patterns
from jaxfuse.analysis import scan_pairs
from jaxfuse.jitted import Fused
from jaxfuse.ops.errors import one_of
from jaxfuse.program import symbolic, autodiff
from jaxfuse.program.graph import CUSTOM_DERIVATIVE_CALLS, Emission, Graph, Node, Value, inside, programs, retraced, subprograms
from jaxfuse.program.liveness import accept, circular
from jaxfuse.program.plan import Plan
from jaxfuse.program.signature import Traced, is_part_of_a_program, trace
from jaxfuse.program.site import Match, Refusal, UnfusedStep
from jaxfuse.program.source import raising_line
from jaxfuse.report import FusionError, FusionReport, build, log
from jaxfuse.report.site import site
from jaxfuse.runtime import platforms, private, versions
from jaxfuse.runtime.reasons import asks_nothing
from jaxfuse.runtime.settings import unwatched
from jaxfuse.tuning import policy as policies

P = ParamSpec("P")
R = TypeVar("R")
PARTIAL = "a sum over mesh axes is still to be taken of its values or of their gradients: no kernel can follow"
CIRCULAR = "what it needs is computed from what it gives by another fused site"
private.hide_frames("fuse", "jitted", "program.graph", "program.plan", "program.signature", "runtime.settings")


@unwatched
def plan(closed: ClosedJaxpr, unprofitable, outer: tuple[Graph, Node] | None = None) -> Plan:
    """Finds every site of the program, the bodies of its loops and branches included; `outer` as in `Graph`."""
    versions.warn_if_newer()
    graph = Graph(closed, outer)
    if not graph.is_symbolic:
        return _plan(closed, graph, unprofitable)
    try:
        return _plan(closed, graph, symbolic.unprofitable(unprofitable))
    except Exception as error:
        return Plan(closed, graph, {}, found=[Refusal("program", graph.nodes[0], (), symbolic.cannot_be_told(error))])


def _plan(closed: ClosedJaxpr, graph: Graph, unprofitable) -> Plan:
    planner = _Planner(graph, unprofitable)
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

    def __init__(self, graph: Graph, unprofitable):
        self.graph, self.unprofitable = graph, unprofitable
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
                for result in self._results(pattern, anchor) if anchor.index not in self.claimed else ():
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
        results = pattern.match(self.graph, anchor, self.claimed, self.unprofitable)

        def following():
            with anchor.eqn.ctx.manager:
                return next(results, None)

        try:
            yield from iter(following, None)
        except Exception as error:
            name = pattern.__name__.removeprefix(f"{patterns.__name__}.").removesuffix(".forward")
            reason = symbolic.cannot_be_told(error) if self.graph.is_symbolic else ""
            yield Refusal(name, anchor, (), reason or versions.unread(f"what follows {anchor}", error))

    def _accept(self, match: Match) -> None:
        fused_away = accept(self.graph, match)
        self.claimed |= fused_away
        self._replace(match.emissions)
        self.owners = dict.fromkeys((*fused_away, *(node.index for node in match.nodes)), match.emissions[0]) | self.owners

    def _replace(self, emissions: Iterable[Emission]) -> None:
        self.replacements |= {value: emission for emission in emissions for value in emission.defines}

    def enter_bodies(self) -> None:
        joined = self._joined()
        for node in self.graph.nodes:
            bodies = {} if node.index in self.graph.marks.fused_away else subprograms(node)
            emissions: Sequence[Emission] = ()
            rows, plans = [], list[Plan]()
            if node.index in joined:
                emissions, plans = joined[node.index]
                rows = _rows(plans)
            elif bodies:
                emissions, rows, plans = self._enter(node, bodies)
            elif node.primitive in CUSTOM_DERIVATIVE_CALLS:
                reason = f"it is inside a {node.primitive}: a function with rules of its own stays as it is"
                plans = [plan(_closed(body), self.unprofitable) for body in programs(node).values()]
                rows = _refused(reason, _rows(plans))
            self._replace(emissions)
            self.rows += [_Row(row, node.index) for row in rows]
            self.inner |= {node.index: plans} if rows or bodies or node.index in joined else {}

    def _joined(self) -> dict[int, tuple[Sequence[Emission], list[Plan]]]:
        """What `scan_pairs.joined` gives for the scans whose backward scan is in this program too; the backward scan's own is empty."""
        graph, taken = self.graph, self.claimed | self.graph.marks.fused_away
        results: dict[int, tuple[Sequence[Emission], list[Plan]]] = {}
        for first, second in scan_pairs.pairs(graph, autodiff.backward(graph), lambda node: node.index not in taken):
            result = scan_pairs.joined(graph, first, second, lambda closed: plan(closed, self.unprofitable))
            if result:
                results |= {first.node.index: (result[0], [result[1]]), second.node.index: ((), [])}
        return results

    def _enter(self, node: Node, bodies: dict) -> tuple[Sequence[Emission], list, list[Plan]]:
        """The same control-flow node over rewritten bodies, if anything in them is rewritten; its rows; the bodies' plans."""
        plans: list[Plan] = []

        def rewritten(body):
            if isinstance(body, tuple):
                return tuple(map(rewritten, body))
            known = scan_pairs.Loop(node).body_with_numbers() if node.primitive == "scan" else _closed(body)
            inner = plan(known, self.unprofitable, (self.graph, node))
            plans.append(inner)
            if not inner.replacements:
                return body

            def run(*arrays):
                return inner(list(arrays))

            # the rules of loops and branches know of no constants: a jit keeps them
            return retraced(body, jax.jit(run) if inner.graph.constant_arrays else run)

        try:
            params = inside(node, lambda: {name: rewritten(body) for name, body in bodies.items()})
        except (TypeError, ValueError) as error:  # JAX finds the rewritten body unfit where the user's own was not
            return (), _refused(f"the body of {node} cannot be rewritten: {error}".splitlines()[0], _rows(plans)), plans
        if all(params[name] is body for name, body in bodies.items()):
            return (), _rows(plans), plans
        changed = Node(private.with_params(node.eqn, params), node.index, [], node.name_stack)

        def run(read):
            return zip(node.outputs, changed.replay([read(v) for v in node.inputs]))

        return [Emission(tuple(node.inputs), tuple(node.outputs), run)], _rows(plans), plans

    def take_back_circles(self) -> None:
        """Gives up the last of matches that wait for each other, and those that need what only this one makes: what a forward op saves
        for its gradient."""
        while self.replacements and (waiting := circular(self.graph, self.replacements)):
            matches = [row for row, _ in self.rows if isinstance(row, Match)]
            last = next(match for match in reversed(matches) if set(match.emissions) & set(waiting))
            saved = {v for emission in last.emissions for v in emission.defines if v.producer is None}
            given_up = [match for match in matches if match is last or
                        any(v in saved for emission in match.emissions for v in emission.needs)]
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


def _rows(plans: list[Plan]) -> list:
    return [row for inner in plans for row in inner.found]


def _refused(reason: str, found: list) -> list:
    """The sites, of which none is rewritten, for this reason unless they have another."""
    return [Refusal(s.pattern, s.anchor, s.operands, reason, s.direction) if isinstance(s, Match) else s
            for s in found if not isinstance(s, UnfusedStep)]


def _closed(body) -> ClosedJaxpr:
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())


@overload
def fuse(fn: Callable[P, R], /, *, policy: str = ..., strict: bool = ..., **options: Any) -> Fused[P, R]: ...
@overload
def fuse(*, policy: str = ..., strict: bool = ..., **options: Any) -> Callable[[Callable[P, R]], Fused[P, R]]: ...
def fuse(fn=None, /, *, policy="measured", strict=False, **options):
    """`jax.jit(fn)` with its convolutions, dense layers and norms, and what follows each, replaced by fused operations.

    Args:
      fn: a JAX function: a network, a loss, a train step; jitted (`jax.jit`, `flax.nnx.jit`) or not. Without it a decorator
        with these options is returned. Takes and returns any pytrees, and Flax nnx's modules, optimizers, metrics and rngs,
        which are carried in and out as by `nnx.jit`.
      policy: "measured" rewrites where the fused kernel was measured faster, "always" every correct match, "never" none.
      strict: raise `FusionError`, with a line for each, if a site stays unfused that a kernel could have taken. What is
        recognised and has no kernel yet does not count.
      options: keyword arguments of `jax.jit`: `static_argnames`, `donate_argnums`, `in_shardings`, … They add to those that
        fn was jitted with.

    Returns: a function of the same signature, with what `jax.jit` gives: `lower`, `trace`, `eval_shape`, `clear_cache`. It can
    be jitted, differentiated in both modes, vmapped and scanned like `fn`. Derivatives taken of it use the fused backward
    kernels. Strings, bytes, functions and types among the arguments are part of the signature wherever they stand.

    Raises: ValueError for an unknown policy and what `jax.jit` raises, TypeError if fn is not callable (here); FusionError if
    strict, and what `jax.jit` raises for arguments that are no arrays and for functions that look at values (when called).
    """
    unprofitable = policies.unprofitable(policy)
    again = functools.partial(fuse, policy=policy, strict=strict, **options)
    if fn is None:
        return again
    if isinstance(fn, Fused):
        fn, options = fn.__wrapped__, fn.options | options
    return Fused(fn, functools.partial(_run, unprofitable, strict), again, options)


def inline(fn: Callable[P, R], *, policy: str = "measured") -> Callable[P, R]:
    """As `fuse(fn)`, but traced anew at every call and compiled with the caller: for a layer of a larger program.

    Within a function that is itself being fused, fn as it is: the whole is fused. So where fn cannot be traced.
    """
    unprofitable = policies.unprofitable(policy)

    @functools.wraps(fn)
    def call(*args, **kwargs):
        if is_part_of_a_program():
            return fn(*args, **kwargs)
        try:
            traced = trace(fn, args, kwargs)
        except Exception as failure:  # fn itself says what is wrong
            if log.is_logged():
                log.log(_untraceable(failure))
            return fn(*args, **kwargs)
        return _rewritten(traced, unprofitable, False)

    return call


def explain(fn: Callable, *args, policy: str = "measured", platform: str | None = None, measure: bool = False, **kwargs) -> FusionReport:
    """The sites that `fuse(fn, policy=policy)` finds for these arguments; unless they are measured nothing is compiled or run.

    Args:
      fn: any function that `fuse` takes.
      args, kwargs: its arguments. They may be `jax.ShapeDtypeStruct`s.
      policy: as of `fuse`.
      platform: "cpu", "cuda", "rocm" or "tpu", whether or not this machine has it; by default that of the arguments, or of JAX's
        default device.
      measure: time every site alone, fused and unfused: its own program is compiled and run on random inputs of its shapes. In
        the whole program XLA may fuse its neighbours too. A site that cannot run alone says why. Takes about a second for each
        kind of site.

    Returns: a `FusionReport`: print it, or `save` it as a page.

    Raises: ValueError for an unknown policy or platform.
    """
    unprofitable = policies.unprofitable(policy)
    if platform is not None:
        one_of(platform, platforms.NAMES, "platform")
    with platforms.assumed(platform or platforms.committed((args, kwargs))):
        for concrete in (False, True):
            try:
                closed = trace(fn, args, kwargs, concrete).closed
            except Exception as error:
                failure = error
            else:
                return build.whole(plan(closed, unprofitable), getattr(fn, "__qualname__", type(fn).__name__), policy, measure)
        return _untraceable(failure)


def _run(unprofitable, strict: bool, fn, args, kwargs):
    """Under `jax.jit`: traces fn, plans, and computes the rewritten program."""
    return _rewritten(trace(fn, args, kwargs), unprofitable, strict)


def _rewritten(traced: Traced, unprofitable, strict: bool):
    program = plan(traced.closed, unprofitable)
    if log.is_logged():
        log.log(build.rows(program))
    unfused = [site(found) for found in program.found if type(found) is Refusal and not asks_nothing(found.reason)]
    if strict and unfused:
        raise FusionError(f"{len(unfused)} sites stay unfused\n" + "\n".join(map(str, unfused)))
    return jax.tree.unflatten(traced.out_tree, program(traced.leaves))


def _untraceable(failure: Exception) -> FusionReport:
    words = f"the function cannot be traced for these arguments: {type(failure).__name__}: {failure}".splitlines()[0]
    return build.untraceable(words, raising_line(failure))
