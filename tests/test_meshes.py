"""Programs over several meshes, abstract ones and unusual divisions, for an op called directly and found by `fuse`. And under a mesh
of explicit axes, which types follow: regions of automatic axes, layers that are divided along other axes than the batch, contractions
that are told their result's sharding. Fused they give the numbers and the shardings that they give plain.

The four devices are simulated, which takes a fresh process: this file, run as a script, does the work there and prints what it
found as JSON.
"""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfuse
import layers
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


def explicit_mesh():
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)


def conv(x, w, out_sharding=None):
    return jax.nn.relu(layers.conv(x, w, out_sharding=out_sharding) + 1)


def dense(x, w, out_sharding=None):
    return jax.nn.gelu(lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), out_sharding=out_sharding))


def normed(x, axes):
    return jax.nn.relu((x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)) ** 3


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") ** 2


def with_a_region(x, w):
    with jax.sharding.use_abstract_mesh(explicit_mesh().abstract_mesh.update_axis_types(dict.fromkeys("xy", AxisType.Auto))):
        y = dense(*jax.sharding.reshard((x, w), P()))
    return jax.sharding.reshard(y, P("x"))


def summed(function):
    return jax.grad(lambda *args: jnp.sum(function(*args)), (0, 1))


def of_x(function):
    return lambda x, w: function(x)


FILTER = layers.randn(3, 3, 8, 8)
IMAGE, MATRIX = ((8, 8, 8, 8), (3, 3, 8, 8)), ((64, 16), (16, 32))
PROGRAMS = {
    "a region of automatic axes": (with_a_region, MATRIX, P("x", "y")),
    "a region's gradient": (summed(with_a_region), MATRIX, P("x", "y")),
    "auto_axes": (lambda x, w: jax.sharding.auto_axes(dense, out_sharding=P("x"))(2 * x, w), MATRIX, P("x", "y")),
    "einsum": (lambda x, w: jnp.einsum("ab,bc,ac->c", x, w, x @ w, out_sharding=P()), MATRIX, P("x")),
    "a product told its sharding": (lambda x, w: dense(x, w, P("x")), MATRIX, P("x", "y")),
    "a product's gradient told its sharding": (summed(lambda x, w: dense(x, w, P())), MATRIX, P("x")),
    "a convolution told its sharding": (lambda x, w: conv(x, w, P("x", None, None, "y")), IMAGE, P("x", None, None, "y")),
    "a convolution's gradient told its sharding": (summed(lambda x, w: conv(x, w, P())), IMAGE, P("x")),
    "a convolution by a constant filter": (of_x(lambda x: conv(x, FILTER)), IMAGE, P("x")),
    "a convolution of sharded rows": (conv, IMAGE, P("x", "y")),
    "a max pool of sharded rows": (summed(of_x(pooled)), IMAGE, P("x", "y")),
    "a max pool of sharded channels": (summed(of_x(pooled)), IMAGE, P("x", None, None, "y")),
    "a layer norm of sharded rows": (summed(of_x(lambda x: normed(x, -1))), IMAGE, P("x", "y")),
    "a batch norm of sharded rows": (summed(of_x(lambda x: normed(x, (0, 1, 2)))), IMAGE, P("x", "y")),
    "a dense layer of sharded rows": (summed(dense), ((8, 8, 8, 16), (16, 32)), P("x", "y")),
}


@pytest.fixture(scope="module")
def found():
    """Of a program of PROGRAMS (distance, its outputs' shardings are those of the plain one); a string: what was raised."""
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


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_numbers_and_shardings(name, found):
    assert isinstance(found[name], list), found[name]
    off_by, alike = found[name]
    assert off_by < 1e-4 and alike


def test_a_result_has_its_types_sharding(found):
    """A dense layer's, in the program as it is lowered."""
    assert "sdy.sharding_constraint" in found["lowered"]


# --- in the process with four devices ----------------------------------------------------------------------------


def main():
    warnings.simplefilter("error", jaxfuse.runtime.versions.UnreadWarning)
    with jax.set_mesh(explicit_mesh()):
        results = {name: compared(*program) for name, program in PROGRAMS.items()}
        args = (jax.device_put(jnp.ones((64, 16)), NamedSharding(explicit_mesh(), P("x"))), jnp.ones((16, 32)))
        results["lowered"] = jaxfuse.fuse(lambda x, w: x @ w, policy="always").lower(*args).as_text()
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


def compared(function, shapes, spec):
    rng = np.random.default_rng(0)
    specs = spec, P()
    args = [jax.device_put(rng.normal(size=shape).astype(np.float32), s) for shape, s in zip(shapes, specs)]
    expected = jax.jit(function)(*args)
    try:
        got = jaxfuse.fuse(function, policy="always")(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    both = list(zip(*map(jax.tree.leaves, (got, expected)), strict=True))
    off_by = max(float(np.abs(np.asarray(a) - b).max() / (np.abs(b).max() + 1e-30)) for a, b in both)
    return off_by, all(a.sharding == b.sharding for a, b in both)


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
