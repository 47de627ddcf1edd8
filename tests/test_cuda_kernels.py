"""The CUDA kernels, emulated on the CPU and on a GPU if there is one, beside the CPU's kernels of the same targets."""

import fcntl
import functools
import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cuda_emulated
from arrays import array
from jaxfuse.ops.batch_norm import OP as BATCH_NORM, Standard
from jaxfuse.ops.batch_norm_config import BatchNormConfig
from jaxfuse.ops.norm import OP as NORM
from jaxfuse.ops.op import Linear
from jaxfuse.runtime import cuda, ffi
from attributes import attributes
from jaxfuse.ops.activations import TABLE as ACTIVATIONS, named
from jaxfuse.ops.norm_config import NormConfig

pytestmark = pytest.mark.skipif(cuda_emulated.compiler() is None, reason="no g++ or clang++ to compile the kernels for the CPU")

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
# Of one rounding of the results: sums are taken in another order, and float16's reference is the CPU's float32.
ROUNDING = {"f32": 4e-6, "bf16": 2**-8, "f16": 2**-11}


# Where JAX has an NVIDIA GPU, each test runs twice.
WHERE = ["emulated", *["device"] * any(d.platform == "gpu" for d in jax.devices())]


@pytest.fixture(params=WHERE)
def call(request):
    """Calls a target. The arrays of the test are where it runs; XLA computes there in whole float32."""
    device = jax.devices("cpu")[0] if request.param == "emulated" else jax.devices("gpu")[0]
    with jax.default_device(device), jax.default_matmul_precision("float32"):
        yield request.getfixturevalue("emulated") if request.param == "emulated" else cuda.call


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()  # of this process; with xdist its parent is that of the whole run
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cuda_emulated"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:  # one of the test processes builds
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = folder / "emulated.so"
        cuda_emulated.register(library if library.exists() else cuda_emulated.build(folder))
    return cuda_emulated.call


@pytest.fixture
def on_cuda(call, monkeypatch):
    """What a stage's kernel for CUDA computes, near what is wanted."""
    if call is not cuda.call:
        monkeypatch.setattr(cuda, "call", call)
        monkeypatch.setattr(cuda, "unavailable", lambda target: None)

    def run(stage, config, args, wanted=None, tolerance=0):
        kernel, reason = stage.kernel(config, args, "cuda")
        assert kernel is not None and kernel.run is not None, reason
        got = jax.jit(lambda *args: kernel.run(config, args, ()))(*args)
        near(got, wanted or got, tolerance)
        return [np.asarray(g) for g in got]

    return run


def near(got, wanted, tolerance):
    """Relative to each number, and to the largest; bits have to be equal."""
    for g, w in zip(got, wanted, strict=True):
        assert g.shape == w.shape
        if g.dtype == jnp.uint8:
            np.testing.assert_array_equal(g, w)
            continue
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * np.abs(w[np.isfinite(w)]).max(initial=0))


