"""What a function would return were its arithmetic exact: its program, evaluated in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxfuse.runtime.private import params_of

INLINED = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2")
FLOATS = (np.dtype("float32"), np.dtype("float16"), np.dtype(jnp.bfloat16))


def in_float64(function, *args):
    """function(*args), every float32, float16 and bfloat16 of its program a float64; also what a framework casts itself."""
    closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
    with jax.enable_x64(True):
        run = jax.jit(functools.partial(_evaluate, closed.jaxpr), compiler_options={"xla_backend_optimization_level": 0})
        leaves = run([_widened_array(c) for c in closed.consts], [_widened_array(a) for a in jax.tree.leaves(args)])
    return jax.tree.unflatten(jax.tree.structure(out), leaves)


def _widened_array(array):
    """Of numpy, for which nothing is compiled; a key of random numbers as it is."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array
    array = np.asarray(array)
    return array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _wide(array):
    array = _widened_array(array)
    return jnp.asarray(array) if isinstance(array, np.ndarray) else array


def _evaluate(jaxpr, consts, args):
    def read(atom):
        return _wide(np.asarray(atom.val, atom.aval.dtype)) if isinstance(atom, Literal) else environment[atom]

    environment = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))
    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        if eqn.primitive.name in INLINED:
            outputs = _body(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"], inputs)
        elif eqn.primitive.name == "scan":
            outputs = _scan(inputs, **params_of(eqn))
        elif eqn.primitive.name == "cond":
            branches = [functools.partial(lambda branch, *operands: _body(branch, operands), b) for b in eqn.params["branches"]]
            outputs = lax.switch(inputs[0], branches, *inputs[1:])
        else:
            params = {name: _widened(value) for name, value in eqn.params.items()}
            outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        environment.update(zip(eqn.outvars, outputs))
    return [read(v) for v in jaxpr.outvars]


def _body(body, inputs):
    """A `Jaxpr`, or one with the constants that belong to it."""
    return _evaluate(getattr(body, "jaxpr", body), [_wide(c) for c in getattr(body, "consts", ())], inputs)


def _scan(inputs, *, jaxpr, num_consts, num_carry, length, reverse, **_):
    consts, carry, xs = inputs[:num_consts], inputs[num_consts : num_consts + num_carry], inputs[num_consts + num_carry :]

    def step(carry, xs):
        outs = _body(jaxpr, [*consts, *carry, *xs])
        return outs[:num_carry], outs[num_carry:]

    carry, ys = lax.scan(step, carry, xs, length, reverse)
    return [*carry, *ys]


def _widened(param):
    is_dtype = isinstance(param, (np.dtype, type)) and param in FLOATS
    return np.dtype("float64") if is_dtype else param
