"""python -m benchmarks.swapped [linen] [nnx] [--batch N] [--turns N] [--small]: models whose layers were exchanged.

A train step of Flax's ResNet-50 in the style of its examples, once with the loss fused as a function, `jaxfuse.fuse(loss)`, and
once with the model itself exchanged in one line, `jaxfuse.flax.linen.replace(model)` or `jaxfuse.flax.nnx.replace(model)`. The
calls alternate; what is printed are medians, and how much longer the exchanged model takes: it should be within 3 %.
"""

import argparse
import statistics
import time

import jax

import jaxfuse
import jaxfuse.flax.linen
import jaxfuse.flax.nnx

from .networks import Network
from .networks.flax_linen import resnet50 as linen_resnet50
from .networks.flax_nnx import resnet50 as nnx_resnet50

MODELS = {
    "linen": (lambda small, exchange: linen_resnet50(small, "float32", exchange), jaxfuse.flax.linen.replace),
    "nnx": (nnx_resnet50, jaxfuse.flax.nnx.replace),
}


def train_step(loss):
    def step(params, state, x, labels):
        (number, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, x, labels)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), state, number

    return jax.jit(step)


def arguments(network: Network, batch: int | None):
    params, state = network.init()
    x = jax.random.normal(jax.random.key(1), (batch or network.x.shape[0], *network.x.shape[1:]), network.x.dtype)
    return params, state, x, jax.numpy.zeros(x.shape[0], int)


def measure(name: str, batch: int | None, turns: int, small: bool) -> dict[str, list[float]]:
    """Milliseconds of each call, {"fuse(loss)": [...], "replace(model)": [...]}."""
    build, replace = MODELS[name]
    plain, exchanged = build(small, lambda model: model), build(small, replace)
    given = arguments(plain, batch)
    steps = {way: train_step(loss).lower(*given).compile()
             for way, loss in (("fuse(loss)", jaxfuse.fuse(plain.loss)), ("replace(model)", exchanged.loss))}
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(turns + 1):
        for way, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(*given))
            times[way].append(1e3 * (time.perf_counter() - start))
    return {way: found[1:] for way, found in times.items()}  # the first ones fill caches


def main():
    parser = argparse.ArgumentParser("python -m benchmarks.swapped", description=__doc__.partition(": ")[2])
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], metavar="linen | nnx", help="default: both")
    parser.add_argument("--batch", type=int, help="images in a batch (default: 8)")
    parser.add_argument("--turns", type=int, default=10, help="calls of each")
    parser.add_argument("--small", action="store_true", help="tiny networks, to see that everything works")
    given = parser.parse_args()
    for name in given.models or MODELS:
        times = measure(name, given.batch, given.turns, given.small)
        fused, exchanged = map(statistics.median, times.values())
        print(f"{name:6} fuse(loss) {fused:8.1f} ms ({min(times['fuse(loss)']):.1f} to {max(times['fuse(loss)']):.1f})   "
              f"replace(model) {exchanged:8.1f} ms ({min(times['replace(model)']):.1f} to {max(times['replace(model)']):.1f})   "
              f"{exchanged / fused - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
