"""fuse(fn): trace → graph → match → rewrite. docs/architecture.md says in which folder each of these steps is."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, overload

import jax
from jax.extend.core import jaxpr_as_fun

from jaxfuse import patterns as known_patterns
from jaxfuse.jitted import Fused
from jaxfuse.ops.errors import check_callable, one_of
from jaxfuse.planner import plan
from jaxfuse.program.remedies import remedy
from jaxfuse.program.signature import Traced, is_part_of_a_program, trace
from jaxfuse.program.site import Refusal
from jaxfuse.program.source import raising_line
from jaxfuse.report import FusionError, FusionReport, build, log
from jaxfuse.report.counters import count
from jaxfuse.report.site import Site, site
from jaxfuse.runtime import platforms, private, versions
from jaxfuse.runtime.near import meant
from jaxfuse.runtime.reasons import asks_nothing
from jaxfuse.selection import ALL, Decider, Selection
from jaxfuse.tuning import policy as policies

P = ParamSpec("P")
R = TypeVar("R")
LET_PASS = 'what to do: policy="always" fuses where no gain is expected too; skip=["file:line"] lets a site pass, strict=False all of ' \
    "them; print(jaxfuse.explain(fn, *args)) shows the whole program"
private.hide_frames("fuse", "jitted", "planner", "program.bodies", "program.equations", "program.graph", "program.plan",
                    "program.signature", "runtime.settings")


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
      patterns: the only patterns to fuse, None for all: "attention", "batch_norm", "conv", "dense", "global_average_pool", "max_pool",
        "norm", "recurrent". "exported" and "optimizer" have rows in reports and no kernels.
      skip: what is not fused, nor missed by `strict`: patterns, `file:line`s, names of sites such as "conv+bias+relu", `Site`s of a
        report or their `place`s.
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
    check_callable(fn, "fuse", "a function", "write fuse(fn)(*args), not fuse(fn(*args))")
    if isinstance(fn, Fused):
        fn, options = fn.__wrapped__, fn.options | options
    try:
        return Fused(fn, functools.partial(_run, unprofitable, selection, strict), again, options, selection)
    except TypeError as error:  # of jax.jit, which does not know an option
        known = [*_options(fuse), *_options(jax.jit)]
        for name in options:
            if name not in known and (near := meant(name, known)):
                error.add_note(f"jaxfuse.fuse: {name}{near}")
        raise


def inline(fn: Callable[P, R], *, policy: str = "measured", inference: bool = False) -> Callable[P, R]:
    """As `fuse(fn)`, but traced anew at every call and compiled with the caller: for a layer of a larger program.

    Within a function that is itself being fused, fn as it is: the whole is fused. So where fn cannot be traced. In `inference` no
    gradient follows.
    """
    decider = functools.partial(Decider, policies.unprofitable(policy, inference))

    @functools.partial(functools.update_wrapper, wrapped=fn, updated=())
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

    Raises: ValueError for an unknown policy or platform, TypeError if fn is not callable.
    """
    check_callable(fn, "explain", "a function", "write explain(fn, *args), not explain(fn(*args))")
    unprofitable = policies.unprofitable(policy, inference=getattr(fn, "is_inference", False))
    decider = Decider(unprofitable, fn.selection if isinstance(fn, Fused) else ALL)
    if platform is not None:
        one_of(platform, platforms.NAMES, "platform", aliases={"gpu": "cuda"})
    with platforms.assumed(platform or platforms.committed((args, kwargs))):
        for concrete in (False, True):
            try:
                closed = trace(getattr(fn, "in_floats", fn), args, kwargs, concrete).closed
            except Exception as error:
                failure = error
                continue
            try:
                program = plan(closed, decider)
            except Exception as error:
                return build.untraceable(versions.unread("this program", error), "")
            decider.selection.warn_of_strangers(program.found)
            report = build.whole(program, _name(fn), policy, measure)
            packed = getattr(fn, "packed_layers", None)
            return build.with_packed(report, packed(*args, **kwargs)) if packed else report
        return _untraceable(failure, kwargs)


def _run(unprofitable, selection: Selection, strict: bool, fn, args, kwargs):
    """Under `jax.jit`: traces fn, plans, and computes the rewritten program."""
    traced = trace(fn, args, kwargs, is_traced=lambda leaf: isinstance(leaf, jax.core.Tracer))  # the others are static
    return _rewritten(traced, Decider(unprofitable, selection), strict)


def _rewritten(traced: Traced, decider: Decider, strict: bool):
    try:
        program = plan(traced.closed, decider)
    except Exception as error:
        reason = versions.unread("this program", error)
        if strict:
            raise FusionError(reason) from error
        return jax.tree.unflatten(traced.out_tree, jaxpr_as_fun(traced.closed)(*traced.leaves))
    decider.tell()
    count(program)
    decider.selection.warn_of_strangers(program.found)
    if log.is_logged():
        log.log(build.rows(program))
    unfused = [site(found) for found in program.found if type(found) is Refusal and not asks_nothing(found.reason)]
    if strict and unfused:
        raise FusionError("\n".join([f"{len(unfused)} sites stay unfused", *map(str, unfused), LET_PASS]))
    return jax.tree.unflatten(traced.out_tree, program(traced.leaves))


def _name(fn: Callable) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__).rpartition("<locals>.")[2]


def _options(function: Callable) -> list[str]:
    """Its arguments that are given by name alone."""
    return [name for name, each in inspect.signature(function).parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY]


def _untraceable(failure: Exception, given: Iterable[str] = ()) -> FusionReport:
    """The report that says so, and which option of `explain` was meant by a `given` name that fn does not know."""
    words = f"the function cannot be traced for these arguments: {type(failure).__name__}: {failure}".splitlines()[0]
    words += "".join(meant(name, _options(explain)) for name in given if f"unexpected keyword argument {name!r}" in words)
    return build.untraceable("; ".join(filter(None, [words, remedy(failure)])), raising_line(failure))
