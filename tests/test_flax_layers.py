"""Drop-in layers against Flax's own over the grid: parameters, values, gradients and statistics, linen and nnx."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfuse
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


def layer(module, name: str):
    """(parameters, other state, function of both, x and a residual, which gives the result and the state behind it) of a row of GRID,
    in a half of Flax, where the epilogue follows the layer, or of ours."""
    option = GRID[name]
    arguments, finish, adds = epilogue(option)
    is_ours = module in (fused_linen, fused_nnx)
    given, x = option.arguments | (arguments if is_ours else {}), jnp.zeros(option.shape)
    further = lambda residual: {"residual": residual} if adds and is_ours else {}
    finished = lambda y, residual: y if is_ours else finish(y, residual)
    if module in (nn, fused_linen):
        given = ({"features": option.features} if option.features else {}) | given
        if option.layer == "BatchNorm" and "use_running_average" not in option.call:
            given = {"use_running_average": False} | given
        made = getattr(module, option.layer)(**given)
        parameters = dict(made.init(jax.random.key(3), x, **further(is_ours and residual_of(name)), **option.call))
        state = {kind: parameters.pop(kind) for kind in list(parameters) if kind != "params"}

        def apply(parameters, state, x, residual):
            y, state = made.apply(parameters | state, x, mutable=list(state), **further(residual), **option.call)
            return finished(y, residual), state

        return parameters, state, apply
    sizes = [option.shape[option.arguments.get("axis", -1)], *[option.features] * bool(option.features)]
    made = getattr(module, {"Dense": "Linear"}.get(option.layer, option.layer))(*sizes, rngs=nnx.Rngs(3), **given)
    graphdef, *variables = nnx.split(made, nnx.Param, ...)

    def apply_nnx(parameters, state, x, residual):
        merged = nnx.merge(graphdef, parameters, state, copy=True)
        y = merged(x, **further(residual), **option.call)
        return finished(y, residual), nnx.split(merged, nnx.Param, ...)[2]

    return *variables, apply_nnx


@functools.cache
def residual_of(name: str):
    """Of the type of what Flax's layer gives."""
    option = GRID[name]
    if not epilogue(option)[2]:
        return None
    parameters, state, apply = layer(nn if name in rows(nn) else nnx, name)
    out = jax.eval_shape(lambda x: apply(parameters, state, x, 0)[0], jnp.zeros(option.shape))
    return jax.random.normal(jax.random.key(1), out.shape, out.dtype)


def rows(module) -> list[str]:
    """Those with options that this half of Flax has."""

    def options(layer: str):
        return inspect.signature((getattr(module, layer, None) or nnx.Linear).__init__).parameters

    return [name for name, option in GRID.items() if set(option.arguments) <= set(options(option.layer))]


def test_every_row_is_of_linen_or_of_nnx():
    assert set(rows(nn)) | set(rows(nnx)) == set(GRID)
    assert not set(rows(nn)) & {"conv element type", "layer norm promoted"} and "layer norm narrow sums" not in rows(nnx)


def in_both_halves(names):
    """(a half of Flax, ours of it, name)"""
    return [pytest.param(flax, ours, name, id=f"{flax.__name__.split('.')[1]}-{name}")
            for flax, ours in ((nn, fused_linen), (nnx, fused_nnx)) for name in names(flax)]


@pytest.mark.parametrize("flax, ours, name", in_both_halves(rows))
def test_layer(flax, ours, name):
    """Parameters, result, state and gradients."""
    (parameters, state, theirs), (mine, my_state, drop_in) = layer(flax, name), layer(ours, name)
    jax.tree.map(np.testing.assert_array_equal, (parameters, state), (mine, my_state))
    x, residual = jax.random.normal(jax.random.key(0), GRID[name].shape), residual_of(name)
    residual = 0.0 if residual is None else residual

    def graded(apply):
        def loss(parameters, x, residual):
            y, updates = apply(parameters, state, x, residual)
            return jnp.vdot(y.astype(jnp.float32), jax.random.normal(jax.random.key(2), y.shape)), (y, updates)

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(parameters, x, residual)

    close(graded(drop_in), graded(theirs), name)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_a_kernel_computes_it(name):
    parameters, state, apply = layer(fused_nnx, name)
    x, residual = jnp.zeros(GRID[name].shape), residual_of(name)
    sites = jaxfuse.explain(apply, parameters, state, x, residual, policy="always").fused
    assert len(sites) == 1 and sites[0].pattern.endswith(GRID[name].epilogue), sites


STRICT = ["conv add relu", "conv depthwise", "transpose strides relu", "dense gelu", "batch norm add relu", "batch norm running",
          "layer norm options", "rms norm options", "group norm"]


@pytest.mark.parametrize("flax, ours, name", in_both_halves(lambda flax: STRICT))
def test_without_promotion(flax, ours, name):
    """The drop-ins promote no dtype and no rank of their own."""
    x = jax.random.normal(jax.random.key(0), GRID[name].shape)

    def run():
        parameters, state, apply = layer(ours, name)
        y, pull = jax.vjp(lambda parameters, x: apply(parameters, state, x, residual_of(name))[0], parameters, x)
        return y, pull(y)

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