def test_headers_against_float64(tmp_path):
    """Rounding, the dealing of rows (more than 2³¹ of them too) and moments, by a program of their own."""
    program = tmp_path / "fuzz"
    command = [cuda_emulated.compiler(), "-std=c++17", "-O1", "-ffp-contract=off", *cuda_emulated.includes(tmp_path)]
    subprocess.run([*command, str(cuda_emulated.HERE / "cuda" / "fuzz.cc"), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.stdout == "0 failures\n"


def random(seed, shape, dtype=jnp.float32, scale=1.0, offset=0.0):
    return array(scale * np.random.default_rng(seed).normal(size=shape) + offset, dtype)


def like(*arrays):
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


def both(call, target, out_types, *operands, **attrs):
    """Results of the kernel for CUDA and of the CPU's; that of batch norm has no float16 and computes in float32."""
    dtype = operands[0].dtype
    wide = jnp.float32 if dtype == jnp.float16 and "batch_norm" in target else dtype

    def run(call, dtype_of, operands):
        types = [jax.ShapeDtypeStruct(t.shape, dtype_of(t)) for t in out_types]
        return jax.jit(lambda *args: call(target, types, *args, **attrs))(*operands)

    ours = run(call, lambda t: t.dtype, operands)
    with jax.default_device(jax.devices("cpu")[0]):
        widened = [v.astype(wide) if v.dtype == dtype else v for v in operands]
        theirs = run(ffi.call, lambda t: wide if t.dtype == dtype else t.dtype, widened)
    near(ours, theirs, next(ROUNDING[name] for name, known in DTYPES.items() if known == dtype))
    return ours


# Rows that fill no chunk, one and several; channels that are aligned and not, one tile and several.
SHAPES = [(2, 3, 3, 24), (1, 1000, 1, 8), (5, 7, 9, 13), (3, 130, 3, 136), (1, 1, 1, 1), (600, 64)]


@pytest.mark.parametrize("dtype, shape", [(list(DTYPES)[i % 3], shape) for i, shape in enumerate(SHAPES)] + [("bf16", (70, 24))], ids=str)
def test_batch_norm(call, dtype, shape):
    """Statistics, the result and the mask, the gradient's sums and the gradient; then bit for bit the same again."""
    dtype, vector = DTYPES[dtype], random(9, shape[-1:])
    x, z, dy = (random(i, shape, dtype, offset=3.0 * (i == 0)) for i in range(3))
    mean, var = both(call, "jaxfuse_batch_norm_stats", [vector] * 2, x)
    again = jax.jit(lambda x: call("jaxfuse_batch_norm_stats", like(mean, var), x))(x)
    np.testing.assert_array_equal(again[0], mean)
    np.testing.assert_array_equal(again[1], var)
    affine = mean, 1 + 0.1 * vector, 0.3 * vector
    mask = jax.ShapeDtypeStruct((x.size // shape[-1], -(-shape[-1] // 8)), jnp.uint8)
    forward = attributes("relu")
    y, bits = both(call, "jaxfuse_batch_norm_apply", [x, mask], x, *affine, z, has_residual=True, save_mask=True, **forward)
    want = np.packbits(np.asarray(y, np.float32).reshape(mask.shape[0], -1) > 0, axis=-1, bitorder="little")
    np.testing.assert_array_equal(bits, want)
    backward = dict(**forward, deriv="mask", has_residual=False)
    both(call, "jaxfuse_batch_norm_bwd_stats", [vector] * 2, dy, x, mean, bits, **backward)
    both(call, "jaxfuse_batch_norm_bwd_apply", [x, x], dy, x, mean, *affine, bits, want_dresidual=True, **backward)


@pytest.mark.parametrize("activation, channels, has_residual",
                         [(a, 16 if i % 2 else 11, i % 3 == 0) for i, a in enumerate(ACTIVATIONS)] + [("relu", 16, False)])
def test_activations_of_batch_norm(call, activation, channels, has_residual):
    """And their derivatives, computed again from x and the residual."""
    x, z, dy = (random(i, (70, channels), scale=3) for i in range(3))
    vectors = [random(i, (channels,)) for i in range(3, 7)]
    attrs = attributes(activation, 0.3) | dict(has_residual=has_residual)
    added = (z,) * has_residual
    both(call, "jaxfuse_batch_norm_apply", [x], x, *vectors[:3], *added, save_mask=False, **attrs)
    saved = () if activation == "none" else (*vectors[:3], *added)
    attrs["deriv"] = "recompute" if saved else "none"
    both(call, "jaxfuse_batch_norm_bwd_stats", vectors[:2], dy, x, vectors[0], *saved, **attrs)
    both(call, "jaxfuse_batch_norm_bwd_apply", [x], dy, x, vectors[0], *vectors[1:], *saved, want_dresidual=False, **attrs)


def test_nan_and_inf_of_batch_norm(call):
    """They come out where they would have, and spoil no other channel. Large means cost no digits of the variance."""
    x = np.array(random(0, (500, 16), offset=1000.0))
    x[3, 1], x[499, 2], x[0, 3] = np.nan, np.inf, -np.inf
    mean, var = jax.jit(lambda x: call("jaxfuse_batch_norm_stats", [jax.ShapeDtypeStruct((16,), jnp.float32)] * 2, x))(x)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(mean, x.astype(np.float64).mean(0), rtol=1e-6)
        np.testing.assert_allclose(var, x.astype(np.float64).var(0), rtol=2e-5)


# outer, groups, length: one warp a row and several, rows that no team has, parameters of groups, unaligned rows, the longest row.
NORMS = [(70, 1, 64), (5, 1, 520), (36, 3, 104), (9, 1, 77), (1, 2, 8192), (2, 1, 2052), (600, 1, 768), (3, 1, 4101)]


@pytest.mark.parametrize("dtype, sizes, centered, outside, has_residual", [
    (list(DTYPES)[i % 3], sizes, i % 5 != 0, i % 4 == 3, i % 2 == 1) for i, sizes in enumerate(NORMS)], ids=str)
def test_norm(call, dtype, sizes, centered, outside, has_residual):
    """With the sum and the statistics, and with all gradients."""
    dtype, (outer, groups, length) = DTYPES[dtype], sizes
    shape = outer, 1, groups, length
    x, z, dy, ds = (random(i, shape, dtype, offset=2.0 * (i == 0)) for i in range(4))
    gamma, beta = 1 + random(4, (groups, length)), random(5, (groups, length))
    vectors, statistics = [jax.ShapeDtypeStruct(gamma.shape, jnp.float32)] * 2, [jax.ShapeDtypeStruct((outer, groups), jnp.float32)] * 2
    attrs = dict(inner=shape[1:], centered=centered, epsilon=1e-5, epsilon_outside=outside, **attributes("none"))
    compared = functools.partial(both, call, **attrs)
    full = [x, z][: 1 + has_residual]
    outs = compared("jaxfuse_norm_fwd", [x] * (1 + has_residual) + statistics, x, gamma, beta, *full[1:], has_residual=has_residual,
                    wants_sum=has_residual, saving=True)
    mean, rstd = outs[-2:]
    s = outs[1] if has_residual else x
    more = (ds,) * has_residual
    compared("jaxfuse_norm_bwd", [x, *vectors], dy, s, gamma, beta, mean, rstd, *more, has_ds=has_residual, wants_parameters=True)
    if groups == 1:
        compared("jaxfuse_norm_bwd", [x], dy, s, gamma, beta, mean, rstd, has_ds=False, wants_parameters=False)


def refuses(call, target, message, operands, **attrs):
    with pytest.raises(Exception, match=f"{target}: .*{message}"):
        jax.block_until_ready(jax.jit(lambda *a: call(target, like(a[0]), *a, **attrs))(*operands))


def test_refusals_name_the_target(call):
    x, vector = random(0, (4, 8)), random(1, (8,))
    attrs = attributes("relu") | dict(has_residual=False, save_mask=False)
    for operands, options, message in [
        ((x, vector, vector, vector[:7]), {}, "offset has shape"),
        ((x.astype(jnp.int32), vector, vector, vector), {}, "x has dtype int32"),
        ((x, vector, vector, vector), attributes("cubic"), "expected one of"),
        ((x, vector, vector), {}, "got 3 operands, expected 4"),
    ]:
        refuses(call, "jaxfuse_batch_norm_apply", message, operands, **attrs | options)


class TestPlansOfCudnn:
    """The handler that runs them, by a libcudnn whose plans add a number (`tests/cuda/fake_cudnn.c`)."""

    @pytest.fixture
    def run(self, emulated):
        def run(plan, x=jnp.arange(8.0), workspace=64, **attrs):
            outs = [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((workspace,), jnp.uint8)]
            attrs = dict(plan=plan, digest=plan, uids=(1, 4), operands=1, what="conv of a test") | attrs
            return jax.jit(lambda x: emulated("jaxfuse_cudnn_graph", outs, x, **attrs))(x)[0]

        return run

    def test_each_call_runs_its_plan(self, run):
        for plan, added in (("add 7 64", 7), ("add 2 0", 2), ("add 7 64", 7)):
            np.testing.assert_array_equal(run(plan), np.arange(8.0) + added)

    @pytest.mark.parametrize("options, words", [
        (dict(plan="what?"), "conv of a test: setting an attribute: cuDNN says CUDNN_STATUS_NOT_SUPPORTED: no such plan"),
        (dict(plan="add 1 65"), "jaxfuse_cudnn_graph: workspace has 64 bytes, the plan needs 65"),
        (dict(plan="add 1 0", uids=(1, 3)), "conv of a test: cudnnBackendExecute: cuDNN says CUDNN_STATUS_NOT_SUPPORTED: other tensors"),
        (dict(plan="add 1 0", operands=3), "attribute operands is 3, expected at most 2, as there are uids"),
        (dict(plan="add 1 0", uids=(1, 4, 5)), "got 2 results, expected 3")])
    def test_errors_name_the_op_and_the_status(self, run, options, words):
        with pytest.raises(Exception, match=words.replace("?", r"\?")):
            run(**options).block_until_ready()


@pytest.mark.parametrize("fused, config, parameters", [
    (BATCH_NORM, BatchNormConfig(2, Standard(1e-5), has_residual=True, activation=named("relu")), (24,)),
    (NORM, NormConfig((1, 1, 24), 1, 1e-6, has_residual=True), (1, 24)),
], ids=["batch_norm", "norm"])
def test_ops_by_their_kernels_for_cuda(on_cuda, fused, config, parameters):
    """Forward and backward stages as they are lowered for CUDA, with every result the reference has."""
    x, z, dy = (random(i, (4, 5, 24)) for i in range(3))
    args = x, z, 1 + random(3, parameters), random(4, parameters)
    differentiated = fused.for_autodiff(config)

    def of(stage, config, args):
        return on_cuda(stage, config, args, stage.reference(config, *args), 2e-5)

    outs = of(fused.forward, differentiated, args)
    residuals = fused.residuals(differentiated, args, outs)
    cotangents = [dy, *(jnp.ones_like(out) for out in outs[1 : len(outs) - differentiated.residual_outs])]
    types = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args)
    of(fused.backward, Linear(differentiated, (True,) * 4, types, len(residuals)), (*residuals, *cotangents))
