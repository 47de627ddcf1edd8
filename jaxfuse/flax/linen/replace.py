"""Exchanging the layers of a whole Flax linen model, of whoever wrote it."""

import dataclasses
import functools
import inspect
import re

import flax.linen as nn

from jaxfuse.flax import Exchanged
from jaxfuse.flax.linen.layers import EXCHANGE, Epilogue, Fused, fused, own
from jaxfuse.fuse import explain


def replace(module: nn.Module) -> nn.Module:
    """The same module, its call fused as one program, with every module in it, those made in `@nn.compact` methods included.

    So is each of its other public methods, for `apply(..., method="encode")`. The result is of a subclass of the module's
    class, takes the same variables, and initialises the same; its report is
    `jaxfuse.explain(module.apply, variables, *args)`, whose sites name the layers in `scopes`.

    Raises: TypeError if `module` is not a `flax.linen.Module`; ValueError if it is bound to variables.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"replace: module: got {type(module).__name__}, expected a flax.linen.Module; "
                        "for flax.nnx there is jaxfuse.flax.nnx.replace")
    if module.scope is not None:
        raise ValueError("replace: module: got a bound module, expected an unbound one; replace it before `bind`, or "
                         "use module.unbind()[0]")
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init and f.name != "parent"}
    cls: type = type(module)
    return _fused_class(cls)(**fields)


@functools.cache
def _fused_class(cls: type) -> type:
    """Of the same name, after which Flax names parameters."""
    if issubclass(cls, (Fused, Epilogue)):
        return cls
    named = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (Fused, cls), named | {name: fused(own(getattr(cls, name))) for name in _public_methods(cls)})


def _public_methods(cls: type) -> set[str]:
    """Names of the methods that compute with the module's variables, but for `__call__`, which `Fused` takes care of."""
    written = [base for base in cls.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    others = {"setup", *(field.name for field in dataclasses.fields(cls))}  # a field's default may be a function
    return {name for base in written for name, method in vars(base).items()
            if inspect.isfunction(method) and not hasattr(method, "nowrap") and not name.startswith("_")} - others


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
    sites = [(site, [re.sub(r"\w+\(|\)", "", f"{scope}/") for scope in site.scopes])
             for site in (*report.fused, *report.skipped)]
    return tuple(_exchange(path, cls, [site for site, scopes in sites if any(f"/{path}/" in scope for scope in scopes)])
                 for path, cls in called.items())


def _exchange(path: str, cls: type, sites) -> Exchanged:
    if cls not in EXCHANGE:
        return Exchanged(path, cls, cls, "no layer that has a drop-in; what it computes is fused with the model")
    if not sites:
        return Exchanged(path, cls, cls, "nothing in it looks like a layer that has a kernel")
    reason = "" if any(site.kernel for site in sites) else sites[0].reason
    return Exchanged(path, cls, cls if reason else EXCHANGE[cls], reason)
