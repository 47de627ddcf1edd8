"""The settings of JAX that our own arithmetic runs under, whatever the user has chosen for theirs."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")

# setting -> what ours needs, and the context that sets it
Settings = dict[str, tuple[Any, Callable[[Any], Any]]]
_ARITHMETIC: Settings = {"jax_numpy_dtype_promotion": ("standard", jax.numpy_dtype_promotion),
               "jax_numpy_rank_promotion": ("allow", jax.numpy_rank_promotion),
               "jax_disable_jit": (False, jax.disable_jit)}
_WATCHES: Settings = {"jax_debug_nans": (False, jax.debug_nans), "jax_debug_infs": (False, jax.debug_infs)}


def ours(function: Callable[P, R]) -> Callable[P, R]:
    """`function` under JAX's defaults: dtypes and ranks are promoted, `jax.jit` compiles.

    For what we compute where the user is not looking: references, derivatives, lowering, matching.
    """
    return _under(_ARITHMETIC, function)


def unwatched(function: Callable[P, R]) -> Callable[P, R]:
    """As `ours`, and what it computes may be NaN or infinite: it is not the user's."""
    return _under(_ARITHMETIC | _WATCHES, function)


def _under(settings: Settings, function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with contextlib.ExitStack() as changed:
            for context in _others(settings):
                changed.enter_context(context)
            return function(*args, **kwargs)

    return run


def _others(settings: Settings) -> Iterator:
    """Contexts for those alone that are not as they should be: each would cost a microsecond in every call."""
    for name, (wanted, context) in settings.items():
        if getattr(jax.config, name) != wanted:
            yield context(wanted)
