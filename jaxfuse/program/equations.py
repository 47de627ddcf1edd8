"""Equations of a jaxpr: which hold a program that is part of this one, and which compute the same."""

import functools
from collections.abc import Iterator

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxfuse.runtime.private import name_of, params_of

INLINED = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr")
CONTROL = ("scan", "while", "cond", "checkpoint", "remat2", "shard_map")
CUSTOM_DERIVATIVE_CALLS = ("custom_jvp_call", "custom_vjp_call", "custom_vmap_call")  # the user's own rules, which their bodies belong to
LONGEST_CUSTOM_JVP = 32  # equations of a function with a derivative rule of its own that are compared with others


def key_of(eqn, inputs: list):
    """What is the same for equations that compute the same; None: nothing is known to be. A function with a derivative
    rule is made anew at every call: it is known by its text, its rule is then to be compared."""
    name, params = name_of(eqn), params_of(eqn)
    if name == "rng_uniform":  # each call draws anew
        return None
    if name in CUSTOM_DERIVATIVE_CALLS:
        if name != "custom_jvp_call" or len(params["call_jaxpr"].eqns) > LONGEST_CUSTOM_JVP:
            return None
        params = dict(text=str(params["call_jaxpr"].jaxpr))
    if name == "broadcast_in_dim" and (number := _repeated_number(inputs[0])) is not None:
        inputs, params = [number], {**params, "broadcast_dimensions": ()}
    key = (
        eqn.primitive,
        eqn.ctx.threefry_partitionable,  # which random bits
        tuple([v if v.literal is None else (np.asarray(v.literal).tobytes(), v.aval) for v in inputs]),
        tuple(sorted(params.items())),
    )
    try:
        hash(key)
    except TypeError:  # an unhashable parameter: the equation stays on its own
        return None
    return key


def _repeated_number(value):
    """The number that the value repeats, be it in several steps, as under `vmap`; None where it is none."""
    while value.ndim and value.producer is not None and value.producer.primitive == "broadcast_in_dim":
        value = value.producer.inputs[0]
    return value if value.ndim == 0 else None


def same_rule(one, other) -> bool:
    """Whether two `custom_jvp_call`s with the same text have the same derivative."""
    return derivative(one) == derivative(other)


def derivative(eqn) -> object:
    """The text of a `custom_jvp_call`'s derivative. What that text cannot tell, constants and rules within the rule, is taken to
    differ from any other, and so are all other rules."""
    if name_of(eqn) != "custom_jvp_call":
        return object()
    types = tuple(v.aval for v in eqn.invars)
    bind = functools.partial(eqn.primitive.bind, **eqn.primitive.get_bind_params(eqn.params))
    try:
        traced = jax.make_jaxpr(lambda primals, tangents: jax.jvp(bind, primals, tangents))(types, types)
    except TypeError:  # of an argument that has no tangent
        return object()
    closed = [*closed_over(traced), *closed_over(params_of(eqn)["call_jaxpr"])]
    return object() if closed or any(name in str(traced) for name in CUSTOM_DERIVATIVE_CALLS[1:]) else str(traced)


def closed_over(param) -> Iterator:
    """The arrays that a program closes over, or those among an equation's parameters, however deep: their text does not tell them."""
    if isinstance(param, (tuple, list)):
        for each in param:
            yield from closed_over(each)
    if isinstance(param, ClosedJaxpr):
        yield from param.consts
    if isinstance(param, (Jaxpr, ClosedJaxpr)):
        for eqn in param.eqns:
            for each in params_of(eqn).values():
                yield from closed_over(each)


def inlinable(eqn) -> ClosedJaxpr | None:
    """The body of a plain nested `jit`. One with shardings of its own stays as it is."""
    if name_of(eqn) not in INLINED or eqn.effects:
        return None
    params = eqn.params
    body = params.get("jaxpr") or params.get("call_jaxpr")
    if not isinstance(body, ClosedJaxpr):
        return None
    own = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    specified = any(type(s).__name__ != "UnspecifiedValue" for s in own)
    return None if specified else body


def without_donation(params: dict) -> dict:
    """The parameters of an equation, which donates nothing: JAX ignores it within a program, but a part of one may run by itself."""
    donated = params.get("donated_invars", ())
    return params | dict(donated_invars=(False,) * len(donated)) if any(donated) else params
