"""The number of threads at run time, and what does not depend on it; processes that fork, are spawned, end or are interrupted."""

import concurrent.futures
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from cases import CASES
from compare import fused, jit, pairs, with_cotangents
from conv_oracle import MANY_PIXELS, Case, backward, random
from jaxfuse import ops
from jaxfuse.commands import doctor
from jaxfuse.ops.conv import packed
from jaxfuse.ops.conv.config import ConvConfig
from jaxfuse.runtime import ffi, threads
from processes import python

COUNTS = [1, 2, 3, 16]
# Of these no sum is oneDNN's, which cuts its own by the number of threads.
OURS = ["batch_norm-residual_relu", "batch_norm-relu", "max_pool-3x3_stride2", "global_average_pool-many_places", "layer_norm-many_rows",
        "rms_norm-residual_sum_silu", "group_norm-images_silu",
        "lstm-two_threads", "gru-two_threads_zrn", "attention-plain", "attention-many_keys"]
FORWARD = ["conv-3x3", "conv-depthwise", "conv-groups_4", "dense-many_columns"]


@pytest.fixture(autouse=True)
def as_many_as_before():
    if ffi.native() is None:
        pytest.skip("the native module is not built")
    before = jaxfuse.get_num_threads()
    yield
    jaxfuse.set_num_threads(before)


def results_on(n, run, args):
    jaxfuse.set_num_threads(n)
    return jax.tree.map(lambda a: np.asarray(a).tobytes(), run(*args))


@pytest.mark.parametrize("scale", [1, 1e-19], ids=["normal", "denormal"])
@pytest.mark.parametrize("name", OURS + FORWARD)
def test_bits_on_any_number_of_threads(name, scale):
    """Products of numbers of 1e-19 are denormal: they are flushed whichever thread computes them."""
    case = CASES[name]
    targets = [target for target in ffi.TARGETS if target.startswith(f"jaxfuse_{case.module}")]
    if all(map(ffi.unavailable, targets)):
        pytest.skip("no such kernel here")
    arrays, cotangents = with_cotangents(case, jax.tree.map(lambda a: a * scale, case.inputs()))
    if name in OURS:
        run = fused(case)
    else:
        run = jit(lambda arrays, cotangents: case.fused(arrays))
    assert_same_bits(run, (arrays, cotangents))


def assert_same_bits(run, args):
    alone, *others = (results_on(n, run, args) for n in COUNTS)
    for other in others:
        assert other == alone


OUR_FILTERS = ["1-D, one input", "1-D, strided", "stem", "one input", "NCHW", "features in parts", "groups, dilated",
               "depthwise, NCHW", "two filters for each input", "3-D, dilated, groups"]


@pytest.mark.skipif(ffi.unavailable("jaxfuse_conv_bwd") is not None, reason="no such kernel here")
@pytest.mark.parametrize("name", OUR_FILTERS)
def test_bits_of_our_own_filter_gradients(name):
    case = MANY_PIXELS[name]

    def run(x, g):
        return backward(case, x, jnp.zeros(case.w), g, None, "none", want=("dw", "db"))

    args = random(case.x), random(case.y, seed=1)
    assert ffi.libraries(run, *args) == {"native"}
    assert_same_bits(run, args)


@pytest.mark.skipif(ffi.unavailable("jaxfuse_dense_bwd") is not None, reason="no such kernel here")
@pytest.mark.parametrize("name", ["bias_residual_silu", "long_sum", "many_rows", "many_columns", "attention_scores"])
def test_bits_of_our_own_dense_gradients(name):
    """Of float16, which oneDNN computes nowhere."""
    case = CASES["dense-" + name]
    args = with_cotangents(case, case.inputs("float16"))
    assert_same_bits(fused(case), args)


