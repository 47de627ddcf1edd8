"""Exchanging the layers of a whole Flax nnx model, of whoever wrote it."""

import functools

from flax import nnx

from jaxfuse.flax import Exchanged
from jaxfuse.flax.nnx.layers import EXCHANGE, Epilogue, Fused
from jaxfuse.fuse import explain as explain_function
from jaxfuse.report import FusionReport


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
    if not isinstance(model, (Fused, Epilogue)):
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
        return Exchanged(name, cls.__bases__[1], cls, "")
    if cls in EXCHANGE:
        return Exchanged(name, cls, EXCHANGE[cls], "")
    base = next((base for base in cls.__mro__ if base in EXCHANGE), None)
    reason = f"a subclass of {base.__name__}, whose call may differ" if base else "no layer that has a drop-in"
    return Exchanged(name, cls, cls, f"{reason}; what it computes is fused with the model")


@functools.cache
def _fused_class(cls: type) -> type:
    own = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (Fused, cls), own)
