"""Exported programs: by targets that keep their meaning, loaded in a fresh process, for any batch. Programs compiled ahead of
time, taken from the disk, and checked."""

import dataclasses
import functools
import json
import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, serialize_executable

import jaxfuse
from cases import CASES, CORE
from compare import distance, forward_and_gradients, pairs
from jaxfuse.ops.conv import expanded, int8, packed
from jaxfuse.ops.conv.config import ConvConfig
from jaxfuse.runtime import ffi
from layers import conv
from processes import printed_by
from spellings.recurrent import gru, lstm, sequence

EACH = {CASES[name].op: CASES[name] for name in reversed(CORE)}  # one case of each op
PROMISE = json.loads(pathlib.Path(__file__).with_name("exported_targets.json").read_text())
ATTRIBUTES = re.compile(r"stablehlo\.custom_call @(jaxfuse_\w+)\(.*?mhlo\.backend_config = \{(.*?)\}, ", re.DOTALL)
native = pytest.mark.skipif(ffi.no_onednn() is not None, reason="not every kernel is built")


def exported(function, *args, **options):
    return jax.export.export(jax.jit(function), **options)(*args)


def called(module: str) -> dict[str, set[str]]:
    """Target -> the names and types of its attributes, as text."""
    found: dict[str, set[str]] = {}
    for target, attributes in ATTRIBUTES.findall(module):
        typed = re.findall(r'(\w+) = (true|false|"[^"]*"|dense<[^>]*> : tensor<\d+x\w+>|[-+.e\w]+ : \w+)', attributes)
        found.setdefault(target, set()).update(f"{name}: {_type(value)}" for name, value in typed)
    return found


def _type(value: str) -> str:
    kinds = {"true": "bool", "false": "bool"}
    if array := re.fullmatch(r"dense<.*x(\w+)>", value):
        return f"array of {array[1]}"
    return kinds.get(value) or ("str" if value[0] == '"' else value.split()[-1])


@native
@pytest.mark.parametrize("op", EACH)
def test_by_promised_targets(op):
    """Without any argument to `jax.export`. A handler that takes other attributes than `exported_targets.json` says must get
    another version, and the old one stay: programs out there call it."""
    function, arrays = forward_and_gradients(EACH[op].fused), EACH[op].inputs()
    program = exported(function, arrays)
    targets = called(program.mlir_module())
    assert targets and all(name.endswith(f"_v{ffi.VERSION}") for name in targets)
    assert {name: sorted(attributes) for name, attributes in targets.items()} == {name: PROMISE[name] for name in targets}
    for value, wanted in pairs(jax.jit(program.call)(arrays), jax.jit(function)(arrays)):
        assert distance(value, wanted) < 1e-6


@native
def test_a_packed_filter_by_promised_targets():
    x, w = jnp.ones((1, 5, 5, 3)), jnp.ones((3, 3, 3, 8))
    nhwc = lax.conv_dimension_numbers(x.shape, w.shape, ("NHWC", "HWIO", "NHWC"))
    conv = ConvConfig((1, 1), ((1, 1), (1, 1)), (1, 1), 1, *nhwc, (1, 1))
    made, in_int8 = packed.config_of(conv, x, w), int8.config_of(conv, w.shape, int8.Range.of(0, 1), narrow=True)
    gated, factors = dataclasses.replace(made, gated=True), jnp.ones((1, 3))
    expansion, depthwise, bias = packed.config_of(dataclasses.replace(conv, padding=((0, 0),) * 2), x, w[:1, :1]), w[:, :, :1], jnp.ones(8)
    both = expanded.ExpandedConfig(expansion, dataclasses.replace(conv, feature_group_count=8, has_bias=True))
    with ffi.exporting():
        filters = packed.pack(made, w)
        programs = (exported(functools.partial(packed.OP, made), x, *filters),
                    exported(functools.partial(packed.OP, gated), x, *filters, factors),
                    exported(functools.partial(expanded.OP, both), x, *packed.pack(expansion, w[:1, :1]), depthwise, bias),
                    exported(functools.partial(int8.OP, in_int8), x, *int8.pack(in_int8, w)), exported(lambda w: packed.pack(made, w), w))
    targets = [f"jaxfuse_conv_{name}" for name in ("packed", "gated", "expanded", "int8", "pack")]
    for target, program in zip(targets, programs, strict=True):
        assert {name: sorted(attributes) for name, attributes in called(program.mlir_module()).items()} == {
            ffi.promised(target): PROMISE[ffi.promised(target)]}


