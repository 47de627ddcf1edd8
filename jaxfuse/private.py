"""The private parts of JAX that cannot be avoided. Tried with jax 0.10.2, 0.11.2 and 0.12.0.1."""

import importlib
from typing import Any

from jax._src import dispatch

# Since JAX 0.12 an equation may hold an object in place of parameters. The classes that stand for equations of old.
OBJECTS = {"CustomJVPTraced": "custom_jvp_call", "CustomVJPTraced": "custom_vjp_call", "RematTraced": "checkpoint"}


def name_of(eqn) -> str:
    """The primitive's name; with `jax_custom_jvp3`, `jax_custom_vjp3` and `jax_remat3` the same as without."""
    held = eqn.params.get("_prim")
    return eqn.primitive.name if held is None else OBJECTS.get(type(held).__name__, type(held).__name__)


def params_of(eqn) -> dict[str, Any]:
    """The equation's parameters; of an object that has a program under `jaxpr` or `call_jaxpr`, as the equations of old."""
    held = eqn.params.get("_prim")
    match held and name_of(eqn):
        case "custom_jvp_call" | "custom_vjp_call":
            return {"call_jaxpr": held.traced.jaxpr, "symbolic_zeros": held.params["symbolic_zeros"]}
        case "checkpoint":
            return dict(held.params)
    if "ft_in" in eqn.params:  # a scan's inputs, since JAX 0.12
        consts, carry, _ = map(len, eqn.params["ft_in"].unpack())
        return eqn.params | {"num_consts": consts, "num_carry": carry}
    return eqn.params


def with_params(eqn, changed: dict[str, Any]):
    """The equation with some parameters changed: those of a loop, a branch or a checkpoint."""
    held = eqn.params.get("_prim")
    if held is None:
        return eqn.replace(params=eqn.params | changed)
    return eqn.replace(params=eqn.params | {"_prim": type(held)(**held.params | changed)})


def scan_over(eqn, body, num_consts: int, used: list[bool]) -> dict[str, Any]:
    """The parameters of a scan like this one over a body with other constants that returns those outputs which are `used`."""
    params = eqn.params | {"jaxpr": body}
    if "ft_in" in params:
        trees = importlib.import_module("jax._src.flattree")  # since JAX 0.12
        _, carry, xs = params["ft_in"].unpack()
        ft_in = trees.pack((trees.nones(num_consts), carry, xs))
        return params | {"ft_in": ft_in, "ft_out": params["ft_out"].filter_with_mask(used)}
    linear = {"linear": (False,) * len(body.in_avals)} if "linear" in params else {}
    return params | {"num_consts": num_consts} | linear


def needs_devices(primitive) -> None:
    """Makes the devices of the program known while `primitive` is lowered, as `custom_partitioning` inside it requires."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def jit_options(fn) -> dict | None:
    """Which arguments of a jitted function are static and which are donated, as `jax.jit` was told; None: fn is not jitted."""
    info = getattr(fn, "_jit_info", None)
    names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    return None if info is None else {name: getattr(info, name) for name in names}
