"""python -m benchmarks.cost [compile | dispatch | matching]: what `fuse` costs before and between the kernels.

compile    seconds to trace, lower and compile a train step of ResNet-50 and of BERT-base, unfused and fused both ways
dispatch   microseconds of a call whose work is nothing, of `jax.jit(fn)` and of `fuse(jax.jit(fn))`
matching   seconds of processor time to find the sites of programs of 1000, 10000 and 50000 equations
"""

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp

import jaxfuse
from jaxfuse.fuse import plan
from jaxfuse.tuning.policy import unprofitable

from . import models


def best(function, repeats: int, clock=time.perf_counter) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        start = clock()
        function()
        times.append(clock() - start)
    return min(times)


# --- compile -----------------------------------------------------------------------------------------------------

NETWORKS = {
    "resnet50": (models.ResNet50(), jax.ShapeDtypeStruct((8, 224, 224, 3), jnp.float32)),
    "bert-base": (models.BertBase(), jax.ShapeDtypeStruct((8, 128), jnp.int32)),
}


def _unfused(function):
    return function


def _times(step, arguments) -> tuple[float, float, float]:
    """Seconds of tracing, lowering and compiling."""
    marks = [time.perf_counter()]
    stage = jax.jit(step)
    for name in ("trace", "lower", "compile"):
        stage = getattr(stage, name)(*(arguments if name == "trace" else ()))
        marks.append(time.perf_counter())
    return tuple(b - a for a, b in zip(marks, marks[1:]))


def measure_compile(repeats: int):
    labels = jax.ShapeDtypeStruct((8,), jnp.int32)
    for name, (model, inputs) in NETWORKS.items():
        shapes = jax.eval_shape(model.init, jax.random.key(0), inputs)
        params, stats = shapes["params"], shapes.get("batch_stats", {})
        arguments = models.TrainState(params, stats, params), inputs, labels
        ways = {
            "unfused": lambda: models.make_train_step(model, _unfused),
            "fuse(loss)": lambda: models.make_train_step(model, jaxfuse.fuse),
            "fuse(step)": lambda: jaxfuse.fuse(models.make_train_step(model, _unfused)),
        }
        found = {way: [] for way in ways}
        for _ in range(repeats):
            for way, make in ways.items():  # in turns, so that a busy moment meets all of them
                found[way].append(_times(make(), arguments))
        unfused = min(map(sum, found["unfused"]))
        for way, times in found.items():
            trace, lower, compiled = map(min, zip(*times))
            total = min(map(sum, times))
            print(f"{name:10} {way:10} trace {trace:5.2f} s  lower {lower:5.2f} s  compile {compiled:6.2f} s  "
                  f"total {total:6.2f} s  {total / unfused - 1:+.0%}", flush=True)


# --- dispatch ----------------------------------------------------------------------------------------------------


def measure_dispatch(repeats: int):
    calls = 500

    def many(function):
        for _ in range(calls):
            function()

    for leaves in (1, 20, 300):
        tree = {f"layer{i}": {"kernel": jnp.ones(2)} for i in range(leaves)}

        def fn(tree, rate, *, train):
            return tree["layer0"]["kernel"] * rate if train else rate

        plain = jax.jit(fn, static_argnames="train")
        candidates = {"jit": plain, "fuse(jit)": jaxfuse.fuse(plain), "fuse": jaxfuse.fuse(fn)}
        for function in candidates.values():
            function(tree, 0.1, train=True)
        found = {name: [] for name in candidates}
        for _ in range(repeats):
            for name, function in candidates.items():
                found[name].append(best(partial(many, partial(function, tree, 0.1, train=True)), 1) / calls * 1e6)
        row = "  ".join(f"{name} {min(times):6.1f} us" for name, times in found.items())
        print(f"{leaves:4} leaves  {row}", flush=True)


# --- matching ----------------------------------------------------------------------------------------------------


def conv_blocks(x, w, g, equations):
    for _ in range(equations // 22):
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        mean = y.mean((0, 1, 2))
        var = (y * y).mean((0, 1, 2)) - mean * mean
        x = jax.nn.relu((y - mean) * (jax.lax.rsqrt(var + 1e-5) * g) + g + x)
    return x


def elementwise(x, w, g, equations):
    for _ in range(equations // 2):
        x = jnp.sin(x) * g
    return x


def sums(x, w, g, equations):
    """Many small operations on one value that everything reads."""
    for _ in range(equations // 4):
        g = g + (x * x).sum((0, 1, 2)) * x.sum((0, 1, 2))
        x = x * 0.5
    return g


def fan_out(x, w, g, equations):
    """One value that everything reads."""
    total = x
    for i in range(equations // 2):
        total = total + x * float(i)
    return total


def gradient(program):
    return lambda x, w, g, equations: jax.grad(lambda *args: program(*args, equations // 3).sum(), (0, 1, 2))(x, w, g)


PROGRAMS = {"conv+bn+add+relu": conv_blocks, "its gradient": gradient(conv_blocks), "elementwise": elementwise,
            "sums": sums, "fan-out": fan_out, "fan-out's gradient": gradient(fan_out)}


def measure_matching(repeats: int, sizes=(1000, 10000, 50000)):
    x, w, g = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 8, 8, 16), (3, 3, 16, 16), (16,)))
    for name, program in PROGRAMS.items():
        for size in sizes:
            jaxpr = jax.make_jaxpr(partial(program, equations=size))(x, w, g)
            seconds = best(lambda: plan(jaxpr, unprofitable("always")), repeats, time.process_time)
            count = len(jaxpr.jaxpr.eqns)
            print(f"{name:18} {count:6} equations  {seconds:6.2f} s  {seconds / count * 1e6:6.1f} us each", flush=True)


def main():
    layout = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.cost", description=__doc__, formatter_class=layout)
    parser.add_argument("parts", nargs="*", help="which of the three; all if none is given")
    parser.add_argument("--repeats", type=int, default=3, help="of which the fastest counts (default: %(default)s)")
    arguments = parser.parse_args()
    parts = {"compile": measure_compile, "dispatch": measure_dispatch, "matching": measure_matching}
    unknown = set(arguments.parts) - set(parts)
    if unknown:
        parser.error(f"there is no part {min(unknown)!r}; there are {', '.join(parts)}")
    for name in arguments.parts or parts:
        parts[name](arguments.repeats)


if __name__ == "__main__":
    main()
