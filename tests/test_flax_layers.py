"""Drop-in layers against Flax's own over the grid: parameters, values, gradients and statistics, linen and nnx."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfuse.flax.linen as fused_linen
import jaxfuse.flax.nnx as fused_nnx
from compare import jit
from flax_grid import FUSED, GRID, SEQUENCES, Option
from flax_models import close

TOKENS = jax.random.normal(jax.random.key(0), (2, 5, 8))
ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu}


def epilogue(option: Option):
    """(arguments of the drop-in, what has to be done to the result of Flax's own layer)"""
    steps = option.epilogue.split("+")
    activation = ACTIVATIONS.get(steps[-1])

    def finish(y, residual):
        y = y + residual if "add" in steps else y
        return activation(y) if activation else y

    return {"activation": activation} if activation else {}, finish, "add" in steps


def inputs(option: Option, out):
    """x, a residual as the result `out` is, a cotangent"""
    x = jax.random.normal(jax.random.key(0), option.shape)
    return x, jax.random.normal(jax.random.key(1), out.shape, out.dtype), jax.random.normal(jax.random.key(2), out.shape)


def linen_layers(option: Option):
    arguments, finish, adds = epilogue(option)
    given = {"features": option.features} if option.features else {}
    if option.layer == "BatchNorm" and "use_running_average" not in option.call:
        given["use_running_average"] = False
    given |= option.arguments
    return getattr(nn, option.layer)(**given), getattr(fused_linen, option.layer)(**given, **arguments), finish, adds


def rows(module) -> list[str]:
    """Those with options that this half of Flax has."""

    def options(layer: str):
        return inspect.signature((getattr(module, layer, None) or nnx.Linear).__init__).parameters

    return [name for name, option in GRID.items() if set(option.arguments) <= set(options(option.layer))]


def test_every_row_is_of_linen_or_of_nnx():
    assert set(rows(nn)) | set(rows(nnx)) == set(GRID)
    assert not set(rows(nn)) & {"conv element type", "layer norm promoted"} and "layer norm narrow sums" not in rows(nnx)


@pytest.mark.parametrize("name", rows(nn))
def test_linen(name):
    option = GRID[name]
    flax, ours, finish, adds = linen_layers(option)
    x = jax.random.normal(jax.random.key(0), option.shape)
    out, variables = flax.init_with_output(jax.random.key(3), x, **option.call)
    x, residual, cotangent = inputs(option, out)
    mine = ours.init(jax.random.key(3), x, **({"residual": residual} if adds else {}), **option.call)
    jax.tree.map(np.testing.assert_array_equal, variables, mine)
    params, state = variables.get("params", {}), {k: v for k, v in variables.items() if k != "params"}

    def theirs(params, x, residual):
        y, updates = flax.apply({"params": params, **state}, x, mutable=list(state), **option.call)
        y = finish(y, residual)
        return jnp.vdot(y.astype(jnp.float32), cotangent), (y, updates)

    def drop_in(params, x, residual):
        more = {"residual": residual} if adds else {}
        y, updates = ours.apply({"params": params, **state}, x, mutable=list(state), **more, **option.call)
        return jnp.vdot(y.astype(jnp.float32), cotangent), (y, updates)

    expected = jax.jit(jax.grad(theirs, (0, 1, 2), has_aux=True))(params, x, residual)
    close(jax.jit(jax.grad(drop_in, (0, 1, 2), has_aux=True))(params, x, residual), expected, name)


def nnx_layers(option: Option):
    arguments, finish, adds = epilogue(option)
    layer = {"Dense": "Linear"}.get(option.layer, option.layer)
    given = [option.shape[option.arguments.get("axis", -1)]]
    if option.features:
        given.append(option.features)
    return (getattr(nnx, layer)(*given, rngs=nnx.Rngs(3), **option.arguments),
            getattr(fused_nnx, layer)(*given, rngs=nnx.Rngs(3), **option.arguments, **arguments), finish, adds)


@pytest.mark.parametrize("name", rows(nnx))
def test_nnx(name):
    option = GRID[name]
    flax, ours, finish, adds = nnx_layers(option)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(flax)), nnx.to_pure_dict(nnx.state(ours)))
    out = jax.eval_shape(lambda: nnx.clone(flax)(jnp.zeros(option.shape), **option.call))
    x, residual, cotangent = inputs(option, out)

    def theirs(layer, x, residual):
        y = finish(layer(x, **option.call), residual)
        return jnp.vdot(y.astype(jnp.float32), cotangent), y

    def drop_in(layer, x, residual):
        y = layer(x, **({"residual": residual} if adds else {}), **option.call)
        return jnp.vdot(y.astype(jnp.float32), cotangent), y

    def run(function, layer):
        def graded(layer, x, residual):
            grads, y = nnx.grad(function, argnums=(0, 1, 2), has_aux=True)(layer, x, residual)
            return (nnx.to_pure_dict(grads[0]), *grads[1:]), y

        return nnx.jit(graded)(layer, x, residual), nnx.to_pure_dict(nnx.state(layer))

    expected = run(theirs, flax)
    close(run(drop_in, ours), expected, name)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_a_kernel_computes_it(name):
    option = GRID[name]
    _, ours, _, adds = nnx_layers(option)
    x = jnp.zeros(option.shape)
    residual = {"residual": jnp.zeros_like(jax.eval_shape(lambda: nnx.clone(ours)(x)))} if adds else {}
    sites = fused_nnx.explain(ours, x, policy="always", **residual).fused
    assert len(sites) == 1 and sites[0].pattern.endswith(option.epilogue), sites


