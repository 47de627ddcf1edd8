"""The fused program of a frozen function, with its filters packed."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import jax

from jaxfuse.analysis.layout import views_of
from jaxfuse.frozen.expansion import expansion_of
from jaxfuse.frozen.gate import gate_of
from jaxfuse.frozen.layer import Layer, layer_of
from jaxfuse.ops.conv import expanded, packed
from jaxfuse.program.graph import Emission, Graph, Node, Value, evaluate
from jaxfuse.tuning.policy import expands, packing, takes_gates
from jaxfuse.tuning.rules.packed import Packing


class PackedWeight(Protocol):
    """A constant that a layer reads in another form: the constant's name, and the names of the arrays that it is kept as."""

    @property
    def name(self) -> str: ...

    @property
    def names(self) -> list[str]: ...

    @property
    def of(self) -> Layer: ...

    def packed(self, w: jax.Array) -> list[jax.Array]: ...

    @property
    def takes_a_gate(self) -> bool: ...

    def layer(self, node: Node, x, arrays: list, rest: list, factors=None, in_place: bool = False):
        """What the node computes of x, or of x by the factors of a gate, and of what it reads behind the weight; `in_place`: it may be
        written over the last of that."""


@dataclasses.dataclass(frozen=True)
class Filter:
    """A filter that a layer reads packed, and that can be unpacked again."""

    name: str
    dtype: str
    of: Layer
    config: packed.PackedConfig

    @property
    def names(self) -> list[str]:
        """By what they are made of."""
        digest = hashlib.sha256(f"{self.name} {self.of.layout} {self.config.dtype}".encode()).hexdigest()
        return [f"packed {digest}", f"transformed {digest}"][: 1 + self.config.winograd]

    def packed(self, w: jax.Array) -> list[jax.Array]:
        with jax.ensure_compile_time_eval():
            return packed.pack(self.config, self.of.filter(w))

    def unpacked(self, array: jax.Array) -> jax.Array:
        return self.of.weight_of(packed.unpack(self.config, array)).astype(self.dtype)

    @property
    def takes_a_gate(self) -> bool:
        return not self.of.is_dense and not self.config.winograd

    def layer(self, node: Node, x, arrays: list, rest: list, factors=None, in_place: bool = False):
        gates = [] if factors is None else [factors]
        config = dataclasses.replace(self.config, gated=bool(gates), in_place=in_place)

        def convolve(x, *rest):
            return packed.OP(config, x, *arrays, *gates, *rest)[0]

        return self.of.run(convolve, node, x, rest)


class Choosing(Protocol):
    """In which form layers read their weights."""

    def __call__(self, node: Node, name: str) -> PackedWeight | None:
        """That of the constant of this name in a layer, asked once for each in the program's order; None for as it is."""

    def expansion(self, node: Node, name: str, depthwise: Node, chosen: PackedWeight | None) -> Filter | None:
        """That of a 1×1 convolution which is computed together with the depthwise one behind it; None where it is not."""

    def gated(self, node: Node, name: str) -> Filter | None:
        """That of a layer with a gate which reads its weight as it is; None where the gate is a product by itself."""


