"""python tests/stress.py [--calls N] [--compilations N]: whether memory stays flat over many calls and many compilations.

Calls: a train step of a small network, and inference, in two threads. Compilations: fused functions made, called and dropped,
each with another shape. Resident memory at the end may be 2 % and 20 MB above that after the first fifth; the exit status is 1 if it
is not. XLA keeps what it compiled until `jax.clear_caches`, which is called now and then; the same is done unfused beside it.
"""

import argparse
import concurrent.futures
import ctypes
import gc
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.progress import track

import jaxfuse

PARTS = 20


def network(params, x):
    """A convolution, batch norm, max pool, attention, layer norm and a dense layer, each with what follows."""
    dims = ("NHWC", "HWIO", "NHWC")
    y = jax.nn.relu(lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", dimension_numbers=dims) + params["b"])
    mean, var = y.mean((0, 1, 2)), y.var((0, 1, 2))
    y = jax.nn.relu((y - mean) * lax.rsqrt(var + 1e-5) * params["b"] + params["b"])
    y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    tokens = y.reshape(y.shape[0], -1, 2, 4)
    y = y.reshape(tokens.shape[0], -1, 8) + jax.nn.dot_product_attention(tokens, tokens, tokens).reshape(y.shape[0], -1, 8)
    y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5) * params["b"]
    return jax.nn.gelu(y @ params["v"] + params["b"]).mean(1)


def step(params, x):
    loss, gradients = jax.value_and_grad(lambda p: (network(p, x) ** 2).mean())(params)
    return loss, jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients)


def arguments(width: int = 12):
    rng = np.random.default_rng(width)
    shapes = dict(w=(3, 3, 4, 8), b=(8,), v=(8, 8))
    params = {name: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32) for name, shape in shapes.items()}
    return params, jnp.asarray(rng.normal(size=(2, 12, width, 4)), jnp.float32)


def resident() -> float:
    """Megabytes, after what is freed has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def many_calls(calls: int, fuse) -> list[float]:
    train, infer = fuse(step), fuse(network)
    params, x = arguments()
    memory = []
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for _ in track(range(PARTS), "calls", transient=True):
            def half(_):
                mine = params
                for _ in range(calls // PARTS // 4):
                    loss, mine = train(mine, x)
                    y = infer(mine, x)
                return bool(jnp.isfinite(loss) & jnp.isfinite(y).all())

            assert all(threads.map(half, range(2)))
            memory.append(resident())
    return memory


def many_compilations(compilations: int, fuse) -> list[float]:
    memory = []
    for _ in track(range(PARTS), "compilations", transient=True):
        for i in range(compilations // PARTS):
            loss, _ = fuse(lambda params, x: step(params, x))(*arguments(4 + 2 * (i % 25)))
            assert jnp.isfinite(loss)
        jax.clear_caches()
        memory.append(resident())
    return memory


def main() -> int:
    parser = argparse.ArgumentParser("python tests/stress.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--compilations", type=int, default=1_000)
    options = parser.parse_args()
    assert len(jaxfuse.explain(step, *arguments(), policy="always").fused) > 8
    grew = False
    for name, run, number in (("calls", many_calls, options.calls), ("compilations", many_compilations, options.compilations)):
        for how, fuse in (("fused", lambda fn: jaxfuse.fuse(fn, policy="always")), ("unfused", jax.jit)):
            memory = run(number, fuse)
            start, end = max(memory[: PARTS // 5]), memory[-1]
            print(f"{number} {name}, {how}: {start:.0f} MB after a fifth, {max(memory):.0f} at most, {end:.0f} at the end", flush=True)
            grew |= how == "fused" and end > 1.02 * start + 20
    return grew


if __name__ == "__main__":
    sys.exit(main())
