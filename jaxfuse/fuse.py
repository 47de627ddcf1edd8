"""fuse(fn): trace → graph → match → rewrite. docs/architecture.md says in which folder each of these steps is."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, overload

import jax
from jax.extend.core import ClosedJaxpr

from jaxfuse import patterns as known_patterns
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
from jaxfuse.report.counters import count
from jaxfuse.report.site import Site, site
from jaxfuse.runtime import platforms, private, versions
from jaxfuse.runtime.reasons import LeftOut, asks_nothing
from jaxfuse.runtime.settings import unwatched
from jaxfuse.selection import ALL, Decider, Selection
from jaxfuse.tuning import policy as policies

P = ParamSpec("P")
R = TypeVar("R")
PARTIAL = "a sum over mesh axes is still to be taken of its values or of their gradients: no kernel can follow"
CIRCULAR = "what it needs is computed from what it gives by another fused site"
private.hide_frames("fuse", "jitted", "program.graph", "program.plan", "program.signature", "runtime.settings")


@unwatched
def plan(closed: ClosedJaxpr, decider: Decider, outer: tuple[Graph, Node] | None = None) -> Plan:
    """Finds every site of the program, the bodies of its loops and branches included; `outer` as in `Graph`."""
    versions.warn_if_newer()
    graph = Graph(closed, outer)
    if not graph.is_symbolic:
        return _plan(closed, graph, decider)
    try:
        return _plan(closed, graph, decider.of_symbolic_shapes())
    except Exception as error:
        return Plan(closed, graph, {}, found=[Refusal("program", graph.nodes[0], (), symbolic.cannot_be_told(error))])


def _plan(closed: ClosedJaxpr, graph: Graph, decider: Decider) -> Plan:
    replacements: dict[Value, Emission] = {}
    owners: dict[int, Emission] = {}
    partial = [node for node in graph.nodes if any(value.is_partial for value in (*node.inputs, *node.outputs))]
    found: list = [Refusal("program", partial[0], (), PARTIAL)] if partial else []
    claimed, covered = {node.index for node in partial}, set[int]()
    for pattern in known_patterns.ORDER:
        for anchor in pattern.anchors(graph):
            if anchor.index in claimed:
                continue
            for result in _matches(pattern, graph, anchor, claimed, decider.unprofitable):
                if isinstance(result, Match) and (reason := _left_out(decider, pattern, result, graph, replacements)):
                    result = Refusal(result.pattern, result.anchor, result.operands, reason, result.direction)
                if type(result) is Refusal and result.anchor.index in covered:
                    continue
                found.append(result)
                claimed |= {node.index for node in result.nodes}
                covered |= {node.index for node in result.covers} if isinstance(result, Refusal) else set()
                if isinstance(result, Match):
                    gone = accept(graph, result)
                    claimed |= gone
                    replacements |= {value: emission for emission in result.emissions for value in emission.defines}
                    owners = dict.fromkeys((*gone, *(node.index for node in result.nodes)), result.emissions[0]) | owners
    joined = _joined(graph, claimed, decider)
    at: dict[int, int] = {}
    plans: dict[int, list[Plan]] = {}
    for node in graph.nodes:
        bodies = {} if node.index in graph.fused_away else subprograms(node)
        inner: list = []
        if node.index in joined:
            emissions, plans[node.index] = joined[node.index]
            inner = _rows(plans[node.index])
            replacements |= {value: emission for emission in emissions for value in emission.defines}
        elif bodies:
            emission, inner, plans[node.index] = _enter(graph, node, bodies, decider)
            if emission:
                replacements |= dict.fromkeys(node.outputs, emission)
        elif node.primitive in CUSTOM_DERIVATIVE_CALLS:
            reason = f"it is inside a {node.primitive}: a function with rules of its own stays as it is"
            bodies_plans = [plan(_closed(body), decider) for body in programs(node).values()]
            inner = _refused(reason, _rows(bodies_plans))
            plans |= {node.index: bodies_plans} if inner else {}
        found += inner
        at |= {id(row): node.index for row in inner}
    while replacements and (waiting := circular(graph, replacements)):
        match = next(result for result in reversed(found) if isinstance(result, Match) and set(result.emissions) & set(waiting))
        for back in (match, *_fed_by(match, found)):
            replacements = {value: emission for value, emission in replacements.items() if emission not in back.emissions}
            found[found.index(back)] = given_up = Refusal(back.pattern, back.anchor, back.operands, CIRCULAR, back.direction)
            at |= {id(given_up): at[id(back)]} if id(back) in at else {}
    return Plan(closed, graph, replacements, _in_order(graph, found, at), plans, owners)


def _rows(plans: list[Plan]) -> list:
    return [row for inner in plans for row in inner.found]


def _in_order(graph: Graph, found: list, at: dict[int, int]) -> list:
    """The rows in program order, a backward row after its forward row; those of a loop's body where the loop is: `at` has
    the index of its node by their ids. What autodiff made is backward, whatever pattern found it."""
    backward = autodiff.backward(graph)

    def place(row) -> tuple[int, bool]:
        if id(row) in at:
            return at[id(row)], False
        return min([row.anchor.index, *(node.index for node in row.nodes)]), row.direction == "backward"

    def directed(row):
        is_backward = id(row) not in at and row.anchor.index in backward
        return dataclasses.replace(row, direction="backward") if is_backward else row

    return [directed(row) for row in sorted(found, key=place)]


def _matches(pattern, graph: Graph, anchor: Node, claimed: set[int], unprofitable):
    """What the pattern finds at the anchor, under its mesh. A program that it cannot read must not fail for that."""
    results = pattern.match(graph, anchor, claimed, unprofitable)

    def following():
        with anchor.eqn.ctx.manager:
            return next(results, None)

    try:
        yield from iter(following, None)
    except Exception as error:
        reason = symbolic.cannot_be_told(error) if graph.is_symbolic else ""
        yield Refusal(known_patterns.name_of(pattern), anchor, (), reason or versions.unread(f"what follows {anchor}", error))


def _left_out(decider: Decider, pattern, match: Match, graph: Graph, replacements: dict[Value, Emission]) -> str:
    """Why the match is not made though a kernel takes it: the user says so, of it or of what makes the values that it needs; or ""."""
    given = {*graph.inputs, *graph.constants}
    for need in (need for emission in match.emissions for need in emission.needs):
        if need.producer is None and need.literal is None and need not in given and need not in replacements:
            return LeftOut("the forward op that would save what it needs is left out")
    return decider.left_out(known_patterns.name_of(pattern), match) or ""


def _fed_by(match: Match, found: list) -> list[Match]:
    """The matches that need what only this one makes: what a forward op saves for its gradient."""
    saved = {v for emission in match.emissions for v in emission.defines if v.producer is None}
    others = (result for result in found if isinstance(result, Match) and result is not match)
    return [other for other in others if any(v in saved for emission in other.emissions for v in emission.needs)]


def _joined(graph: Graph, claimed: set[int], decider: Decider) -> dict[int, tuple]:
    """What `scan_pairs.joined` gives for the scans whose backward scan is in this program too; the backward scan's own is empty."""
    results: dict[int, tuple] = {}
    for first, second in scan_pairs.pairs(graph, autodiff.backward(graph), lambda node: node.index not in claimed | graph.fused_away):
        result = scan_pairs.joined(graph, first, second, lambda closed: plan(closed, decider))
        if result:
            results |= {first.node.index: (result[0], [result[1]]), second.node.index: ((), [])}
    return results


