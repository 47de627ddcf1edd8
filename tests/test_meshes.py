"""Programs over several meshes, abstract ones and unusual divisions, for an op called directly and found by `fuse`.

The four devices are simulated, which takes a fresh process: this file, run as a script, does the work there and prints what it
found as JSON.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfuse
from jaxfuse import ops
from jaxfuse.runtime import ffi
from processes import on_devices

X, W = (np.random.default_rng(0).normal(size=shape).astype("float32") for shape in ((8, 16), (16, 8)))
OPS = {
    "op": lambda x, w: ops.dense(x, w, activation="relu"),
    "fuse": jaxfuse.fuse(lambda x, w: jax.nn.relu(x @ w), policy="always"),
}
DIVISIONS = {"the minor axis": P("b"), "both axes": P(("a", "b")), "both, the minor one first": P(("b", "a")), "the inputs": P(None, "a"),
             "both dimensions": P("b", "a")}


@pytest.fixture(scope="module")
def found():
    return json.loads(on_devices(__file__))


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("division", DIVISIONS)
def test_divided_over(division, kind, found):
    """Every division that a mesh can make of the batch; the sum of the weight's gradient is completed over those axes."""
    result = found[f"{division}, {kind}"]
    assert result["error"] < 1e-5
    assert result["kernels"] or ffi.unavailable("jaxfuse_dense_bwd")
    assert "all-gather" not in result["collectives"] or "dimensions" in division or "inputs" in division


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("what", ["two meshes", "a reduced weight", "a step with a reduced weight", "exported"])
def test_of_values(what, kind, found):
    assert found[f"{what}, {kind}"] < 1e-5


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("mesh", ["auto", "explicit"])
def test_lowered_for_an_abstract_mesh(mesh, kind, found):
    assert found[f"abstract {mesh}, {kind}"] == "stablehlo"


# --- in the process with four devices ----------------------------------------------------------------------------


def main():
    results = {}
    for kind, function in OPS.items():
        def both(x, w):
            return function(x, w), jax.grad(lambda x, w: jnp.sum(jnp.sin(function(x, w))), (0, 1))(x, w)

        h = np.maximum(X @ W, 0)
        g = np.cos(h) * (h > 0)
        expected = h, (g @ W.T, X.T @ g)
        meshes = {name: jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
                  for name, sizes, names in (("one", (4,), ("a",)), ("two", (2, 2), ("a", "b")))}

        def placed(mesh, spec, array):
            return jax.device_put(array, NamedSharding(meshes[mesh], spec))

        for name, spec in DIVISIONS.items():
            args = placed("two", spec, X), placed("two", P(), W)
            compiled = jax.jit(both).lower(*args).compile()
            text = compiled.as_text()
            results[f"{name}, {kind}"] = dict(
                error=error(compiled(*args), expected), kernels="jaxfuse_dense_bwd" in text,
                collectives=[c for c in ("all-gather", "all-reduce") if f" {c}" in text])
        args = placed("one", P("a"), X), placed("two", P(), W)
        results[f"two meshes, {kind}"] = error(jax.jit(both)(*args), expected)
        results[f"a reduced weight, {kind}"] = with_a_reduced_weight(function, expected)
        step = lambda f: jaxfuse.fuse(f, policy="always")
        results[f"a step with a reduced weight, {kind}"] = with_a_reduced_weight(lambda x, w: jax.nn.relu(x @ w), expected, step)
        args = placed("one", P("a"), X), placed("one", P(), W)
        exported = jax.export.export(jax.jit(both))(*args)
        results[f"exported, {kind}"] = error(jax.jit(exported.call)(*args), expected)
        for name, types in dict(auto=AxisType.Auto, explicit=AxisType.Explicit).items():
            results[f"abstract {name}, {kind}"] = lowered(function, AbstractMesh((4,), ("a",), axis_types=(types,)))
    print(json.dumps(results))


def with_a_reduced_weight(function, expected, step=lambda f: f):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        args = (jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in ((X, P("x")), (W, P(reduced={"x"}))))
        found = jax.jit(step(jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(function(x, w))))))(*reversed(list(args)))
        gradient = jax.reshard(found[1], P())
    return error((found[0], gradient), (np.sum(np.sin(expected[0])), expected[1][1]))


def lowered(function, mesh):
    with jax.sharding.use_abstract_mesh(mesh):
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)) for a, spec in ((X, P("a")), (W, P()))]
        return jax.jit(function).trace(*types).lower(lowering_platforms=("cpu",)) and "stablehlo"


def error(got, expected):
    return max(float(np.max(np.abs(np.asarray(a) - b))) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))


if __name__ == "__main__":
    main()