class Packed:
    """A fused program, `run(constants, arguments) -> outputs`, whose layers read their weights packed.

    `choose` says in which form. The constants that `run` takes are `constants`, with these `names`; the packed program is called with
    the arrays of its own `names`: first constants as they were, `plain_names`, then packed ones. A constant that is read as it was,
    though an earlier program has it packed (`known`), is unpacked at every call.
    """

    def __init__(self, run: Callable, names: Sequence[str], constants: list, arguments: list,
                 choose: Choosing, known: dict[str, Filter]):
        self.graph = Graph(jax.make_jaxpr(run)(constants, arguments))
        given = dict(zip(self.graph.inputs, names))
        layers = [node for node in self.graph.nodes if node.inputs[1:] and node.inputs[1] in given]
        self._filters = {node: found for node in layers if (found := choose(node, given[node.inputs[1]]))}
        self._expansions = dict(self._find_expansions(layers, given, choose))
        self._filters |= self._expansions.values()
        gates = {node: gate for node in layers if (gate := gate_of(self.graph, node))}
        self._filters |= {node: found for node in gates if node not in self._filters
                          and (found := choose.gated(node, given[node.inputs[1]]))}
        self._gates = {node: gate for node, gate in gates.items() if node in self._filters and self._filters[node].takes_a_gate}
        self.filters = list({tuple(found.names): found for found in self._filters.values()}.values())
        read = {value for node in self.graph.nodes if node not in self._filters for value in node.inputs} | set(self.graph.outputs)
        read |= {value for node in self._filters for i, value in enumerate(node.inputs) if i != 1}
        self._unpacked = {value: known[name] for value, name in given.items() if value in read and name in known}
        self._plain = [value for value in given if value in read and value not in self._unpacked]
        self.plain_names = [given[value] for value in self._plain]
        packed_names = [name for filter_ in self.filters for name in filter_.names]
        packed_names += [filter_.names[0] for filter_ in self._unpacked.values()]
        self.names = [*self.plain_names, *dict.fromkeys(packed_names)]
        self._constants = len(names)

    def _find_expansions(self, layers: list[Node], given: dict, choose: Choosing) -> Iterator[tuple[Node, tuple[Node, Filter]]]:
        """Depthwise convolutions, each with the 1×1 convolution that is computed with it, and the filter of that."""
        for node in layers:
            before = expansion_of(self.graph, node)
            name = given.get(before.inputs[1]) if before else None
            if before and name and (found := choose.expansion(before, name, node, self._filters.get(before))):
                yield node, (before, found)

    @property
    def layers(self) -> set[tuple]:
        """(shape, dtype) of x and of w, for each layer with a packed weight and each depthwise convolution that is computed with one."""
        return {tuple((tuple(v.shape), str(v.dtype)) for v in node.inputs[:2]) for node in (*self._filters, *self._expansions)}

    def __call__(self, constants: Sequence, arguments: Sequence) -> list:
        arrays = dict(zip(self.names, constants))
        emissions = {node.out: self._emission(node, found, arrays) for node, found in self._filters.items()}
        emissions |= {node.out: _both(before, node, found, arrays) for node, (before, found) in self._expansions.items()}
        return self.evaluate(constants, arguments, emissions)

    def _emission(self, node: Node, weight: PackedWeight, arrays: dict) -> Emission:
        x, _, *rest = node.inputs
        gate = self._gates.get(node)
        inputs = (x,) if gate is None else gate
        keeps_axes = weight.of.keeps_axes(node.inputs[0], node.out)
        in_place = node.params["config"].has_residual and keeps_axes and self._is_last_read(rest[-1], node, (*inputs, *rest))

        def run(read):
            given, *behind = map(read, inputs)
            factors = gate.of_images(*behind) if gate else None
            yield node.out, weight.layer(node, given, [arrays[name] for name in weight.names], list(map(read, rest)), factors, in_place)

        return Emission((*inputs, *rest), (node.out,), run)

    def _is_last_read(self, value: Value, node: Node, inputs: Sequence[Value]) -> bool:
        """Whether nothing but the program knows the value, and it is read by the node last, as one of these inputs alone, with the axes
        that it was computed with. Otherwise XLA would copy what is written over."""
        views = views_of(value)
        own = views[0].producer is not None and views[0].shape == value.shape and not any(map(self.graph.is_returned, views))
        last = all(user.index <= node.index for view in views for user in view.users)
        return own and last and sum(inputs.count(view) for view in views) == 1

    def evaluate(self, constants: Sequence, arguments: Sequence, replacements: dict[Value, Emission]) -> list:
        arrays = dict(zip(self.names, constants))
        plain = dict(zip(self._plain, constants)) | {value: f.unpacked(arrays[f.names[0]]) for value, f in self._unpacked.items()}
        inputs = [plain.get(value) for value in self.graph.inputs[: self._constants]]
        return evaluate(self.graph, [*inputs, *arguments], replacements)


def filter_of(policy: str, node: Node, name: str) -> Filter | None:
    """The packed filter of the layer that the node is, whose weight is the constant of this name; None where packing gains nothing."""
    return _filter(node, name, lambda layer, x, w: packing(policy, layer.config, x, w, layer.is_dense))


def filter_of_expansion(policy: str, node: Node, name: str, depthwise: Node) -> Filter | None:
    """That of a 1×1 convolution which is computed with the depthwise one behind it; None where that gains nothing."""
    after = depthwise.params["config"].activation
    return _filter(node, name, lambda layer, x, w: Packing.direct if expands(policy, x, after) else Packing.none)


def filter_of_gated(policy: str, node: Node, name: str) -> Filter | None:
    """That of a layer which takes in the factors of its input's channels; None where that gains nothing."""
    return _filter(node, name, lambda layer, x, w: Packing.direct if takes_gates(policy, x.dtype) and not layer.is_dense else Packing.none)


def _filter(node: Node, name: str, choose: Callable[..., Packing]) -> Filter | None:
    layer = layer_of(node)
    if isinstance(layer, str):
        return None
    types = layer.types(*node.inputs[:2])
    layout = Packing.none if packed.refuse(layer.config, *types) else choose(layer, *types)
    if layout is Packing.none:
        return None
    return Filter(name, str(node.inputs[1].dtype), layer, packed.config_of(layer.config, *types, layout is Packing.winograd))


def _both(before: Node, node: Node, filter_: Filter, arrays: dict) -> Emission:
    """The depthwise convolution of what the one before gives."""
    config = expanded.ExpandedConfig(filter_.config, node.params["config"])
    (x, _, *bias), (_, *rest) = before.inputs, node.inputs

    def run(x, *others):
        return expanded.OP(config, x, *[arrays[name] for name in filter_.names], *others)

    return Emission.of((x, *bias, *rest), (node.out,), run)