STRICT = ["conv add relu", "conv depthwise", "transpose strides relu", "dense gelu", "batch norm add relu", "batch norm running",
          "layer norm options", "rms norm options", "group norm"]


@pytest.mark.parametrize("half", ["linen", "nnx"])
@pytest.mark.parametrize("name", STRICT)
def test_without_promotion(half, name):
    """The drop-ins promote no dtype and no rank of their own."""
    option = GRID[name]
    x = jax.random.normal(jax.random.key(0), option.shape)
    if half == "linen":
        _, layer, _, adds = linen_layers(option)
    else:
        _, layer, _, adds = nnx_layers(option)

    def run():
        if half == "linen":
            rest = {"residual": residual} if adds else {}
            variables = layer.init(jax.random.key(3), x, **rest)
            y, pull = jax.vjp(lambda params, x: layer.apply(variables | params, x, mutable=["batch_stats"], **rest)[0], variables, x)
            return y, pull(y)
        graphdef, state = nnx.split(layer)
        rest = {"residual": residual} if adds else {}
        y, pull = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x, **rest), state, x)
        return y, pull(y)

    features = option.features or option.shape[-1]
    residual = jax.random.normal(jax.random.key(1), (*option.shape[:-1], features))
    expected = run()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = run()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def sequence(module, name):
    """(parameters, other state, function of both and x) of a row of SEQUENCES, in a half of Flax or of ours."""
    row = SEQUENCES[name]
    cell = getattr(module, row.cell)
    if module in (nn, fused_linen):
        rnn = module.RNN(cell(16, **row.arguments), **row.rnn)
        return rnn.init(jax.random.key(1), TOKENS, **row.call), {}, lambda variables, _, x: rnn.apply(variables, x, **row.call)
    rnn = module.RNN(cell(8, 16, **row.arguments, rngs=nnx.Rngs(1)), **row.rnn)
    graphdef, *state = nnx.split(rnn, nnx.Param, ...)
    return *state, lambda parameters, rest, x: nnx.merge(graphdef, parameters, rest, copy=True)(x, **row.call)


@pytest.mark.parametrize("flax, ours", [(nn, fused_linen), (nnx, fused_nnx)], ids=["linen", "nnx"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequence(flax, ours, name):
    x = TOKENS.swapaxes(0, 1) if SEQUENCES[name].rnn.get("time_major") else TOKENS
    (parameters, rest, theirs), (mine, _, drop_in) = (sequence(module, name) for module in (flax, ours))
    jax.tree.map(np.testing.assert_array_equal, parameters, mine)

    def graded(function):
        def loss(parameters, rest, x):
            out = function(parameters, rest, x)
            return sum(jnp.sum(jnp.sin(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(out)), out

        return jax.grad(loss, (0, 2), has_aux=True)

    made, expected = jit(lambda *args: (graded(drop_in)(*args), graded(theirs)(*args)))(parameters, rest, x)
    close(made, expected, name)


@pytest.mark.parametrize("cell", ["LSTMCell", "OptimizedLSTMCell", "GRUCell"])
def test_a_kernel_computes_the_sequence(cell):
    rnn = fused_nnx.RNN(getattr(fused_nnx, cell)(8, 16, rngs=nnx.Rngs(0)))
    (site,) = fused_nnx.explain(rnn, TOKENS, policy="always").fused
    assert site.pattern == ("gru" if cell == "GRUCell" else "lstm")


def test_arguments_by_name():
    x = jnp.ones((2, 8))
    linear = fused_nnx.Linear(in_features=8, out_features=4, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(linear(inputs=x), linear(x))
    y, variables = fused_linen.Dense(features=4).init_with_output(jax.random.key(0), inputs=x)
    np.testing.assert_array_equal(fused_linen.Dense(4).apply(variables, inputs=x), y)
