"""python -m benchmarks.swapped [linen] [nnx] [--batch N] [--turns N] [--small]: models whose layers were exchanged.

A train step of Flax's ResNet-50 in the style of its examples, once with the loss fused as a function, `jaxfuse.fuse(loss)`, and
once with the model itself exchanged in one line, `jaxfuse.flax.linen.replace(model)` or `jaxfuse.flax.nnx.replace(model)`. The
calls alternate; what is printed are medians, and how much longer the exchanged model takes in a turn of one call of each, with
the interval that holds the median with 95 %: it should be within 3 %.
"""

import argparse
import math
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


def compiled(name: str, batch: int | None, small: bool):
    """({"fuse(loss)": step, "replace(model)": step}, their arguments)"""
    build, replace = MODELS[name]
    plain, exchanged = build(small, lambda model: model), build(small, replace)
    given = arguments(plain, batch)
    losses = {"fuse(loss)": jaxfuse.fuse(plain.loss), "replace(model)": exchanged.loss}
    return {way: train_step(loss).lower(*given).compile() for way, loss in losses.items()}, given


def turns(steps, given, number: int) -> list[tuple[float, float]]:
    """Milliseconds of each way, `number` times; who is first changes from turn to turn, so that a drift meets both."""

    def milliseconds(step):
        start = time.perf_counter()
        jax.block_until_ready(step(*given))
        return 1e3 * (time.perf_counter() - start)

    one, other = steps.values()
    for step in (one, other):
        milliseconds(step)  # the first call fills caches
    pairs = []
    for i in range(number):
        first, second = (one, other) if i % 2 == 0 else (other, one)
        times = milliseconds(first), milliseconds(second)
        pairs.append(times if i % 2 == 0 else times[::-1])
    return pairs


def of_median(values: list[float]) -> tuple[float, float]:
    """The interval that holds the median with a probability of 95 % or more, whatever the distribution; as wide as the
    values if there are fewer than 6.

    How many of n values lie below the median is binomial, n tosses of a coin (Conover, Practical Nonparametric Statistics).
    """
    n, tail, left_out = len(values), 0.0, 0
    while (tail := tail + math.comb(n, left_out) / 2**n) <= 0.025:
        left_out += 1
    return sorted(values)[max(0, left_out - 1)], sorted(values)[min(n - 1, n - left_out)]


def summary(name: str, pairs: list[tuple[float, float]]) -> str:
    fused, exchanged = (statistics.median(times) for times in zip(*pairs))
    ratios = [b / a - 1 for a, b in pairs]
    low, high = of_median(ratios)
    return (f"{name:6} fuse(loss) {fused:8.1f} ms   replace(model) {exchanged:8.1f} ms   "
            f"in a turn {statistics.median(ratios):+.1%} ({low:+.1%} to {high:+.1%}), {len(pairs)} turns")


def main():
    parser = argparse.ArgumentParser("python -m benchmarks.swapped", description=__doc__.partition(": ")[2])
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], metavar="linen | nnx", help="default: both")
    parser.add_argument("--batch", type=int, help="images in a batch (default: 8)")
    parser.add_argument("--turns", type=int, default=20, help="calls of each")
    parser.add_argument("--small", action="store_true", help="tiny networks, to see that everything works")
    given = parser.parse_args()
    for name in given.models or MODELS:
        print(summary(name, turns(*compiled(name, given.batch, given.small), given.turns)), flush=True)


if __name__ == "__main__":
    main()
