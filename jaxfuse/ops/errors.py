"""Errors of ops called with arguments that do not fit: they name op, argument, what came, what was expected, what to do."""

import dataclasses
import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import NoReturn, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.runtime.near import meant, nearest

Array = jax.Array | np.ndarray  # what the ops take
P = ParamSpec("P")
R = TypeVar("R")


class OpError(ValueError):
    """An op was called with shapes, dtypes or options that do not fit. Raised at trace time."""


def checked_names(op: Callable[P, R]) -> Callable[P, R]:
    """`op`; an argument of a name that it does not have is a TypeError that says which was meant."""
    known = inspect.signature(op).parameters.keys()

    @functools.wraps(op)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - known:
            remedy = meant(name, known) or f"; it has {', '.join(known)}"
            raise TypeError(f"jaxfuse.ops.{op.__name__}: there is no argument {name}{remedy}")
        return op(*args, **kwargs)

    return call


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The checks that the arguments of an op go through, by the op's name. Every method raises OpError."""

    op: str

    def check(self, condition, argument: str, came, expected: str, remedy: str) -> None:
        if not condition:
            self.fail(argument, came, expected, remedy)

    def fail(self, argument: str, came, expected: str, remedy: str) -> NoReturn:
        raise OpError(f"jaxfuse.ops.{self.op}: {argument} is {came}, expected {expected}; {remedy}")

    def floats(self, **arrays) -> None:
        """Each an array of floats."""
        for name, value in arrays.items():
            kind = type(value).__name__
            self.check(hasattr(value, "shape") and hasattr(value, "dtype"), name,
                       "None" if value is None else f"a {kind}", "an array", "convert it with jax.numpy.asarray")
            self.check(jnp.issubdtype(value.dtype, jnp.floating), name, str(value.dtype), "a float dtype", "cast it")

    def per_channel(self, channels: int, whose: str, **vectors) -> None:
        for name, value in vectors.items():
            self.check(value.shape == (channels,), name, f"of shape {value.shape}", f"({channels},), one for each {whose}",
                       "reshape it, or check the channel axis")

    def like(self, out, what: str, **arrays) -> None:
        """Each of `out`'s shape and dtype, which are those of `what`."""
        for name, value in arrays.items():
            self.check(value.shape == out.shape and value.dtype == out.dtype, name, f"{value.dtype}{list(value.shape)}",
                       f"{out.dtype}{list(out.shape)}, as {what} is", "broadcast or cast it")

    def recurrent(self, gates: int, x, w_x, w_h, bias) -> int:
        """The hidden size of a sequence of steps."""
        given = {} if bias is None else dict(bias=bias)
        self.floats(x=x, w_x=w_x, w_h=w_h, **given)
        self.check(x.ndim == 3 and x.shape[0] > 0, "x", f"of shape {x.shape}", "(length, batch, inputs), at least one step",
                   "add the missing axis")
        hidden = w_h.shape[0] if w_h.ndim else 0
        shapes = dict(w_x=(x.shape[-1], gates * hidden), w_h=(hidden, gates * hidden), bias=(gates * hidden,))
        for name, value in dict(w_x=w_x, w_h=w_h, **given).items():
            self.check(value.shape == shapes[name], name, f"of shape {value.shape}",
                       f"{shapes[name]} for {gates} gates of {hidden} hidden units", "check the order of its axes")
            self.check(value.dtype == x.dtype, name, str(value.dtype), f"{x.dtype}, as x is", "cast one of them")
        return hidden

    def number(self, argument: str, value, at_least: float = float("-inf")) -> float:
        number = _number(value)
        if number is None:
            self.fail(argument, repr(value), "a number known when tracing", "give a float")
        self.check(number >= at_least, argument, repr(value), f"{at_least:g} or more", "give a larger one")
        return number

    def positive_integers(self, argument: str, value, count: int) -> tuple[int, ...]:
        one = isinstance(value, numbers.Integral) and count > 1
        self.check(not one, argument, repr(value), f"{count} positive integers", f"write {(value,) * count}")
        fits = _is_sequence(value, count) and all(isinstance(v, numbers.Integral) and int(v) >= 1 for v in value)
        self.check(fits, argument, repr(value), f"{count} positive integers", "give one for each spatial dimension of x")
        return tuple(map(int, value))

    def pairs(self, argument: str, value, count: int) -> tuple[tuple[int, int], ...]:
        fits = _is_sequence(value, count) and all(
            _is_sequence(pair, 2) and all(isinstance(v, numbers.Integral) for v in pair) for pair in value)
        self.check(fits, argument, repr(value), f"{count} pairs of integers",
                   "give one (low, high) pair for each spatial dimension of x")
        return tuple((int(low), int(high)) for low, high in value)

    def one_of(self, argument: str, name, known, aliases: Mapping[str, str] | None = None) -> str:
        return one_of(name, known, argument, where=f"jaxfuse.ops.{self.op}: ", aliases=aliases)


def one_of(name, known, what: str, where: str = "", aliases: Mapping[str, str] | None = None) -> str:
    """`name` if it is known, else an OpError that suggests the nearest, upper case or lower; `aliases`: what others call them."""
    if isinstance(name, str) and name in known:
        return name
    meant = {each.lower(): each for each in known} | dict(aliases or {})
    near = nearest(getattr(name, "__name__", str(name)).lower(), meant)
    hint = f"did you mean {meant[near]!r}? " if near else "choose another "
    raise OpError(f"{where}unknown {what} {name!r}; {hint}(known: {', '.join(map(repr, known))})")


def check_callable(fn, op: str, expected: str, remedy: str) -> None:
    """Raises TypeError unless fn can be called: most often it is what a call gave."""
    if not callable(fn):
        raise TypeError(f"jaxfuse.{op}: fn is of type {type(fn).__name__}, expected {expected}; {remedy}")


def _number(value) -> float | None:
    try:
        return None if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return None


def _is_sequence(value, count: int) -> bool:
    return not isinstance(value, str) and hasattr(value, "__len__") and len(value) == count
