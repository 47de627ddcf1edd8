"""Flax linen's layers, fused: `import jaxfuse.flax.linen as fnn`, then `fnn.Conv` where it said `nn.Conv`.

Each layer is a subclass of Flax's own and computes what that computes, through `jaxfuse.fuse`: constructor arguments,
parameters, collections, initialisers, RNG use, masks, dtypes and errors are Flax's, so that checkpoints load both ways.
Beyond that, most take `activation`, any function of one array, and, when called, `residual`, of the shape of the result:

    y = activation(layer(x) + residual)                       in one pass over memory, where a kernel can

Whatever no kernel takes runs as Flax's own layer would. Inside a function that is fused as a whole, and inside `fused` methods,
the layers are plain and the whole is fused: a network built of them is not cut into pieces.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
from flax.core import lift
from flax.errors import TransformedMethodReturnValueError
from flax.linen.transforms import lift_transform

from jaxfuse.fuse import inline
from jaxfuse.program.signature import is_part_of_a_program


def fused(method):
    """Decorates a method of a `flax.linen.Module`: what it computes, layers and all, is fused as one program.

    Variables, mutable collections, RNG streams and intercepted methods behave as under `flax.linen.remat`. While parameters are
    initialised, within a program that is fused as a whole, without variables, and where it returns a module, the method runs
    as it is.
    """
    through = lift_transform(_lifted, method)
    as_it_is = through.__wrapped__  # in Flax's wrapper, which sets the module up

    @functools.wraps(through)
    def call(self, *args, **kwargs):
        if self.scope is None or self.is_initializing() or is_part_of_a_program():
            return as_it_is(self, *args, **kwargs)
        drawn = _copied(self.scope.rng_counters)
        try:
            return through(self, *args, **kwargs)
        except TransformedMethodReturnValueError:
            self.scope.rng_counters.clear()
            self.scope.rng_counters.update(drawn)
            return as_it_is(self, *args, **kwargs)

    return call


def _copied(counters: dict) -> dict:
    """How many random numbers were drawn of each stream; the keys are as they were."""
    return {name: _copied(value) if isinstance(value, dict) else value for name, value in counters.items()}


def own(method):
    """What was written as a module's method, without Flax's wrapper: called from the method that takes its place it is no call of
    its own, which would be intercepted and captured once more."""
    written = getattr(method, "__wrapped__", method)
    is_plain = hasattr(method, "method_handler_wrapped") and not hasattr(written, "method_handler_wrapped")  # no remat, no jit
    return written if is_plain else method


def _lifted(fn):
    """`inline` for a function of Flax scopes, as `flax.core.lift.checkpoint` is `jax.checkpoint` for one."""

    def of_groups(scope_of, groups_of, variables, rngs, *args, **kwargs):
        def pure(variables, rngs, *args, **kwargs):
            scope = scope_of(variables, rngs)
            return fn(scope, *args, **kwargs), groups_of(scope)

        return inline(pure)(variables, rngs, *args, **kwargs)

    return lift.pack(of_groups, (True,), (True,), (True,), name="fuse", enable_kwargs=True)


class Fused(nn.Module):
    """Mixed into a module: its call is fused."""

    def __init_subclass__(cls, **kwargs):
        written = [base for base in cls.__mro__ if "__call__" in vars(base)]
        if written and written[0] is not cls:
            cls.__call__ = fused(own(cls.__call__))  # type: ignore[method-assign]
        super().__init_subclass__(**kwargs)


class Epilogue(nn.Module):
    """Mixed into a layer: `activation(layer(x) + residual)`, fused."""

    activation: Callable[[jax.Array], jax.Array] | None = None

    @fused
    @nn.compact
    def __call__(self, *args, residual=None, **kwargs):
        y = own(super().__call__.__func__)(self, *args, **kwargs)  # type: ignore[attr-defined]  # it is bound
        if residual is not None:
            y = y + residual
        return y if self.activation is None else self.activation(y)


class Conv(Epilogue, nn.Conv):
    """`flax.linen.Conv`, and after it a residual add and an activation."""


class ConvTranspose(Epilogue, nn.ConvTranspose):
    """`flax.linen.ConvTranspose`, and after it a residual add and an activation."""


class Dense(Epilogue, nn.Dense):
    """`flax.linen.Dense`, and after it a residual add and an activation."""


class BatchNorm(Epilogue, nn.BatchNorm):
    """`flax.linen.BatchNorm`, and after it a residual add and an activation."""


class LayerNorm(Epilogue, nn.LayerNorm):
    """`flax.linen.LayerNorm`, and after it a residual add and an activation."""


class RMSNorm(Epilogue, nn.RMSNorm):
    """`flax.linen.RMSNorm`, and after it a residual add and an activation."""


class GroupNorm(Epilogue, nn.GroupNorm):
    """`flax.linen.GroupNorm`, and after it a residual add and an activation."""


class LSTMCell(Fused, nn.LSTMCell):
    """`flax.linen.LSTMCell`, fused."""


class OptimizedLSTMCell(Fused, nn.OptimizedLSTMCell):
    """`flax.linen.OptimizedLSTMCell`, fused."""


class GRUCell(Fused, nn.GRUCell):
    """`flax.linen.GRUCell`, fused."""


class RNN(Fused, nn.RNN):
    """`flax.linen.RNN`, the whole sequence fused."""


# Flax's layer -> ours
EXCHANGE = {layer.__bases__[1]: layer for layer in (
    Conv, ConvTranspose, Dense, BatchNorm, LayerNorm, RMSNorm, GroupNorm, LSTMCell, OptimizedLSTMCell, GRUCell, RNN)}
