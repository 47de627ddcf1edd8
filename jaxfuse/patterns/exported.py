"""Programs that `jax.export` has written, called from this one. They are only named: a report says which kernels they call."""

import re

from jaxfuse.program.graph import Graph, Node
from jaxfuse.program.site import Refusal
from jaxfuse.runtime.reasons import Exported

TARGET = re.compile(rb"jaxfuse_\w+_v\d+")  # `ffi.promised`, as bytes of the program: its text would have all of its constants


def anchors(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.primitive == "call_exported"]


def match(graph: Graph, node: Node, claimed: set[int], unprofitable):
    exported = node.params["exported"]
    kernels = ", ".join(sorted({name.decode() for name in TARGET.findall(exported.mlir_module_serialized)}))
    reason = f"{exported.fun_name} was exported before, and runs as it was; it calls {kernels or 'no kernel of jaxfuse'}"
    yield Refusal("exported program", node, tuple(node.inputs), Exported(reason))