@pytest.mark.skipif(ffi.unavailable("jaxfuse_conv_packed") is not None, reason="no such kernel here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_packed_filters(dtype):
    """As `freeze` has them: packed, and convolved with."""
    x, w = random((3, 15, 17, 24), dtype), random((3, 3, 24, 40), dtype, seed=1)
    nhwc = jax.lax.conv_dimension_numbers(x.shape, w.shape, ("NHWC", "HWIO", "NHWC"))
    made = packed.config_of(ConvConfig((1, 1), ((1, 1), (1, 1)), (1, 1), 1, *nhwc, (1, 1)), x, w)
    assert_same_bits(jit(lambda x, w: packed.OP(made, x, *packed.pack(made, w))), (x, w))


def bias_gradient(filter_shape, layout=None):
    def run(g):
        return backward(Case(g.shape, filter_shape, layout=layout), g, jnp.zeros(filter_shape), g, None, "none", ("db",))

    return run


# Gradients of parameters that are sums over rows, each as a function of g, and g's shape. So large that parts of a sum come first,
# and these are then put together a few columns to a task.
OVER_ROWS = {
    "convolution": (bias_gradient((1, 1, 600, 600)), (40, 30, 30, 600)),
    "convolution, channels first": (bias_gradient((400, 400, 1, 1), ("NCHW", "OIHW", "NCHW")), (60, 400, 9, 11)),
    "dense": (lambda g: jax.vjp(lambda b: ops.dense(jnp.zeros((len(g), 1)), jnp.zeros((1, g.shape[1])), b), g[0])[1](g), (30000, 500)),
    "layer norm": (lambda g: jax.vjp(lambda b: ops.layer_norm(g, g[0], b), g[0])[1](g), (9000, 700)),
    "group norm": (lambda g: jax.vjp(lambda b: ops.group_norm(g, g[0, 0, 0], b, groups=4), g[0, 0, 0])[1](g), (64, 5, 5, 800)),
    "batch norm": (lambda g: jax.vjp(lambda b: ops.batch_norm(g, g[0], b)[0], g[0])[1](g), (20000, 600)),
}


@pytest.mark.parametrize("name", OVER_ROWS)
def test_bits_of_sums_over_rows(name):
    run, shape = OVER_ROWS[name]
    g = random(shape)
    assert_same_bits(jit(run), (g,))
    features = 1 if "first" in name else len(shape) - 1
    (total,) = jax.tree.leaves(jit(run)(g))
    exact = np.float64(g).sum(tuple(d for d in range(len(shape)) if d != features))
    assert np.abs(total - exact).max() <= 2e-6 * np.sqrt(g.size / shape[features])


def test_the_number_of_threads():
    for n in [*COUNTS, np.int64(2).item()]:
        jaxfuse.set_num_threads(n)
        assert jaxfuse.get_num_threads() == n
        assert threads.limit() == (n, "jaxfuse.set_num_threads")
    assert "2, by jaxfuse.set_num_threads" in doctor.doctor()
    for wrong in (0, -1, 1025, 2.0, "2", True, None):
        with pytest.raises(ValueError, match="n is .*, expected a whole number of 1 to 1024"):
            jaxfuse.set_num_threads(wrong)
    assert jaxfuse.get_num_threads() == 2


def test_a_number_that_changes_while_kernels_run():
    """oneDNN's primitives are made for a number of threads, and may run when it is another."""
    names = ["conv-3x3", "batch_norm-residual_relu", "lstm-two_threads"]
    runs = {name: jit(lambda arrays, name=name: CASES[name].fused(arrays)) for name in names}
    inputs = {name: CASES[name].inputs() for name in names}
    expected = {name: jax.block_until_ready(runs[name](inputs[name])) for name in names}
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = [pool.submit(lambda name: (name, jax.block_until_ready(runs[name](inputs[name]))), name) for name in names * 20]
        for i in range(100):
            jaxfuse.set_num_threads(COUNTS[i % 4])
        for name, result in (each.result() for each in found):
            for value, other in pairs(result, expected[name]):
                np.testing.assert_array_equal(value, other)


PROGRAM = """
    import os, signal, sys, threading, time, warnings
    import jax, jax.numpy as jnp, numpy as np
    import jaxfuse
    from jaxfuse import ops

    x, w, s = jnp.ones((4, 14, 14, 32)), jnp.ones((3, 3, 32, 32)) / 288, jnp.ones(32)

    @jax.jit
    def f(x):
        return ops.batch_norm(ops.conv(x, w, activation="relu"), s, s)[0] if conv else ops.layer_norm(x, s, s)

    def steps(x):
        return jax.lax.fori_loop(0, 300, lambda i, x: f(x), x)

    conv = not jaxfuse.runtime.ffi.no_onednn()
    expected = np.asarray(f(x))
"""


def run(code, signals=(), **environment):
    """Runs it after PROGRAM in a process of its own, which gets the signals when it has printed something."""
    paths = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(PROGRAM) + textwrap.dedent(code)], text=True,
        env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"} | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if signals:
        process.stdout.readline()
        time.sleep(0.5)  # until it is in the midst of it
    for each in signals:
        process.send_signal(each)
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error