def _enter(graph: Graph, node: Node, bodies: dict, decider: Decider) -> tuple[Emission | None, list, list[Plan]]:
    """The same control-flow node over rewritten bodies, None where nothing in them is rewritten; its rows; the bodies' plans."""
    plans: list[Plan] = []

    def rewritten(body):
        if isinstance(body, tuple):
            return tuple(map(rewritten, body))
        known = scan_pairs.Loop(node).body_with_numbers() if node.primitive == "scan" else _closed(body)
        inner = plan(known, decider, (graph, node))
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
        return None, _refused(f"the body of {node} cannot be rewritten: {error}".splitlines()[0], _rows(plans)), plans
    if all(params[name] is body for name, body in bodies.items()):
        return None, _rows(plans), plans
    changed = Node(private.with_params(node.eqn, params), node.index, [], node.name_stack)

    def run(read):
        return zip(node.outputs, changed.replay([read(v) for v in node.inputs]))

    return Emission(tuple(node.inputs), tuple(node.outputs), run), _rows(plans), plans


def _refused(reason: str, found: list) -> list:
    """The sites, of which none is rewritten, for this reason unless they have another."""
    return [Refusal(s.pattern, s.anchor, s.operands, reason, s.direction) if isinstance(s, Match) else s
            for s in found if not isinstance(s, UnfusedStep)]


def _closed(body) -> ClosedJaxpr:
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())


@overload
def fuse(fn: Callable[P, R], /, *, policy: str = ..., strict: bool = ..., patterns: Iterable[str] | None = ...,
         skip: Iterable[str | Site] = ..., limit: int | None = ..., **options: Any) -> Fused[P, R]: ...
@overload
def fuse(*, policy: str = ..., strict: bool = ..., patterns: Iterable[str] | None = ..., skip: Iterable[str | Site] = ...,
         limit: int | None = ..., **options: Any) -> Callable[[Callable[P, R]], Fused[P, R]]: ...
