"""Programs under a mesh of explicit axes, which types follow: regions of automatic axes, layers that are divided along other axes
than the batch, contractions that are told their result's sharding. Fused they give the numbers and the shardings that they give plain.

The devices are simulated, which takes a fresh process: this file, run as a script.
"""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfuse
from processes import on_devices

NHWC = ("NHWC", "HWIO", "NHWC")


def mesh():
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)


def conv(x, w, out_sharding=None):
    return jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC, out_sharding=out_sharding) + 1)


def dense(x, w, out_sharding=None):
    return jax.nn.gelu(lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), out_sharding=out_sharding))


def normed(x, axes):
    return jax.nn.relu((x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)) ** 3


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") ** 2


def with_a_region(x, w):
    with jax.sharding.use_abstract_mesh(mesh().abstract_mesh.update_axis_types(dict.fromkeys("xy", AxisType.Auto))):
        y = dense(*jax.sharding.reshard((x, w), P()))
    return jax.sharding.reshard(y, P("x"))


def with_auto_axes(x, w):
    return jax.sharding.auto_axes(dense, out_sharding=P("x"))(2 * x, w)


def summed(function):
    return jax.grad(lambda *args: jnp.sum(function(*args)), (0, 1))


def of_x(function):
    return lambda x, w: function(x)


IMAGE, MATRIX = ((8, 8, 8, 8), (3, 3, 8, 8)), ((64, 16), (16, 32))
PROGRAMS = {
    "a region of automatic axes": (with_a_region, MATRIX, P("x", "y")),
    "a region's gradient": (summed(with_a_region), MATRIX, P("x", "y")),
    "auto_axes": (with_auto_axes, MATRIX, P("x", "y")),
    "einsum": (lambda x, w: jnp.einsum("ab,bc,ac->c", x, w, x @ w, out_sharding=P()), MATRIX, P("x")),
    "a product told its sharding": (lambda x, w: dense(x, w, P("x")), MATRIX, P("x", "y")),
    "a product's gradient told its sharding": (summed(lambda x, w: dense(x, w, P())), MATRIX, P("x")),
    "a convolution told its sharding": (lambda x, w: conv(x, w, P("x", None, None, "y")), IMAGE, P("x", None, None, "y")),
    "a convolution's gradient told its sharding": (summed(lambda x, w: conv(x, w, P())), IMAGE, P("x")),
    "a convolution of sharded rows": (conv, IMAGE, P("x", "y")),
    "a max pool of sharded rows": (summed(of_x(pooled)), IMAGE, P("x", "y")),
    "a max pool of sharded channels": (summed(of_x(pooled)), IMAGE, P("x", None, None, "y")),
    "a layer norm of sharded rows": (summed(of_x(lambda x: normed(x, -1))), IMAGE, P("x", "y")),
    "a batch norm of sharded rows": (summed(of_x(lambda x: normed(x, (0, 1, 2)))), IMAGE, P("x", "y")),
    "a dense layer of sharded rows": (summed(dense), ((8, 8, 8, 16), (16, 32)), P("x", "y")),
}


@pytest.fixture(scope="module")
def found():
    """Program -> (distance, its outputs' shardings are those of the plain one); a string: what was raised."""
    return json.loads(on_devices(__file__))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_numbers_and_shardings(name, found):
    assert isinstance(found[name], list), found[name]
    distance, alike = found[name]
    assert distance < 1e-4 and alike


def test_a_result_has_its_types_sharding(found):
    """A dense layer's, in the program as it is lowered."""
    assert "sdy.sharding_constraint" in found["lowered"]


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
    distance = max(float(np.abs(np.asarray(a) - b).max() / (np.abs(b).max() + 1e-30)) for a, b in both)
    return distance, all(a.sharding == b.sharding for a, b in both)


def main():
    warnings.simplefilter("error", jaxfuse.runtime.versions.UnreadWarning)
    with jax.set_mesh(mesh()):
        results = {name: compared(*program) for name, program in PROGRAMS.items()}
        args = (jax.device_put(jnp.ones((64, 16)), NamedSharding(mesh(), P("x"))), jnp.ones((16, 32)))
        results["lowered"] = jaxfuse.fuse(lambda x, w: x @ w, policy="always").lower(*args).as_text()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
