"""What `fuse` returns: the rewritten function under `jax.jit`, with everything that a jitted function has."""

import enum
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.program import stateful
from jaxfuse.program.signature import Constant, is_part_of_a_program, without_constants
from jaxfuse.runtime import platforms, private

P = ParamSpec("P")
R = TypeVar("R")

# Leaves of arguments that may be part of the signature: they cannot change, and equal ones do the same. `jax.jit` takes none
# of these as arguments, so no program of its own means anything else by them.
CONSTANT = (str, bytes, enum.Enum, type, type(jnp.float32), np.dtype, types.FunctionType, types.BuiltinFunctionType, np.ufunc,
            jnp.ufunc, private.JITTED, jax.custom_jvp, jax.custom_vjp)


class Stateful(Exception):
    """Flax nnx's objects are among the arguments, which `jax.jit` does not write back."""


class Fused(Generic[P, R]):
    """A fused function. Called, lowered and traced as what `jax.jit` returns; `__wrapped__` is the function itself."""

    __wrapped__: Callable[P, R]

    def __init__(self, fn: Callable[P, R], rewritten, remade, options: dict, selection: Any):
        """`rewritten(fn, args, kwargs)` computes fn's rewritten program; `remade(fn)` makes an equal `Fused`, for pickle;
        `selection` is what `fuse` was told to leave out, for `explain`."""
        jax.jit(fn, **options)  # raises what it raises
        functools.update_wrapper(self, fn, updated=("__dict__",) if isinstance(fn, types.FunctionType) else ())
        self._rewritten, self._remade, self.options, self.selection = rewritten, remade, options, selection
        self._has_constants = False
        self._lock = threading.RLock()  # of these two
        is_nnx_jit = stateful.is_nnx_jit(fn)
        self._jitted: Any = self._of_nnx() if is_nnx_jit else _jitted(rewritten, fn, options)
        self._part = fn if is_nnx_jit else _jitted(_plainly, fn, options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_part_of_a_program():
            has_constants = any(isinstance(leaf, CONSTANT) for leaf in jax.tree.leaves((args, kwargs)))
            inner = private.unjitted(self.__wrapped__) if has_constants or stateful.holds_state((args, kwargs)) else self._part
            return inner(*args, **kwargs)
        if self._has_constants or (platform := platforms.committed((args, kwargs))) and platform != platforms.current():
            return self._through("__call__", args, kwargs)
        tried = self._jitted
        try:
            return tried(*args, **kwargs)
        except (Stateful, TypeError):
            if not self._adapted((tried, False), args, kwargs):
                raise
        return self._through("__call__", args, kwargs)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As `jax.jit(fn).lower`."""
        return self._through("lower", args, kwargs)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As `jax.jit(fn).trace`."""
        return self._through("trace", args, kwargs)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As `jax.jit(fn).eval_shape`."""
        return self._through("eval_shape", args, kwargs)

    def clear_cache(self) -> None:
        """Forgets every program that was traced and compiled."""
        getattr(self._jitted, "jitted_fn", self._jitted).clear_cache()

    def _cache_size(self) -> int:
        return getattr(self._jitted, "jitted_fn", self._jitted)._cache_size()

    def __reduce__(self):
        """By name, as a function is, if it stands in its module in the place of what it wraps; else the function and options."""
        module = sys.modules.get(self.__module__) if self.__module__ != "__main__" else None
        name = getattr(self, "__qualname__", "")
        if getattr(module, name, None) is self:
            return name
        return self._remade, (self.__wrapped__,)

    def __repr__(self):
        return f"<jaxfuse.fuse of {self.__wrapped__!r}>"

    def _through(self, method: str, args, kwargs):
        with platforms.assumed(platforms.committed((args, kwargs))):
            with self._lock:
                jitted, has_constants = tried = self._jitted, self._has_constants
            given = jax.tree.map(_wrapped, (args, kwargs), is_leaf=stateful.is_state) if has_constants else (args, kwargs)
            try:
                return getattr(jitted, method)(*given[0], **given[1])
            except (Stateful, TypeError):
                if not self._adapted(tried, args, kwargs):
                    raise
            return self._through(method, args, kwargs)

    def _adapted(self, tried: tuple, args, kwargs) -> bool:
        """Makes ready for what has failed under `jax.jit`; so may another thread have, since this one `tried`.

        False: it should not have been passed, or fn has failed.
        """
        with self._lock:
            if tried != (self._jitted, self._has_constants):
                return True
            if not stateful.is_nnx_jit(self._jitted) and stateful.holds_state((args, kwargs)):
                self._jitted = self._of_nnx()
                return True
            found = not self._has_constants and any(isinstance(leaf, CONSTANT) for leaf in jax.tree.leaves((args, kwargs)))
            self._has_constants = self._has_constants or found
            return found

    def _of_nnx(self):
        return stateful.carried(self.__wrapped__, self.options, functools.partial(_jitted, self._rewritten, is_pure=True))


def _jitted(rewritten, fn, options: dict, is_pure: bool = False):
    """`jax.jit` of fn's rewritten program, with what fn's own jit was told. `is_pure`: no state can be in the arguments."""
    plain = private.unjitted(fn)  # its jit's options are this one's
    return jax.jit(_run_of(plain, rewritten, is_pure), **private.jit_options(fn) | options)


_runs: weakref.WeakKeyDictionary[Callable, dict] = weakref.WeakKeyDictionary()
_runs_lock = threading.Lock()


def _run_of(plain, rewritten, is_pure: bool):
    """What is given to `jax.jit`: the same for the same function, so that two `fuse(f)` share programs as two `jax.jit(f)` do."""
    if type(plain) is not types.FunctionType:
        return functools.update_wrapper(_run(lambda: plain, rewritten, is_pure), plain, updated=())
    key = getattr(rewritten, "func", rewritten), getattr(rewritten, "args", ()), is_pure
    with _runs_lock:
        runs = _runs.setdefault(plain, {})
        if key not in runs:
            # It must not keep `plain`, which keeps it. Who calls it does.
            runs[key] = functools.update_wrapper(_run(weakref.ref(plain), rewritten, is_pure), plain, updated=())
            runs[key].__signature__ = inspect.signature(plain)
            del runs[key].__wrapped__
        return runs[key]


def _run(plain: Callable[[], Any], rewritten, is_pure: bool):
    def run(*args, **kwargs):
        fn = plain()
        if is_part_of_a_program() or _is_looked_into():
            args, kwargs = without_constants((args, kwargs))
            return fn(*args, **kwargs)
        if not is_pure and stateful.holds_state((args, kwargs)):
            raise Stateful
        return rewritten(fn, args, kwargs)

    return run


def _plainly(fn, args, kwargs):
    return fn(*args, **kwargs)


def _is_looked_into() -> bool:
    """Whether JAX runs what was jitted line by line: the user looks for a place in their own code."""
    config: Any = jax.config
    if not (config.jax_debug_nans or config.jax_debug_infs):
        return config.jax_disable_jit
    return not private.is_traced()


def _wrapped(leaf):
    return Constant(leaf) if isinstance(leaf, CONSTANT) else leaf