def test_a_forked_child():
    """With a pool of its own, after the parent has used its. (A program that JAX has not run before the fork hangs there,
    without us too: its threads are gone.)"""
    code, out, error = run("""
        warnings.simplefilter("ignore")
        child = os.fork()
        if not child:
            signal.alarm(60)
            jaxfuse.set_num_threads(3)
            same = np.array_equal(np.asarray(f(x)), expected)
            os._exit(0 if same and jaxfuse.get_num_threads() == 3 else 1)
        print(os.waitpid(child, 0)[1], np.array_equal(np.asarray(f(x)), expected))
    """, OMP_NUM_THREADS="2")
    assert (code, out) == (0, "0 True\n"), error


def test_children_of_a_process_that_computed_nothing():
    """Forked with what is imported, as by a server that starts its workers, each with its first call to come."""
    done = python("-c", textwrap.dedent("""
        import os, signal, warnings
        import jax, jax.numpy as jnp
        import jaxfuse
        from jaxfuse import ops

        def total():
            x = jnp.ones((4, 14, 14, 32))
            return float(jax.jit(lambda x: ops.conv(x, jnp.ones((3, 3, 32, 32)) / 288, activation="relu").sum())(x))

        jaxfuse.set_num_threads(2)
        warnings.simplefilter("ignore")
        children = []
        for _ in range(2):
            if not (child := os.fork()):
                signal.alarm(60)
                os._exit(0 if total() > 0 else 1)
            children.append(child)
        print([os.waitpid(child, 0)[1] for child in children], total() > 0)
    """))
    assert done.stdout == "[0, 0] True\n", done.stderr


def test_the_process_ends_while_kernels_run():
    code, _, error = run("y = jax.jit(steps)(x)")
    assert code == 0, error


def test_ctrl_c_while_kernels_run():
    code, _, error = run("""
        g = jax.jit(steps)
        g(x).block_until_ready()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("runs")
        while True:
            g(x).block_until_ready()
    """, [signal.SIGINT])
    assert code == -signal.SIGINT and "KeyboardInterrupt" in error, error


def test_ctrl_c_while_a_command_compiles():
    """XLA goes on compiling on a thread of its own while the process ends."""
    code, out, error = run("""
        import runpy
        from jaxfuse.commands import tune

        def compile_long(quick):
            print("runs")
            for n in range(100, 200):  # unrolled
                jax.jit(lambda x: [x := jax.lax.sort(jnp.sin(x + i)) for i in range(n)][-1])(x[0, 0]).block_until_ready()

        tune.run = compile_long
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["jaxfuse", "bench", "--tune", "--quick"]
        runpy.run_module("jaxfuse", run_name="__main__", alter_sys=True)
    """, [signal.SIGINT])
    assert (code, out) == (130, ""), error


def test_threads_that_there_are_not():
    """Address space for one more stack: one of the threads asked for starts, and kernels run."""
    code, out, error = run("""
        import resource
        from jaxfuse.runtime import threads
        assert "processors" in threads.limit().reason or "CPU quota" in threads.limit().reason
        jaxfuse.set_num_threads(2)
        pages = int(open("/proc/self/statm").read().split()[0])
        stack = 8 << 20
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2 * stack, resource.RLIM_INFINITY))
        jaxfuse.set_num_threads(16)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(jaxfuse.get_num_threads() < 16, np.array_equal(np.asarray(f(x)), expected), "allows of 16" in threads.limit().reason)
    """, OMP_NUM_THREADS="many")
    assert (code, out) == (0, "True True True\n"), error
    assert error.count('OMP_NUM_THREADS is "many"') == 1 and "of 16 threads" in error


def layer_norm_of_a_spawned_worker(n):
    jaxfuse.set_num_threads(n)
    x = jnp.arange(1024.0).reshape(16, 64)
    return np.asarray(ops.layer_norm(x, jnp.ones(64), jnp.ones(64))), jaxfuse.get_num_threads()


def test_spawned_workers():
    here, _ = layer_norm_of_a_spawned_worker(2)
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        there, n = pool.submit(layer_norm_of_a_spawned_worker, 3).result(timeout=120)
    assert n == 3 and np.array_equal(here, there)
