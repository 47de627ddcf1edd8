"""`jaxfuse.freeze` on two devices: in a `shard_map`, with collectives, and of arrays with explicit axes. The devices are simulated, by
this file as a script."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxfuse
from processes import on_devices

W = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)
X = W[:4]


def added(w, x):
    return jax.lax.psum(jnp.sin(x @ w).sum(0), "i")


def by_place(w, x):
    """Reads a part of what is constant, another on each device."""
    return jnp.sin(x @ w) + jax.lax.dynamic_slice_in_dim(jnp.cos(w), 2 * jax.lax.axis_index("i"), 2, 0)


def in_a_shard_map(function, outs, policy):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    mapped = lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=outs))(X)
    return mapped(jaxfuse.freeze(function, W, policy=policy)), mapped(lambda x: function(W, x))


def of_explicit_axes():
    """A program that asks for the axes of its argument."""
    function = lambda w, x: jnp.sin(x) * (2 if jax.typeof(x).sharding.spec[0] == "i" else 1)
    with jax.set_mesh(jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,))):
        frozen, results = jaxfuse.freeze(function, W), []
        for x in (jax.device_put(X, P("i")), jax.device_put(X, P())):
            results.append((frozen(x), jax.jit(function)(W, x)))
        return tuple(zip(*results))


CASES = {f"{function.__name__}, {policy}": (in_a_shard_map, function, outs, policy)
         for function, outs in ((added, P()), (by_place, P("i"))) for policy in ("never", "always")}
CASES["explicit axes"] = (of_explicit_axes,)


@pytest.fixture(scope="module")
def errors():
    return json.loads(on_devices(__file__, 2))


@pytest.mark.parametrize("case", CASES)
def test_as_unfrozen(case, errors):
    assert errors[case] < 1e-5


def main():
    errors = {}
    for name, (run, *arguments) in CASES.items():
        made, known = map(jax.tree.leaves, run(*arguments))
        errors[name] = max(float(np.abs(np.asarray(m) - np.asarray(k)).max()) for m, k in zip(made, known, strict=True))
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