@native
def test_the_promise_names_what_is_registered():
    assert {ffi.promised(target) for target in ffi.TARGETS} == set(PROMISE)


def dense(x, w):
    return jax.nn.relu(x @ w)


def relu_of_conv(x, w):
    return jax.nn.relu(conv(x, w))


def norm(x, w):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * w


def group_norm(x, w):
    y = x.reshape(*x.shape[:-1], 4, 4)
    return ((y - y.mean((1, 2, 4), keepdims=True)) * jax.lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-5)).reshape(x.shape) * w


def batch_norm(x, w):
    axes = tuple(range(x.ndim - 1))
    return (x - x.mean(axes)) * jax.lax.rsqrt(x.var(axes) + 1e-5) * w


def attention(x, w, **options):
    q, k = (v.reshape(*x.shape[:-1], 2, 8) for v in (x @ w, x))
    return jax.nn.dot_product_attention(q, k, k, **options)


def recurrent(cell):
    """Over a sequence, from a state of zeros; the weights of x and of the state are one array."""
    def run(x, w):
        zeros = jnp.zeros((x.shape[0], 16))
        return sequence(cell)(x, zeros, zeros, w[:16], w[16:])[0][0]

    return run


SYMBOLIC = {
    "dense": (dense, (16,), (16, 8)),
    "dense of sequences": (dense, (5, 16), (16, 8)),
    "dense, scaled": (lambda x, w: dense(x, w) * w[0], (16,), (16, 8)),
    "conv": (relu_of_conv, (6, 6, 8), (3, 3, 8, 8)),
    "max pool": (lambda x, w: jax.lax.reduce_window(x * w, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), (6, 6, 8), (8,)),
    "global average pool": (lambda x, w: x.mean((1, 2)) * w, (6, 6, 8), (8,)),
    "batch norm": (batch_norm, (4, 4, 8), (8,)),
    "batch norm of rows": (batch_norm, (8,), (8,)),
    "batch norm and its variance of samples": (lambda x, w: batch_norm(x, w) + x.var(tuple(range(x.ndim - 1)), ddof=1), (4, 4, 8), (8,)),
    "norm": (norm, (6, 8), (8,)),
    "group norm": (group_norm, (6, 5, 16), (16,)),
    "attention": (attention, (6, 16), (16, 16)),
    "attention, masked": (lambda x, w: attention(x, w, is_causal=True), (6, 16), (16, 16)),
    "lstm": (recurrent(lstm), (5, 16), (32, 64)),
    "gru": (recurrent(lambda x, h, c, w, u: (gru(x, h, w, u), c)), (5, 16), (32, 48)),
}
WHOLE = {"attention", "lstm", "gru"}  # of several products, which might be fused one by one


@native
@pytest.mark.parametrize("name", SYMBOLIC)
def test_of_any_batch(name):
    """With kernels, forward and in the gradients."""
    function, x_shape, w_shape = SYMBOLIC[name]
    both = lambda x, w: (function(x, w), jax.grad(lambda x, w: jnp.sum(jnp.sin(function(x, w))), (0, 1))(x, w))
    (batch,) = jax.export.symbolic_shape("b")
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((batch, *x_shape), w_shape)]
    assert name not in WHOLE or name in {site.pattern for site in jaxfuse.explain(function, *types, policy="always").fused}
    program = exported(jaxfuse.fuse(both, policy="always"), *types)
    backward = {"_bwd" in target for target in called(program.mlir_module())}
    assert backward == ({False} if name == "global average pool" else {False, True})  # whose gradient is a broadcast
    rng = np.random.default_rng(0)
    for batch in (1, 5):
        x, w = (rng.normal(size=shape).astype("float32") for shape in ((batch, *x_shape), w_shape))
        for value, wanted in pairs(program.call(x, w), jax.jit(both)(x, w)):
            assert distance(value, wanted) < 1e-5


