"""What examples say of the layers of a frozen function: the range and the means of what each reads, how far its output is off in int8."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.frozen.int8 import Inputs, Key, Layers, Measured, described, int8_filter
from jaxfuse.frozen.layer import Layer
from jaxfuse.frozen.packing import Packed
from jaxfuse.ops.conv.int8 import Range
from jaxfuse.ops.errors import OpError
from jaxfuse.program.graph import Emission, Node


class Run(NamedTuple):
    """The program for an example, with nothing packed, its layers, and what it is called with."""

    program: Packed
    layers: Layers
    constants: list
    arguments: list

    @property
    def candidates(self) -> dict[Key, tuple[Node, Layer]]:
        return {key: (node, layer) for key, (node, layer) in self.layers.found.items() if isinstance(layer, Layer)}


def examples(given: Any) -> list[tuple]:
    """The arguments of each example. Raises OpError unless there are some, of finite numbers."""
    if hasattr(given, "shape") or isinstance(given, (str, bytes, dict)) or not isinstance(given, Iterable):
        raise OpError(f"jaxfuse.freeze: int8 is of type {type(given).__name__}, expected a list of examples: int8=[x], or "
                      "int8=[(x, y)] for a function of two arguments")
    found = [example if isinstance(example, tuple) else (example,) for example in given]
    if not found:
        raise OpError("jaxfuse.freeze: int8 has no example, expected at least one; give some arguments that are typical of calls")
    for i, example in enumerate(found):
        for leaf in jax.tree.leaves(example):
            if hasattr(leaf, "shape") and 0 in leaf.shape:
                raise OpError(f"jaxfuse.freeze: example {i} of int8 has an empty array of shape {tuple(leaf.shape)}, expected numbers; "
                              "leave it out")
            if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) and not jnp.isfinite(leaf).all():
                raise OpError(f"jaxfuse.freeze: example {i} of int8 has a NaN or an infinity, expected finite numbers; leave it out")
    return found


def calibrated(runs: list[Run]) -> dict[Key, Measured]:
    """What all runs say of every layer that could be int8. Raises OpError where a layer reads what is not finite."""
    layers = {key: layer for run in runs for key, (_, layer) in run.candidates.items()}

    def read(key: Key, node: Node, x, *_):
        """The smallest and the largest number, the mean of each feature, and of how many pixels that is."""
        images, features = x.reshape(layers[key].images(x.shape)).astype(jnp.float32), layers[key].config.lhs_spec[1]
        pixels = [d for d in range(images.ndim) if d != features]
        return x.min(), x.max(), images.mean(pixels), images.size // images.shape[features]

    inputs = {key: _inputs(key, found, runs) for key, found in _of_all(runs, read, {}).items()}
    filters = {key: int8_filter(key[1], layers[key], of) for key, of in inputs.items()}
    weights = {name: w for run in runs for name, w in zip(run.program.names, run.constants)}
    packed = {key: filter_.packed(weights[key[1]]) for key, filter_ in filters.items()}

    def squared(key: Key, node: Node, x, w, rest, y, arrays):
        """Sums of squares: of the difference that int8 makes, and of the output."""
        near = filters[key].layer(node, x, arrays, rest)
        y, near = y.astype(jnp.float32), near.astype(jnp.float32)
        return jnp.stack([jnp.sum((near - y) ** 2), jnp.sum(y**2)])

    squares = {key: np.sum(parts, 0) for key, parts in _of_all(runs, squared, packed).items()}
    with np.errstate(all="ignore"):
        return {key: Measured(inputs[key], float(np.sqrt(of / total)) if of else 0.0) for key, (of, total) in squares.items()}


def _inputs(key: Key, found: list[tuple], runs: list[Run]) -> Inputs:
    lows, highs, means, pixels = zip(*found)
    low, high = np.min(lows), np.max(highs)
    if not np.isfinite([low, high]).all():
        node = next(run.candidates[key][0] for run in runs if key in run.candidates)
        raise OpError(f"jaxfuse.freeze: in the examples of int8 a layer reads a NaN or an infinity: {described(node)}; leave "
                      "out the examples for which the function in floats overflows")
    return Inputs(Range.of(float(low), float(high)), tuple(np.average(means, 0, pixels).tolist()))


def _of_all(runs: list[Run], observe, packed: dict[Key, list]) -> dict[Key, list[Any]]:
    """What `observe(key, node, x, w, rest, y, arrays)` gives for every layer that is computed, in every run; `arrays` are those that the
    layer's weight is `packed` as."""
    found: dict[Key, list[Any]] = {}
    compiled: dict[Packed, Any] = {}
    for run in runs:
        if run.program not in compiled:
            compiled[run.program] = jax.jit(functools.partial(_observed, run, observe))
        for key, value in compiled[run.program](run.constants, run.arguments, packed).items():
            found.setdefault(key, []).append(jax.tree.map(lambda array: np.asarray(array, np.float64), value))
    return found


def _observed(run: Run, observe, constants: list, arguments: list, packed: dict[Key, list]) -> dict[Key, Any]:
    found: dict[Key, Any] = {}

    def emission(key: Key, node: Node) -> Emission:
        def observed(read):
            x, w, *rest = map(read, node.inputs)
            (y,) = node.replay([x, w, *rest])
            found[key] = observe(key, node, x, w, rest, y, packed.get(key))
            yield node.out, y

        return Emission(tuple(node.inputs), (node.out,), observed)

    run.program.evaluate(constants, arguments, {node.out: emission(key, node) for key, (node, _) in run.candidates.items()})
    return found
