"""Which layers of a frozen function are int8, and what becomes of their weights."""

import collections
import dataclasses
import hashlib
import math
from typing import NamedTuple

import jax
import numpy as np

from jaxfuse.frozen.layer import Layer, layer_of
from jaxfuse.frozen.packing import Filter, PackedWeight, filter_of, filter_of_expansion, filter_of_gated
from jaxfuse.ops.conv import int8
from jaxfuse.program.graph import Node
from jaxfuse.runtime.private import known
from jaxfuse.tuning.policy import not_in_int8
from jaxfuse.tuning.rules.int8 import narrow

# A layer in every program of the function with the same flags: the arguments that are no arrays, the name of its weight, and
# which of the weight's layers it is.
Key = tuple[tuple, str, int]
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


class Inputs(NamedTuple):
    """What the examples say of a layer's inputs: their range, and the mean of each feature."""

    range: int8.Range
    mean: tuple[float, ...]


class Measured(NamedTuple):
    """What the examples say of a layer: of its inputs, and the relative root mean square error of its output in int8."""

    inputs: Inputs
    error: float


def int8_layer(node: Node) -> Layer | str:
    """The layer that the node is, or why it cannot be int8."""
    layer = layer_of(node)
    if isinstance(layer, str):
        return layer
    return int8.refuse(layer.config, *layer.types(*node.inputs[:2])) or layer


@dataclasses.dataclass(frozen=True)
class Int8Filter:
    """The weight of a layer, in int8."""

    name: str
    of: Layer
    config: int8.Int8Config
    mean: tuple[float, ...]  # of each input feature

    @property
    def names(self) -> list[str]:
        made_of = f"{self.name} {self.of.layout} {self.config.range} {self.config.narrow} {self.mean}"
        digest = hashlib.sha256(made_of.encode()).hexdigest()
        return [f"int8 {digest}", f"scale {digest}", f"offset {digest}"]

    def packed(self, w: jax.Array) -> list[jax.Array]:
        with jax.ensure_compile_time_eval():
            return int8.pack(self.config, self.of.filter(np.asarray(w)), self.mean)

    takes_a_gate = False

    def layer(self, node: Node, x, arrays: list, rest: list, factors=None, in_place: bool = False):
        config = dataclasses.replace(self.config, in_place=in_place)
        return self.of.run(lambda x, *rest: int8.OP(config, x, *arrays, *rest)[0], node, x, rest)


def int8_filter(name: str, layer: Layer, inputs: Inputs) -> Int8Filter:
    return Int8Filter(name, layer, int8.config_of(layer.config, layer.shape, inputs.range, narrow()), inputs.mean)


class Layers:
    """The layers of a program whose weights are constants, by their keys; none is packed. `sites` are rows of them, but for their
    lines, where int8 was asked for. `flags` are the arguments that are no arrays, each with its type."""

    def __init__(self, flags: tuple):
        self._flags = flags
        self.found: dict[Key, tuple[Node, Layer | str]] = {}
        self.sites: dict[Key, Int8Site] = {}
        self._uses: collections.Counter[str] = collections.Counter()

    def __call__(self, node: Node, name: str) -> Filter | Int8Filter | None:
        if node.primitive in LAYERS:
            self.found[self._flags, name, self._uses[name]] = node, int8_layer(node)
            self._uses[name] += 1
        return None

    def expansion(self, node: Node, name: str, depthwise: Node, chosen: PackedWeight | None) -> Filter | None:
        return None

    def gated(self, node: Node, name: str) -> Filter | None:
        return None


class Choice(Layers):
    """The same, in int8 where that was measured to be near enough and the policy has it so; the others are packed by the policy.
    Without `measured` no layer is int8."""

    def __init__(self, policy: str, measured: dict[Key, Measured] | None, allowed: float, flags: tuple):
        super().__init__(flags)
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
        return int8_filter(name, layer, measured.inputs)

    def expansion(self, node: Node, name: str, depthwise: Node, chosen: PackedWeight | None) -> Filter | None:
        return None if isinstance(chosen, Int8Filter) else filter_of_expansion(self._policy, node, name, depthwise)

    def gated(self, node: Node, name: str) -> Filter | None:
        return filter_of_gated(self._policy, node, name)

    def _refuse(self, node: Node, layer: Layer, measured: Measured | None) -> str:
        if reason := not_in_int8(self._policy, math.prod(map(known, node.out.shape)) * layer.products):
            return reason
        if measured is None:
            return "no example came through it"
        return "" if measured.error <= self._allowed else f"more than int8_error={self._allowed:g}"  # NaN is more


def described(node: Node) -> str:
    return f"{LAYERS[node.primitive]} {node.inputs[0]!r} {node.inputs[1]!r}"
