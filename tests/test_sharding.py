"""Ops on four devices: what each computes, and that activations sharded along the batch are not gathered.

The devices are simulated, which takes a fresh process: this file, run as a script, does the work there and prints what
it found, one JSON line for each setting.
"""

import contextlib
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfuse
from compare import distance, forward_and_gradients, jit, pairs
from jaxfuse import ops
from jaxfuse.ops import recurrent
from jaxfuse.runtime import ffi
from processes import on_devices

DEVICES = 4
TOLERANCE = 5e-5
SETTINGS = [
    "jit",
    "jit, explicit axes", "jit, explicit axes of the set mesh",
    "jit, batch over two axes",
    "jit, GSPMD",
    "jit, kernels off",
    "shard_map", "shard_map, check_vma=False",
    "shard_map over one of two axes",
]


@pytest.fixture(scope="module")
def found():
    """Setting -> what was found there; the process runs once for all tests."""
    return dict(map(json.loads, on_devices(__file__, DEVICES).splitlines()))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("function", ["conv", "batch_norm", "both", "layers"])
def test_as_on_one_device_and_nothing_is_gathered(function, setting, found):
    result = found[setting]
    if isinstance(result, str):
        pytest.skip(result)
    result = result[function]
    assert result["distance"] < TOLERANCE
    assert "all-gather" not in result["collectives"]
    assert result["kernels"] == result["kernels on one device"]


def test_a_batch_that_does_not_divide_is_computed_whole(found):
    result = found["jit, 6 on 4 devices"]
    assert all(result[function]["distance"] < TOLERANCE for function in ("conv", "batch_norm", "both", "layers"))


# (setting, function) -> kernels of its gradient. A loop's products of all steps at once are sharded along the batch, too, which is
# not their first axis.
STEPS = {
    ("jit, a fused step", "step"): {"batch_norm_bwd_stats", "batch_norm_bwd_apply", "conv_bwd"},
    ("jit, a fused loop", "looped"): {"lstm_bwd", "dense_bwd"},
    **{(f"jit, explicit axes{of_the_set_mesh}, a fused step", function): {kernel} for of_the_set_mesh in ("", " of the set mesh")
       for function, kernel in dict(
           normed="norm_bwd", step="batch_norm_bwd_apply", pooled="max_pool_bwd", attended="attention_bwd").items()},
}


@pytest.mark.parametrize("setting, function", STEPS)
def test_a_fused_step(setting, function, found):
    """Autodiff has run before the program is matched: the gradient's passes are sharded too, and their sums completed."""
    result = found[setting][function]
    assert result["distance"] < TOLERANCE
    assert not {"all-gather", *["all-to-all"] * (function == "looped")} & set(result["collectives"])
    assert result["kernels"] == result["kernels on one device"]
    if not ffi.no_onednn():
        assert {f"jaxfuse_{kernel}" for kernel in STEPS[setting, function]} <= set(result["kernels"])


def test_norms_of_sharded_places_are_left_alone(found):
    if not ffi.unavailable("jaxfuse_norm_bwd"):
        assert any("not along its first dimension" in reason for reason in found["explicit axes, places sharded"])


def test_convolutions_written_in_plain_jax_under_explicit_axes(found):
    """A sum of taps, and a transposed one as a product: their gradients are those of a shard, whatever the types say of the whole."""
    result = found["jit, explicit axes, in plain JAX"]["plain"]
    assert result["distance"] < TOLERANCE and "all-gather" not in result["collectives"] and not result["kernels"]


# --- in the process with four devices ----------------------------------------------------------------------------


def main():
    for setting, results in {
        "jit": lambda: in_jit(mesh_of(4)),
        "jit, explicit axes": lambda: in_jit(mesh_of(4, explicit=True)),
        "jit, explicit axes of the set mesh": lambda: with_the_mesh_set(mesh_of(4, explicit=True)),
        "jit, explicit axes, in plain JAX": lambda: in_jit(mesh_of(4, explicit=True), functions=(plain,)),
        "jit, batch over two axes": lambda: in_jit(mesh_of(2, 2)),
        "jit, GSPMD": with_gspmd,
        "jit, kernels off": without_kernels,
        "jit, 6 on 4 devices": lambda: in_jit(mesh_of(4), items=6),
        "jit, a fused step": lambda: in_jit(mesh_of(4), functions=(step,), differentiated=fused_step),
        "jit, a fused loop": with_a_fused_loop,
        "jit, explicit axes, a fused step": lambda: in_jit(
            mesh_of(4, explicit=True), functions=(normed, step, pooled, attended), differentiated=fused_step),
        "jit, explicit axes of the set mesh, a fused step": lambda: with_the_mesh_set(
            mesh_of(4, explicit=True), functions=(normed, step, pooled, attended), differentiated=fused_step),
        "explicit axes, places sharded": lambda: reasons_where_places_are_sharded(mesh_of(2, explicit=True)),
        "shard_map": lambda: in_shard_map(mesh_of(4)),
        "shard_map, check_vma=False": lambda: in_shard_map(mesh_of(4), check_vma=False),
        "shard_map over one of two axes": lambda: in_shard_map(mesh_of(2, 2)),
    }.items():
        print(json.dumps([setting, results()]))


