"""Which layers of a frozen function are int8, and what becomes of their weights."""

import collections
import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxfuse.frozen.packing import Filter, filter_of
from jaxfuse.ops.conv import int8
from jaxfuse.ops.conv.config import ConvConfig
from jaxfuse.program.graph import Node
from jaxfuse.runtime.private import known
from jaxfuse.tuning.policy import not_in_int8
from jaxfuse.tuning.rules.int8 import most

Key = tuple[str, int]  # a layer in every program of the function: the name of its weight, and which of the weight's layers it is
LAYERS = {"jaxfuse_conv": "conv", "jaxfuse_dense": "dense", "conv_general_dilated": "conv", "dot_general": "dense"}


class Int8Site(NamedTuple):
    """A layer with a constant weight.

    layer: what it is, with the types of its operands; source: "file:line"; error: the relative root mean square error of its output
    in int8, on the examples, None where that was not measured; reason: why it is computed in floats, "" if it is int8.
    """

    layer: str
    source: str
    error: float | None
    reason: str

    def __str__(self):
        error = "" if self.error is None else f", error {self.error:.2%}"
        return f"{self.layer} at {self.source}: {f'in floats: {self.reason}' if self.reason else 'int8'}{error}"


class Measured(NamedTuple):
    """What the examples say of a layer: the range of its input, and its error in int8."""

    range: int8.Range
    error: float


@dataclasses.dataclass(frozen=True)
class Layer:
    """A fused convolution, with the shape of its filter; or a dense layer as one of one tap, whose images are the rows of x."""

    config: ConvConfig
    shape: tuple[int, ...]
    contracted: tuple[int, ...] | None = None  # axes of a dense layer's weight

    @property
    def products(self) -> int:
        """For one element of the output."""
        return math.prod(self.shape) // self.shape[self.config.rhs_spec[0]]

    def filter(self, w: np.ndarray) -> np.ndarray:
        if self.contracted is None:
            return w
        return np.moveaxis(w, self.contracted, range(len(self.contracted))).reshape(self.shape)

    def run(self, convolve: Callable, node: Node, x, rest: Sequence):
        """The node's output: `convolve` takes x and what is read behind the filter."""
        if self.contracted is None:
            return convolve(x, *rest)
        _, inner, features = self.shape
        rows = math.prod(x.shape[: x.ndim - len(self.contracted)])
        shapes = [(features,)] * self.config.has_bias + [(rows, 1, features)] * self.config.has_residual
        y = convolve(x.reshape(rows, 1, inner), *[a.reshape(shape) for a, shape in zip(rest, shapes)])
        return y.reshape(node.out.shape)


def layer_of(node: Node) -> Layer | str:
    """Or why it cannot be int8."""
    if node.primitive not in ("jaxfuse_conv", "jaxfuse_dense"):
        return "it is not fused; jaxfuse.explain says why"
    (x, w, *_), config = node.inputs, node.params["config"]
    layer = Layer(config, tuple(w.shape)) if node.primitive == "jaxfuse_conv" else _dense(config, x, w)
    if isinstance(layer, str):
        return layer
    channels_last = jax.ShapeDtypeStruct(x.shape if layer.contracted is None else (1, 1, 1), x.dtype)
    return int8.refuse(layer.config, channels_last, jax.ShapeDtypeStruct(layer.shape, w.dtype)) or layer


def _dense(config, x, w) -> Layer | str:
    pairs = sorted(zip(config.x_contracted, config.w_contracted))
    if config.x_batch or config.residual_outs or [d for d, _ in pairs] != list(range(x.ndim - len(pairs), x.ndim)):
        return f"axes {config.x_contracted} of {x!r} are contracted, {config.x_batch} are batch axes: int8 takes rows by one matrix"
    if not str(x.dtype) == str(w.dtype) == config.out_dtype:
        return f"dtypes {x.dtype}, {w.dtype} -> {config.out_dtype}: int8 takes one dtype and gives that"
    inner = math.prod(w.shape[d] for d in config.w_contracted)
    rows = ConvConfig((1,), ((0, 0),), (1,), 1, (0, 2, 1), (2, 1, 0), (0, 2, 1), (1,), has_bias=config.has_bias,
                      has_residual=config.has_residual, activation=config.activation, precision=config.precision)
    return Layer(rows, (1, inner, math.prod(w.shape) // max(inner, 1)), tuple(d for _, d in pairs))


@dataclasses.dataclass(frozen=True)
class Int8Filter:
    """The weight of a layer, in int8."""

    name: str
    of: Layer
    config: int8.Int8Config

    @property
    def names(self) -> list[str]:
        conv, made = self.of.config, self.config
        layout = f"{self.name} {self.of.shape} {self.of.contracted} {conv.rhs_spec} {conv.rhs_dilation[-1]} {made.range} {made.most}"
        digest = hashlib.sha256(layout.encode()).hexdigest()
        return [f"int8 {digest}", f"scale {digest}", f"offset {digest}"]

    def packed(self, w: jax.Array) -> list[jax.Array]:
        with jax.ensure_compile_time_eval():
            return int8.pack(self.config, self.of.filter(np.asarray(w)))

    def layer(self, node: Node, x, arrays: list, rest: list):
        return self.of.run(lambda x, *rest: int8.OP(self.config, x, *arrays, *rest)[0], node, x, rest)


def int8_filter(name: str, layer: Layer, range_: int8.Range) -> Int8Filter:
    return Int8Filter(name, layer, int8.config_of(layer.config, layer.shape, range_, most()))


class Layers:
    """The layers of a program whose weights are constants, by their keys; none is packed. `sites` are rows of them, but for their
    lines, where int8 was asked for."""

    def __init__(self) -> None:
        self.found: dict[Key, tuple[Node, Layer | str]] = {}
        self.sites: dict[Key, Int8Site] = {}
        self._uses: collections.Counter[str] = collections.Counter()

    def __call__(self, node: Node, name: str) -> Filter | Int8Filter | None:
        if node.primitive in LAYERS:
            self.found[name, self._uses[name]] = node, layer_of(node)
            self._uses[name] += 1
        return None


class Choice(Layers):
    """The same, in int8 where that was measured to be near enough and the policy has it so; the others are packed by the policy.
    Without `measured` no layer is int8."""

    def __init__(self, policy: str, measured: dict[Key, Measured] | None, allowed: float):
        super().__init__()
        self._policy, self._measured, self._allowed = policy, measured, allowed

    def __call__(self, node: Node, name: str) -> Filter | Int8Filter | None:
        super().__call__(node, name)
        if self._measured is None or node.primitive not in LAYERS:
            return filter_of(self._policy, node, name)
        key, (_, layer) = next(reversed(self.found.items()))
        measured = self._measured.get(key)
        reason = layer if isinstance(layer, str) else self._refuse(node, layer, measured)
        self.sites[key] = Int8Site(described(node), "unknown", measured.error if measured else None, reason)
        if measured is None or isinstance(layer, str) or reason:
            return filter_of(self._policy, node, name)
        return int8_filter(name, layer, measured.range)

    def _refuse(self, node: Node, layer: Layer, measured: Measured | None) -> str:
        if reason := not_in_int8(self._policy, math.prod(map(known, node.out.shape)) * layer.products):
            return reason
        if measured is None:
            return "no example came through it"
        return "" if measured.error <= self._allowed else f"more than int8_error={self._allowed:g}"  # NaN is more


def described(node: Node) -> str:
    return f"{LAYERS[node.primitive]} {node.inputs[0]!r} {node.inputs[1]!r}"
