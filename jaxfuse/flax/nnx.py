"""Flax nnx's layers, fused: `from jaxfuse.flax import nnx as fnnx`, then `fnnx.Conv` where it said `nnx.Conv`.

Each layer is a subclass of Flax's own and computes what that computes, through `jaxfuse.fuse`: constructor arguments, state,
initialisers, RNG use, masks, dtypes, metadata and errors are Flax's, so that checkpoints load both ways. Beyond that, most
take `activation`, any function of one array, and, when called, `residual`, of the shape of the result:

    y = activation(layer(x) + residual)                       in one pass over memory, where a kernel can

Whatever no kernel takes runs as Flax's own layer would. Inside a function that is fused as a whole, and inside `fused` methods,
the layers are plain and the whole is fused: a network built of them is not cut into pieces.
"""

import functools

from flax import nnx

from jaxfuse.flax import Exchanged
from jaxfuse.fuse import explain as explain_function, inline
from jaxfuse.report import FusionReport
from jaxfuse.signature import is_part_of_a_program

__all__ = ["BatchNorm", "Conv", "ConvTranspose", "GRUCell", "GroupNorm", "LSTMCell", "LayerNorm", "Linear",
           "OptimizedLSTMCell", "RMSNorm", "RNN", "exchanged", "explain", "fused", "replace"]


def fused(method):
    """Decorates a method of an `nnx.Module`: what it computes, layers and all, is fused as one program.

    The state that it changes (statistics, RNG counts) is updated as ever. A method that changes the module otherwise
    (new variables, attributes) runs as it is.
    """

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if is_part_of_a_program():
            return method(self, *args, **kwargs)
        graphdef, state = nnx.split(self)
        graphs = []

        def pure(state, *args, **kwargs):
            module = nnx.merge(graphdef, state)
            out = method(module, *args, **kwargs)
            graph, after = nnx.split(module)
            graphs.append(graph)
            return out, after

        out, after = inline(pure)(state, *args, **kwargs)
        if graphs[-1] != graphdef:
            return method(self, *args, **kwargs)
        before = dict(nnx.to_flat_state(state))
        nnx.update(self, nnx.from_flat_state([(path, leaf) for path, leaf in nnx.to_flat_state(after)
                                              if leaf.get_raw_value() is not before[path].get_raw_value()]))
        return out

    return call


class _Fused(nnx.Module):
    """Mixed into a module: its call is fused."""

    @fused
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


class _Epilogue(nnx.Module):
    """Mixed into a layer: `activation(layer(x) + residual)`, fused."""

    activation = None  # of layers that were exchanged, and never had the argument

    def __init__(self, *args, activation=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.activation = activation

    @fused
    def __call__(self, x, *args, residual=None, **kwargs):
        y = super().__call__(x, *args, **kwargs)
        if residual is not None:
            y = y + residual
        return y if self.activation is None else self.activation(y)


class Conv(_Epilogue, nnx.Conv):
    """`flax.nnx.Conv`, and after it a residual add and an activation."""


class ConvTranspose(_Epilogue, nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose`, and after it a residual add and an activation."""


class Linear(_Epilogue, nnx.Linear):
    """`flax.nnx.Linear`, and after it a residual add and an activation."""


class BatchNorm(_Epilogue, nnx.BatchNorm):
    """`flax.nnx.BatchNorm`, and after it a residual add and an activation."""


class LayerNorm(_Epilogue, nnx.LayerNorm):
    """`flax.nnx.LayerNorm`, and after it a residual add and an activation."""


class RMSNorm(_Epilogue, nnx.RMSNorm):
    """`flax.nnx.RMSNorm`, and after it a residual add and an activation."""


class GroupNorm(_Epilogue, nnx.GroupNorm):
    """`flax.nnx.GroupNorm`, and after it a residual add and an activation."""


class LSTMCell(_Fused, nnx.LSTMCell):
    """`flax.nnx.LSTMCell`, fused."""


class OptimizedLSTMCell(_Fused, nnx.OptimizedLSTMCell):
    """`flax.nnx.OptimizedLSTMCell`, fused."""


class GRUCell(_Fused, nnx.GRUCell):
    """`flax.nnx.GRUCell`, fused."""


class RNN(_Fused, nnx.RNN):
    """`flax.nnx.RNN`, the whole sequence fused."""


EXCHANGE = {layer.__mro__[2]: layer for layer in (
    Conv, ConvTranspose, Linear, BatchNorm, LayerNorm, RMSNorm, GroupNorm, LSTMCell, OptimizedLSTMCell, GRUCell, RNN)}


def replace(model: nnx.Module) -> nnx.Module:
    """Exchanges every layer of the model by its fused drop-in and fuses the model's call as one program.

    In place, and returned: parameters, statistics and RNG streams stay the very objects, so optimizers and checkpoints
    made before or after fit. Layers that several modules share stay shared. `exchanged(model)` says what became of each.

    Raises: TypeError if `model` is not a `flax.nnx.Module`.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"replace: model: got {type(model).__name__}, expected a flax.nnx.Module; "
                        "for flax.linen there is jaxfuse.flax.linen.replace")
    for _, module in nnx.iter_modules(model):
        if type(module) in EXCHANGE:
            module.__class__ = EXCHANGE[type(module)]
    if not isinstance(model, (_Fused, _Epilogue)):
        model.__class__ = _fused_class(type(model))
    return model


def exchanged(model: nnx.Module) -> tuple[Exchanged, ...]:
    """What `replace` exchanges in this model, or has exchanged, and what it leaves as it is, with the reason."""
    return tuple(_exchange(path, type(module)) for path, module in nnx.iter_modules(model))


def explain(model: nnx.Module, *args, policy: str = "measured", **kwargs) -> FusionReport:
    """`jaxfuse.explain` of `model(*args, **kwargs)`; the model's state stays as it is."""
    graphdef, state = nnx.split(model)
    return explain_function(lambda state, *args, **kwargs: nnx.merge(graphdef, state)(*args, **kwargs),
                            state, *args, policy=policy, **kwargs)


def _exchange(path, cls: type) -> Exchanged:
    name = ".".join(map(str, path))
    if cls in EXCHANGE.values():
        return Exchanged(name, cls.__mro__[2], cls, "")
    if cls in EXCHANGE:
        return Exchanged(name, cls, EXCHANGE[cls], "")
    base = next((base for base in cls.__mro__ if base in EXCHANGE), None)
    reason = f"a subclass of {base.__name__}, whose call may differ" if base else "no layer that has a drop-in"
    return Exchanged(name, cls, cls, f"{reason}; what it computes is fused with the model")


@functools.cache
def _fused_class(cls: type[nnx.Module]) -> type[nnx.Module]:
    own = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (_Fused, cls), own)