def with_gspmd():
    if not hasattr(jax.config, "jax_use_shardy_partitioner"):
        return "this jax has no other partitioner than Shardy"
    with jax_option("jax_use_shardy_partitioner", False):
        return in_jit(mesh_of(4))


def with_the_mesh_set(mesh, **choices):
    with jax.set_mesh(mesh), fresh():
        return in_jit(mesh, **choices)


def without_kernels():
    with pytest.MonkeyPatch.context() as patch, fresh():
        patch.setattr(ffi, "unavailable", lambda target: "switched off by the test")
        return in_jit(mesh_of(4))


def with_a_fused_loop():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "WORTH_A_CALL", 0)
        return in_jit(mesh_of(4), functions=(looped,), differentiated=lambda f: forward_and_gradients(jaxfuse.fuse(f, policy="always")))


@contextlib.contextmanager
def jax_option(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    with fresh():
        yield
    jax.config.update(name, before)


@contextlib.contextmanager
def fresh():
    """Nothing that was compiled outside is used inside, and the other way round."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def mesh_of(*shape, explicit=False):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    return jax.make_mesh(shape, ("data", "more")[: len(shape)], axis_types=(kind,) * len(shape))


def arguments(items):
    rng = np.random.default_rng(0)
    shapes = dict(x=(items, 6, 6, 8), residual=(items, 6, 6, 8), w=(3, 3, 8, 8), bias=(8,), gamma=(8,), beta=(8,))
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["w"] *= 0.2
    arrays["x"] += np.arange(items).reshape(-1, 1, 1, 1)  # far apart: most of the variance is between shards
    return arrays


def conv(a):
    return (ops.conv(a["x"], a["w"], a["bias"], a["residual"], activation="relu"),)


def plain(a):
    taps = ops.conv(a["x"][..., :1], a["w"][:, :, :1, :1], activation="tanh")
    return taps, ops.conv(a["x"], a["w"][..., :2], lhs_dilation=(2, 2), padding=((2, 1), (2, 1)))


def batch_norm(a):
    return ops.batch_norm(a["x"], a["gamma"], a["beta"], a["residual"], activation="relu")


def both(a):
    (h,) = conv(a)
    y, mean, var = batch_norm(a | dict(x=h + a["x"]))
    return ops.conv(y, a["w"], a["bias"], h, activation="tanh"), mean, var


def layers(a):
    """A dense layer, layer norm, group norm and an LSTM over the places of an image."""
    filters = a["w"].reshape(9, 8, 8)
    y = ops.dense(a["x"], filters[0], a["bias"], a["residual"], activation="tanh")
    y = ops.layer_norm(y, a["gamma"], a["beta"], a["residual"], activation="silu")
    y = ops.group_norm(y, a["gamma"], a["beta"], groups=2)
    w_x, w_h = (jnp.concatenate(list(four), -1) for four in (filters[1:5], filters[5:9]))
    hs, h, _ = ops.lstm(jnp.moveaxis(y.reshape(len(y), 36, 8), 1, 0), w_x, w_h)
    return jnp.moveaxis(hs, 0, 1), h


def step(a):
    """As a user spells it, with nothing of jaxfuse."""
    conv = functools.partial(jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME",
                             dimension_numbers=("NHWC", "HWIO", "NHWC"))
    h = jax.nn.relu(conv(a["x"], a["w"]) + a["bias"]) + a["x"]
    mean, var = h.mean((0, 1, 2)), h.var((0, 1, 2))
    y = jax.nn.relu((h - mean) * jax.lax.rsqrt(var + 1e-5) * a["gamma"] + a["beta"] + a["residual"])
    return conv(y, a["w"]), mean, var


def normed(a):
    """A layer norm of what another one and a skip connection give."""

    def layer_norm(x):
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * a["gamma"] + a["beta"]

    y = layer_norm(a["x"]) + a["residual"]
    return y, jax.nn.relu(layer_norm(y))


def pooled(a):
    return (jax.lax.reduce_window(a["x"] * a["gamma"], -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),)


def attended(a):
    """Over the places of a row of the image, by two heads."""
    q = jnp.stack([a["x"][:, 0], a["residual"][:, 0]], 2)
    return (jax.nn.dot_product_attention(q, q * a["gamma"], q * a["beta"]),)


def reasons_where_places_are_sharded(mesh):
    arrays = arguments(8)
    along = {name: NamedSharding(mesh, P(None, "data") if of_batch(arrays)[name] else P()) for name in arrays}
    return [s.reason for s in jaxfuse.explain(forward_and_gradients(normed), jax.device_put(arrays, along), policy="always").skipped]


def fused_step(function):
    return jaxfuse.fuse(forward_and_gradients(function), policy="always")


def of_batch(arrays):
    return {name: name in ("x", "residual") for name in arrays}


def looped(a):
    """An LSTM over the places of an image, as a user writes it."""
    filters = a["w"].reshape(9, 8, 8)
    w_x, w_h = (jnp.concatenate(list(four), -1) for four in (filters[1:5], filters[5:9]))

    def cell(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ w_x + h @ w_h, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    xs = jnp.moveaxis(a["x"].reshape(len(a["x"]), 36, 8), 1, 0)
    return (jnp.moveaxis(jax.lax.scan(cell, (0 * xs[0], 0 * xs[0]), xs)[1], 0, 1),)


def in_jit(mesh, items=8, functions=(conv, batch_norm, both, layers), differentiated=forward_and_gradients):
    """Against the same on one device."""

    def result(function):
        arrays = arguments(items)
        run = alone = differentiated(function)
        on_one, kernels = on_one_device(differentiated, function, items, ffi.unavailable("jaxfuse_conv_fwd"))
        batch = P(mesh.axis_names)
        specs = {name: batch if along else P() for name, along in of_batch(arrays).items()}
        if items % DEVICES:  # only a constraint may shard unevenly
            along, specs = NamedSharding(mesh, batch), dict.fromkeys(specs, P())
            shard = functools.partial(jax.lax.with_sharding_constraint, shardings=along)
            run = lambda a: alone({n: shard(v) if of_batch(a)[n] else v for n, v in a.items()})
        return compared(run, arrays, mesh, specs, on_one, kernels)

    return {function.__name__: result(function) for function in functions}


@functools.cache
def on_one_device(differentiated, function, items, why_no_kernels):
    """What the program gives, and its kernels; compiled once for all meshes."""
    compiled = jit(differentiated(function)).lower(arguments(items)).compile()
    return compiled(arguments(items)), kernels_in(compiled)


def in_shard_map(mesh, check_vma=True):
    """Against every shard computed by itself on one device: batch statistics are those of a shard, as unfused."""
    axis, shards = mesh.axis_names[0], mesh.devices.shape[0]

    def result(function):
        arrays, alone = arguments(8), forward_and_gradients(lambda a: function(a)[:1])
        along = of_batch(arrays)
        specs = {name: P(axis) if along[name] else P() for name in arrays}

        def run(a):
            y, gradients = alone(a)
            if not check_vma:
                gradients = {n: g if along[n] else jax.lax.psum(g, axis) for n, g in gradients.items()}
            return y, gradients

        mapped = jax.shard_map(
            run, mesh=mesh, in_specs=(specs,), out_specs=((P(axis),), specs), axis_names={axis}, check_vma=check_vma)
        parts = [{n: np.split(a, shards)[i] if along[n] else a for n, a in arrays.items()} for i in range(shards)]
        on_one = jit(alone).lower(parts[0]).compile()
        ys, gradients = zip(*map(on_one, parts))
        whole = {n: (np.concatenate if along[n] else sum)([g[n] for g in gradients]) for n in arrays}
        expected = tuple(map(np.concatenate, zip(*ys))), whole
        return compared(mapped, arrays, mesh, specs, expected, kernels_in(on_one))

    return {function.__name__: result(function) for function in (conv, batch_norm, both, layers)}


def compared(run, arrays, mesh, specs, expected, kernels_on_one):
    """How far from `expected` on the mesh, and by which collectives and kernels."""
    placed = {name: jax.device_put(a, NamedSharding(mesh, specs[name])) for name, a in arrays.items()}
    compiled = jit(run).lower(placed).compile()
    return {
        "distance": max(distance(np.asarray(a), np.asarray(b)) for a, b in pairs(compiled(placed), expected)),
        "collectives": [name for name in ("all-gather", "all-reduce", "all-to-all") if f" {name}" in compiled.as_text()],
        "kernels": kernels_in(compiled),
        "kernels on one device": kernels_on_one,
    }


def kernels_in(compiled):
    return sorted(set(re.findall(r'custom_call_target="(jaxfuse_\w+)"', compiled.as_text())))


if __name__ == "__main__":
    main()
