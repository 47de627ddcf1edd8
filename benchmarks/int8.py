"""python -m benchmarks.int8 [--repeats N]: layers of frozen networks in int8 beside float32, each with its bias and relu.

The products from which on int8 is the faster one, on a quiet machine, go to `SMALLEST` in jaxfuse/tuning/rules/int8.py.
"""

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp

import jaxfuse
from jaxfuse.tuning.rules.int8 import form

# images, their size, input features, taps, output features, stride; of ResNet-50, and as 1×1 convolutions of rows BERT's layers
CONVOLUTIONS = [(n, *layer) for n in (1, 8) for layer in [
    (7, 512, 1, 2048, 1), (7, 512, 3, 512, 1), (14, 256, 3, 256, 1), (14, 1024, 1, 256, 1), (28, 128, 3, 128, 1), (28, 128, 1, 512, 1),
    (56, 64, 3, 64, 1), (56, 64, 1, 256, 1), (56, 128, 3, 128, 2), (224, 3, 7, 64, 2)]]
DENSE = [(1, 2048, 1000), (128, 768, 768), (128, 768, 3072), (1024, 768, 3072), (1024, 3072, 768)]


def convolution(stride, weights, x):
    w, b = weights
    y = jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + b)


def dense(weights, x):
    w, b = weights
    return jax.nn.relu(x @ w + b)


def layers():
    """(name, function, shapes of x and w, products) of each."""
    for n, size, inputs, taps, outputs, stride in CONVOLUTIONS:
        products = n * (-(-size // stride)) ** 2 * taps**2 * inputs * outputs
        name = f"conv {n}×{size}²×{inputs}, {taps}×{taps}, {outputs}, stride {stride}"
        yield name, partial(convolution, stride), (n, size, size, inputs), (taps, taps, inputs, outputs), products
    for rows, inner, columns in DENSE:
        yield f"dense {rows}×{inner}, {columns}", dense, (rows, inner), (inner, columns), rows * inner * columns


def shortest(functions, x, repeats: int) -> list[float]:
    """Seconds of the shortest call of each, in turns."""
    found = [[] for _ in functions]
    for _ in range(repeats):
        for times, function in zip(found, functions):
            start = time.perf_counter()
            jax.block_until_ready(function(x))
            times.append(time.perf_counter() - start)
    return list(map(min, found))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    print(f"products of bytes by {form()}; microseconds, the shortest of {repeats} calls\n\nproducts | float32 | int8 | error | layer")
    for name, function, x_shape, w_shape, products in sorted(layers(), key=lambda layer: layer[-1]):
        x = jax.nn.relu(jax.random.normal(jax.random.key(0), x_shape))
        weights = jax.random.normal(jax.random.key(1), w_shape), jnp.zeros(w_shape[-1])
        floats = jaxfuse.freeze(function, weights)
        quantised = jaxfuse.freeze(function, weights, policy="always", int8=[x])
        (site,) = quantised.int8_sites(x)
        if site.reason:
            print(f"{products} | in floats: {site.reason} | {name}")
            continue
        times = shortest([floats, quantised], x, repeats)
        print(f"{products} | {1e6 * times[0]:.0f} | {1e6 * times[1]:.0f} | {site.error:.2%} | {name}", flush=True)


if __name__ == "__main__":
    main()