def test_for_several_platforms():
    x, w = np.ones((2, 16), np.float32), np.ones((16, 8), np.float32)
    program = exported(jaxfuse.fuse(dense, policy="always"), x, w, platforms=("cpu", "cuda", "tpu"))
    assert np.array_equal(program.call(x, w), dense(x, w))


LOADED = """
import sys, jax, numpy as np
program = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
x, w = np.ones((2, 16), np.float32), np.ones((16, 8), np.float32)
try:
    program.call(x, w)
except Exception as error:
    print("without:", error)
import jaxfuse
print("with:", np.asarray(program.call(x, w)).sum())
"""


@native
def test_loaded_in_a_fresh_process(tmp_path):
    pytest.importorskip("flatbuffers")
    x, w = np.ones((2, 16), np.float32), np.ones((16, 8), np.float32)
    (tmp_path / "program").write_bytes(exported(jaxfuse.fuse(dense, policy="always"), x, w).serialize())
    said = printed_by("-c", LOADED, tmp_path / "program")
    assert "with: 256.0" in said and re.search(r"without:.*jaxfuse_dense_fwd_v1", said, re.DOTALL)


EVERY_OP = """
import pathlib, sys, jax, jaxfuse, numpy as np
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.program")):
    given, wanted = (list(np.load(path.with_suffix(end)).values()) for end in (".given.npz", ".wanted.npz"))
    found = jax.export.deserialize(bytearray(path.read_bytes())).call(*given)
    errors = [np.abs(a - b).max() / max(1e-30, np.abs(b).max()) for a, b in zip(found, wanted, strict=True)]
    assert max(errors) < 1e-6, (path, errors)
    print(path.stem)
"""


@pytest.mark.costly
@native
def test_every_op_in_a_fresh_process(tmp_path):
    pytest.importorskip("flatbuffers")
    for op, case in EACH.items():
        leaves, tree = jax.tree.flatten(case.inputs())
        run = jax.jit(lambda *leaves: jax.tree.leaves(forward_and_gradients(case.fused)(tree.unflatten(leaves))))
        (tmp_path / f"{op}.program").write_bytes(exported(run, *leaves).serialize())
        np.savez(tmp_path / f"{op}.given.npz", *leaves)
        np.savez(tmp_path / f"{op}.wanted.npz", *run(*leaves))
    assert printed_by("-c", EVERY_OP, tmp_path).split() == sorted(EACH)


def network(parameters, x):
    return jnp.mean(relu_of_conv(x, parameters["w"]), (1, 2)) @ parameters["d"]


def loss(parameters, x):
    return jnp.mean(network(parameters, x) ** 2)


def arguments():
    rng = np.random.default_rng(0)
    parameters = dict(w=0.1 * rng.normal(size=(3, 3, 8, 8)), d=rng.normal(size=(8, 4)))
    return jax.tree.map(lambda a: a.astype("float32"), (parameters, rng.normal(size=(4, 8, 8, 8))))


def close(made, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), made, expected)


@native
def test_the_gradient_of_what_was_loaded():
    pytest.importorskip("flatbuffers")
    written = exported(jaxfuse.fuse(loss, policy="always"), *arguments()).serialize(vjp_order=1)
    loaded = jax.export.deserialize(written)
    assert "jaxfuse_conv_bwd_v1" in loaded.vjp().mlir_module()
    close(jax.grad(loaded.call)(*arguments()), jax.grad(loss)(*arguments()))


@native
def test_of_any_height_and_width():
    """The pixels' mean divides by a number that is not known: XLA's. The convolution and the dense layer are ours."""
    height, width = jax.export.symbolic_shape("h, w")
    parameters, x = arguments()
    program = exported(jaxfuse.fuse(network, policy="always"), parameters, jax.ShapeDtypeStruct((4, height, width, 8), jnp.float32))
    assert {"jaxfuse_conv_fwd_v1", "jaxfuse_dense_fwd_v1"} == set(called(program.mlir_module()))
    close(program.call(parameters, x), network(parameters, x))


