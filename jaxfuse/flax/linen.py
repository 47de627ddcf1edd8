"""Flax linen's layers, fused: `import jaxfuse.flax.linen as fnn`, then `fnn.Conv` where it said `nn.Conv`.

Each layer is a subclass of Flax's own and computes what that computes, through `jaxfuse.fuse`: constructor arguments,
parameters, collections, initialisers, RNG use, masks, dtypes and errors are Flax's, so that checkpoints load both ways.
Beyond that, most take `activation`, any function of one array, and, when called, `residual`, of the shape of the result:

    y = activation(layer(x) + residual)                       in one pass over memory, where a kernel can

Whatever no kernel takes runs as Flax's own layer would. Inside a function that is fused as a whole, and inside `fused` methods,
the layers are plain and the whole is fused: a network built of them is not cut into pieces.
"""

import dataclasses
import functools
import re
from collections.abc import Callable

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen.transforms import lift_transform

from jaxfuse.flax import Exchanged
from jaxfuse.fuse import explain, inline

__all__ = ["BatchNorm", "Conv", "ConvTranspose", "Dense", "GRUCell", "GroupNorm", "LSTMCell", "LayerNorm",
           "OptimizedLSTMCell", "RMSNorm", "RNN", "exchanged", "fused", "replace"]


def fused(method):
    """Decorates a method of a `flax.linen.Module`: what it computes, layers and all, is fused as one program.

    Variables, mutable collections and RNG streams behave as under `flax.linen.remat`. While parameters are initialised the
    method runs as it is.
    """
    through = lift_transform(_lifted, method)

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        return (method if self.is_initializing() else through)(self, *args, **kwargs)

    return call


def _lifted(fn):
    """`inline` for a function of Flax scopes, as `flax.core.lift.checkpoint` is `jax.checkpoint` for one."""

    def of_groups(scope_of, groups_of, variables, rngs, *args, **kwargs):
        def pure(variables, rngs, *args, **kwargs):
            scope = scope_of(variables, rngs)
            return fn(scope, *args, **kwargs), groups_of(scope)

        return inline(pure)(variables, rngs, *args, **kwargs)

    return lift.pack(of_groups, (True,), (True,), (True,), name="fuse", enable_kwargs=True)


class _Fused(nn.Module):
    """Mixed into a module: its call is fused."""

    @fused
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


class _Epilogue(nn.Module):
    """Mixed into a layer: `activation(layer(x) + residual)`, fused."""

    activation: Callable[[jax.Array], jax.Array] | None = None

    @fused
    def __call__(self, x, *args, residual=None, **kwargs):
        y = super().__call__(x, *args, **kwargs)
        if residual is not None:
            y = y + residual
        return y if self.activation is None else self.activation(y)


class Conv(_Epilogue, nn.Conv):
    """`flax.linen.Conv`, and after it a residual add and an activation."""


class ConvTranspose(_Epilogue, nn.ConvTranspose):
    """`flax.linen.ConvTranspose`, and after it a residual add and an activation."""


class Dense(_Epilogue, nn.Dense):
    """`flax.linen.Dense`, and after it a residual add and an activation."""


class BatchNorm(_Epilogue, nn.BatchNorm):
    """`flax.linen.BatchNorm`, and after it a residual add and an activation."""


class LayerNorm(_Epilogue, nn.LayerNorm):
    """`flax.linen.LayerNorm`, and after it a residual add and an activation."""


class RMSNorm(_Epilogue, nn.RMSNorm):
    """`flax.linen.RMSNorm`, and after it a residual add and an activation."""


class GroupNorm(_Epilogue, nn.GroupNorm):
    """`flax.linen.GroupNorm`, and after it a residual add and an activation."""


class LSTMCell(_Fused, nn.LSTMCell):
    """`flax.linen.LSTMCell`, fused."""


class OptimizedLSTMCell(_Fused, nn.OptimizedLSTMCell):
    """`flax.linen.OptimizedLSTMCell`, fused."""


class GRUCell(_Fused, nn.GRUCell):
    """`flax.linen.GRUCell`, fused."""


class RNN(_Fused, nn.RNN):
    """`flax.linen.RNN`, the whole sequence fused."""


def replace(module: nn.Module) -> nn.Module:
    """The same module, its call fused as one program, with every module in it, those made in `@nn.compact` methods included.

    The result is of a subclass of the module's class, takes the same variables, and initialises the same; its report is
    `jaxfuse.explain(module.apply, variables, *args)`, whose sites name the layers in `scope`.

    Raises: TypeError if `module` is not a `flax.linen.Module`; ValueError if it is bound to variables.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"replace: module: got {type(module).__name__}, expected a flax.linen.Module; "
                        "for flax.nnx there is jaxfuse.flax.nnx.replace")
    if module.scope is not None:
        raise ValueError("replace: module: got a bound module, expected an unbound one; replace it before `bind`, or "
                         "use module.unbind()[0]")
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init and f.name != "parent"}
    return _fused_class(type(module))(**fields)


@functools.cache
def _fused_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Of the same name, after which Flax names parameters."""
    if issubclass(cls, (_Fused, _Epilogue)):
        return cls
    own = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (_Fused, cls), own)


EXCHANGE = {layer.__mro__[2]: layer for layer in (
    Conv, ConvTranspose, Dense, BatchNorm, LayerNorm, RMSNorm, GroupNorm, LSTMCell, OptimizedLSTMCell, GRUCell, RNN)}


def exchanged(module: nn.Module, variables, *args, policy: str = "measured", **kwargs) -> tuple[Exchanged, ...]:
    """What becomes of each module in `replace(module).apply(variables, *args, **kwargs)`, in the order of their calls.

    Nothing is computed. Raises what `module.apply` raises for these arguments.
    """
    called: dict[str, type] = {}

    def noting(call, args, kwargs, context):
        if context.method_name == "__call__":
            called.setdefault("/".join(context.module.path), type(context.module))
        return call(*args, **kwargs)

    def apply(variables, *args):
        with nn.intercept_methods(noting):
            return module.apply(variables, *args, **kwargs)

    report = explain(apply, variables, *args, policy=policy)
    scopes = [(re.sub(r"\w+\(|\)", "", site.scope) + "/", site) for site in (*report.fused, *report.skipped)]
    return tuple(_exchange(path, cls, [site for scope, site in scopes if f"/{path}/" in scope]) for path, cls in called.items())


def _exchange(path: str, cls: type, sites) -> Exchanged:
    if cls not in EXCHANGE:
        return Exchanged(path, cls, cls, "no layer that has a drop-in; what it computes is fused with the model")
    if not sites:
        return Exchanged(path, cls, cls, "nothing in it looks like a layer that has a kernel")
    reason = "" if any(site.kernel for site in sites) else sites[0].reason
    return Exchanged(path, cls, cls if reason else EXCHANGE[cls], reason)
