"""The fused program of a frozen function, with its filters packed."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import jax

from jaxfuse.ops.conv import packed
from jaxfuse.program.graph import Emission, Graph, Node, Value, evaluate
from jaxfuse.tuning.policy import packing
from jaxfuse.tuning.rules.packed import Packing


@dataclasses.dataclass(frozen=True)
class Filter:
    """A constant that a convolution reads packed: its name, and how it is packed."""

    name: str
    dtype: str
    config: packed.PackedConfig

    @property
    def names(self) -> list[str]:
        """Of the packed arrays: by what they are made of."""
        conv, shape = self.config.conv, self.config.shape
        layout = f"{self.name} {shape} {conv.rhs_spec} {conv.rhs_dilation[-1]} {self.config.dtype}"
        digest = hashlib.sha256(layout.encode()).hexdigest()
        return [f"packed {digest}", f"transformed {digest}"][: 1 + self.config.winograd]

    def packed(self, w: jax.Array) -> list[jax.Array]:
        with jax.ensure_compile_time_eval():
            return packed.pack(self.config, w)

    def unpacked(self, array: jax.Array) -> jax.Array:
        return packed.unpack(self.config, array).astype(self.dtype)


class Packed:
    """`run(constants, arguments) -> outputs`, a fused program, with the filters packed that only its convolutions read.

    `names` are those of the arrays that it is called with: constants as they were, `plain_names`, then packed ones. What is read as it
    was, and is `known` from an earlier program as packed, is unpacked at every call.
    """

    def __init__(self, run: Callable, names: Sequence[str], constants: list, arguments: list, policy: str, known: dict[str, Filter]):
        self.graph = Graph(jax.make_jaxpr(run)(constants, arguments))
        given = dict(zip(self.graph.inputs, names))
        self._filters = {node: found for node in self.graph.nodes if (found := _filter_of(node, given, policy))}
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

    def __call__(self, constants: Sequence, arguments: Sequence) -> list:
        arrays = dict(zip(self.names, constants))
        plain = dict(zip(self._plain, constants)) | {value: f.unpacked(arrays[f.names[0]]) for value, f in self._unpacked.items()}
        replacements = {node.outputs[0]: _emission(node, filter_, arrays) for node, filter_ in self._filters.items()}
        inputs = [plain.get(value) for value in self.graph.inputs[: self._constants]]
        return evaluate(self.graph, [*inputs, *arguments], replacements)


def _filter_of(node: Node, given: dict[Value, str], policy: str) -> Filter | None:
    """The filter of a convolution whose filter is a constant, where it is worth packing."""
    if node.primitive != "jaxfuse_conv" or node.inputs[1] not in given:
        return None
    config, (x, w, *_) = node.params["config"], node.inputs
    layout = Packing.none if packed.refuse(config, x, w) else packing(policy, config, x, w)
    if layout is Packing.none:
        return None
    return Filter(given[w], str(w.dtype), packed.config_of(config, x, w, layout is Packing.winograd))


def _emission(node: Node, filter_: Filter, arrays: dict) -> Emission:
    x, _, *rest = node.inputs
    config = dataclasses.replace(filter_.config, conv=node.params["config"])

    def run(read):
        filters = [arrays[name] for name in filter_.names]
        yield node.outputs[0], packed.OP(config, read(x), *filters, *map(read, rest))[0]

    return Emission((x, *rest), (node.outputs[0],), run)
