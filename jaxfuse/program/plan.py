"""What is to be done to a program: which values are computed otherwise, and the sites that led to it."""

from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxfuse.program.graph import Emission, Graph, Value, evaluate
from jaxfuse.runtime import private, versions
from jaxfuse.runtime.settings import ours


class Plan(NamedTuple):
    """A program with its replacements by value, its rows in program order, the plans of bodies by the index of their
    node, and for each node that a match takes over the first emission of that match, by index."""

    closed: ClosedJaxpr
    graph: Graph
    replacements: dict[Value, Emission]
    found: list
    inner: "dict[int, list[Plan]]" = {}
    owners: dict[int, Emission] = {}

    @ours
    def __call__(self, arguments: list) -> list:
        if not self.replacements:  # with its nested jits, which need not be traced and compiled anew
            return jaxpr_as_fun(self.closed)(*arguments)
        try:
            return list(map(_typed, evaluate(self.graph, arguments, self.replacements), self.graph.outputs))
        except Exception as error:
            if versions.is_newer() and not self.closed.jaxpr.effects:
                versions.unread("how to write down what is fused", error)
            elif not self.graph.is_symbolic:  # whether all of it can be written for unknown sizes is seen by trying
                raise
            return jaxpr_as_fun(self.closed)(*arguments)


def _typed(array, value: Value):
    """Weakly typed where the program's value is: what is made of it next decides the dtype."""
    return private.weakly_typed(array) if getattr(value.aval, "weak_type", False) else array