def fuse(fn=None, /, *, policy="measured", strict=False, patterns=None, skip=(), limit=None, **options):
    """`jax.jit(fn)` with its convolutions, dense layers and norms, and what follows each, replaced by fused operations.

    Args:
      fn: a JAX function: a network, a loss, a train step; jitted (`jax.jit`, `flax.nnx.jit`) or not. Without it a decorator
        with these options is returned. Takes and returns any pytrees, and Flax nnx's modules, optimizers, metrics and rngs,
        which are carried in and out as by `nnx.jit`.
      policy: "measured" rewrites where the fused kernel was measured faster, "always" every correct match, "never" none.
      strict: raise `FusionError`, with a line for each, if a site stays unfused that a kernel could have taken. What is
        recognised and has no kernel yet does not count.
      patterns: the only patterns to fuse, None for all: "attention", "batch_norm", "conv", "dense", "max_pool", "norm", "recurrent".
      skip: what is not fused: patterns, "file:line"s, names of sites such as "conv+bias+relu", `Site`s of a report.
      limit: how many sites are fused, in the order in which they are found.
      options: keyword arguments of `jax.jit`: `static_argnames`, `donate_argnums`, `in_shardings`, … They add to those that
        fn was jitted with.

    Returns: a function of the same signature, with what `jax.jit` gives: `lower`, `trace`, `eval_shape`, `clear_cache`. It can
    be jitted, differentiated in both modes, vmapped and scanned like `fn`. Derivatives taken of it use the fused backward
    kernels. Strings, bytes, functions and types among the arguments are part of the signature wherever they stand.

    Raises: ValueError for an unknown policy or pattern and what `jax.jit` raises, TypeError if fn is not callable (here); FusionError if
    strict, and what `jax.jit` raises for arguments that are no arrays and for functions that look at values (when called).
    """
    unprofitable, selection = policies.unprofitable(policy), Selection.of(known_patterns.NAMES, patterns, skip, limit)
    again = functools.partial(fuse, policy=policy, strict=strict, patterns=patterns, skip=skip, limit=limit, **options)
    if fn is None:
        return again
    if isinstance(fn, Fused):
        fn, options = fn.__wrapped__, fn.options | options
    return Fused(fn, functools.partial(_run, unprofitable, selection, strict), again, options, selection)


def inline(fn: Callable[P, R], *, policy: str = "measured") -> Callable[P, R]:
    """As `fuse(fn)`, but traced anew at every call and compiled with the caller: for a layer of a larger program.

    Within a function that is itself being fused, fn as it is: the whole is fused. So where fn cannot be traced.
    """
    decider = functools.partial(Decider, policies.unprofitable(policy))

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
        return _rewritten(traced, decider(), False)

    return call


def explain(fn: Callable, *args, policy: str = "measured", platform: str | None = None, measure: bool = False, **kwargs) -> FusionReport:
    """The sites that `fuse(fn, policy=policy)` finds for these arguments; unless they are measured nothing is compiled or run.

    Args:
      fn: any function that `fuse` takes. Of what `fuse` returned, its `patterns`, `skip` and `limit` hold here too.
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
    decider = Decider(policies.unprofitable(policy), fn.selection if isinstance(fn, Fused) else ALL)
    if platform is not None:
        one_of(platform, platforms.NAMES, "platform")
    with platforms.assumed(platform or platforms.committed((args, kwargs))):
        for concrete in (False, True):
            try:
                closed = trace(fn, args, kwargs, concrete).closed
            except Exception as error:
                failure = error
            else:
                return build.whole(plan(closed, decider), getattr(fn, "__qualname__", type(fn).__name__), policy, measure)
        return _untraceable(failure)


def _run(unprofitable, selection: Selection, strict: bool, fn, args, kwargs):
    """Under `jax.jit`: traces fn, plans, and computes the rewritten program."""
    return _rewritten(trace(fn, args, kwargs), Decider(unprofitable, selection), strict)


def _rewritten(traced: Traced, decider: Decider, strict: bool):
    program = plan(traced.closed, decider)
    count(program)
    if log.is_logged():
        log.log(build.rows(program))
    unfused = [site(found) for found in program.found if type(found) is Refusal and not asks_nothing(found.reason)]
    if strict and unfused:
        raise FusionError(f"{len(unfused)} sites stay unfused\n" + "\n".join(map(str, unfused)))
    return jax.tree.unflatten(traced.out_tree, program(traced.leaves))


def _untraceable(failure: Exception) -> FusionReport:
    words = f"the function cannot be traced for these arguments: {type(failure).__name__}: {failure}".splitlines()[0]
    return build.untraceable(words, raising_line(failure))