@native
def test_batch_norms_of_any_height_and_width():
    function = lambda x, w: jax.nn.relu(batch_norm(relu_of_conv(x, w), w[0, 0, 0]))
    both = lambda x, w: (function(x, w), jax.grad(lambda x, w: jnp.sum(jnp.sin(function(x, w))), (0, 1))(x, w))
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (jax.export.symbolic_shape("b, h, w, 8"), (3, 3, 8, 8))]
    program, rng = exported(jaxfuse.fuse(both, policy="always"), *types), np.random.default_rng(0)
    assert {"jaxfuse_batch_norm_stats_v1", "jaxfuse_batch_norm_bwd_stats_v1", "jaxfuse_conv_fwd_v1"} <= set(called(program.mlir_module()))
    for shape in ((2, 5, 6, 8), (1, 8, 3, 8)):
        x, w = (rng.normal(size=s).astype("float32") for s in (shape, (3, 3, 8, 8)))
        for value, wanted in pairs(program.call(x, w), jax.jit(both)(x, w)):
            assert distance(value, wanted) < 1e-4


@native
def test_a_train_step_of_any_batch():
    """Of convolutions and batch norms of Flax: their kernels, both ways."""
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3), use_bias=False)(x)))
            return nn.Dense(3)(x.mean((1, 2)))

    def step(variables, x):
        def loss(parameters):
            y, changed = Network().apply(variables | {"params": parameters}, x, mutable=["batch_stats"])
            return jnp.sum(jnp.sin(y)), changed

        return jax.value_and_grad(loss, has_aux=True)(variables["params"])

    variables = Network().init(jax.random.key(0), jnp.ones((1, 8, 8, 8)))
    (batch,) = jax.export.symbolic_shape("b")
    types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), variables), jax.ShapeDtypeStruct((batch, 8, 8, 8), jnp.float32)
    report = jaxfuse.explain(step, *types, policy="always")
    assert sum(site.pattern == "bn+relu" for site in report.fused) == 4 and not report.skipped
    program = exported(jaxfuse.fuse(step, policy="always"), *types)
    for size in (2, 5):
        x = np.random.default_rng(0).normal(size=(size, 8, 8, 8)).astype("float32")
        for value, wanted in pairs(program.call(variables, x), jax.jit(step)(variables, x)):
            assert distance(value, wanted) < 1e-4


def ahead_of_time():
    compiled = jaxfuse.fuse(loss, policy="always").lower(*arguments()).compile()
    close(compiled(*arguments()), loss(*arguments()))
    written = serialize_executable.serialize(compiled)
    close(serialize_executable.deserialize_and_load(*written)(*arguments()), loss(*arguments()))


def test_ahead_of_time():
    """`lower(...).compile()`, and its executable written and read. JAX 0.12 does not write whole what came from its own cache."""
    printed_by("-c", "import test_export; test_export.ahead_of_time()", JAX_ENABLE_COMPILATION_CACHE="false")


CACHED = """
import sys, jax, jaxfuse, jax.numpy as jnp, numpy as np
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
y = jaxfuse.fuse(lambda x, w: jax.nn.relu(x @ w), policy="always")(np.ones((2, 16), "float32"), np.ones((16, 8), "float32"))
print(float(y.sum()), sum("cache_hits" in event for event in hits) > 0)
"""


@pytest.mark.costly
def test_persistent_compilation_cache(tmp_path):
    """A second process takes the compiled program from the disk, and it runs."""
    assert [printed_by("-c", CACHED, tmp_path) for _ in range(2)] == ["256.0 False\n", "256.0 True\n"]


def test_checkify_outside_and_inside():
    def checked(parameters, x):
        checkify.check(jnp.all(x < 100), "large")
        return loss(parameters, x)

    parameters, x = arguments()
    error, value = checkify.checkify(jaxfuse.fuse(loss, policy="always"), errors=checkify.float_checks)(parameters, x)
    assert error.get() is None
    close(value, loss(parameters, x))
    error, _ = checkify.checkify(jaxfuse.fuse(loss, policy="always"), errors=checkify.float_checks)(parameters, x * np.nan)
    assert "nan generated" in error.get()
    inside = jaxfuse.fuse(checkify.checkify(checked), policy="always")
    assert inside(parameters, x)[0].get() is None and "large" in inside(parameters, x + 200)[0].get()
    close(inside(parameters, x)[1], loss(parameters, x))
