"""python -m benchmarks.int8 [--repeats N] [--networks]: layers of frozen networks in int8 beside float32, each with its bias and relu.
With --networks ResNet-50 as a whole, and for how many images a network in int8 gives the label that it gives in float32: the demo's
network of handwritten digits, and ResNet-50, which says where pieces of scikit-learn's photographs are from. Both are trained here.

The products from which on int8 is the faster one, on a quiet machine, go to `SMALLEST` in jaxfuse/tuning/rules/int8.py.
"""

import argparse
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track
from sklearn.datasets import load_sample_images

import jaxfuse
from jaxfuse.commands.demo import digits, photo, training
from jaxfuse.tuning.rules.int8 import form

from . import models

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


def times(functions, x, repeats: int) -> list[list[float]]:
    """Seconds of the calls of each, in turns."""
    found = [[] for _ in functions]
    for _ in range(repeats):
        for seconds, function in zip(found, functions):
            start = time.perf_counter()
            jax.block_until_ready(function(x))
            seconds.append(time.perf_counter() - start)
    return found


def show_layers(repeats: int):
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
        shortest = [1e6 * min(seconds) for seconds in times([floats, quantised], x, repeats)]
        print(f"{products} | {shortest[0]:.0f} | {shortest[1]:.0f} | {site.error:.2%} | {name}", flush=True)


class Pieces:
    """Random pieces of the two photographs, [count, 224, 224, 3], normalised, and from which third of which they are."""

    LEFT = ((0, 100), (158, 258), (316, 416))  # of a piece, the first and the last in each third

    def __init__(self):
        self._random = np.random.default_rng(0)
        self._images = [(image / np.float32(255) - photo.PIXEL_MEAN) / photo.PIXEL_STD for image in load_sample_images().images]

    def __call__(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = self._random.integers(6, size=count)
        return np.stack([self._piece(self._images[label // 3], *self.LEFT[label % 3]) for label in labels]), labels

    def _piece(self, image: np.ndarray, first: int, last: int) -> np.ndarray:
        top, left = self._random.integers(len(image) - 223), self._random.integers(first, last + 1)
        return image[top : top + 224, left : left + 224]


def trained_resnet50(pieces: Pieces, steps: int = 160):
    """(model, variables)."""
    model = models.ResNet50()
    variables = model.init(jax.random.key(0), pieces(1)[0])
    params, statistics = variables["params"], variables["batch_stats"]
    state = models.TrainState(params, statistics, jax.tree.map(jnp.zeros_like, params))
    step = jax.jit(models.make_train_step(model, jaxfuse.fuse, learning_rate=2e-3))
    for _ in track(range(steps), "ResNet-50 learns the photographs"):
        state, _ = step(state, *pieces(8))
    return model, {"params": state.params, "batch_stats": state.batch_stats}


def show_agreement(name: str, apply, variables, examples, images, labels):
    """Of networks with all layers in int8 that can be, and with those that are faster so; returns the latter."""
    for policy in ("always", "measured"):
        made = jaxfuse.freeze(apply, variables, policy=policy, int8=[examples], int8_error=1.0)
        sites = made.int8_sites(examples)
        errors = [site.error for site in sites if not site.reason]
        given = np.argmax(made.in_floats(images), -1)
        same, right = np.mean(np.argmax(made(images), -1) == given), np.mean(given == labels)
        print(f"{name}, policy {policy}: {len(errors)} of {len(sites)} layers in int8, of a mean error of {np.mean(errors):.2%}; "
              f"{same:.2%} of {len(images)} labels the same as in float32, which has {right:.2%} right", flush=True)
    return made


def show_networks(repeats: int):
    given = digits.load()
    trainer = training.Trainer(jaxfuse.fuse, given, 150)
    *_, variables = trainer.run(trainer.params)
    show_agreement("digits", training.MODEL.apply, variables, given.train_images[:300], given.test_images, given.test_labels)
    pieces = Pieces()
    model, variables = trained_resnet50(pieces)
    examples, (photographs, labels) = pieces(16)[0], pieces(100)
    quantised = show_agreement("photographs, ResNet-50", model.apply, variables, examples, photographs, labels)
    floats = jaxfuse.freeze(model.apply, variables)
    for images in (1, 8):
        x = photographs[:images]
        jax.block_until_ready([floats(x), quantised(x)])
        seconds = times([floats, quantised], x, repeats)
        for name, chosen in (("medians", statistics.median), ("the shortest", min)):
            slow, fast = (1e3 * chosen(found) for found in seconds)
            print(f"ResNet-50, batch {images}, ms, {name}: float32 {slow:.1f}, int8 {fast:.1f}; speed {slow / fast:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--networks", action="store_true")
    arguments = parser.parse_args()
    (show_networks if arguments.networks else show_layers)(arguments.repeats)


if __name__ == "__main__":
    main()
