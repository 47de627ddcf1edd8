"""Values of the program with their axes in another order, for fused ops to give and to read."""

import jax
from jax import lax
from jax.extend import source_info_util

from jaxfuse.program.graph import Graph, Node, Transposed, Value


def transposed(graph: Graph, value: Value, order: tuple[int, ...]) -> Value:
    """`value` with its axes in that order, as one more value of the program: a match may define it together with `value`;
    where none does, it is computed from `value`. So what one fused op gives channels-last, another reads channels-last."""
    if order == tuple(range(value.ndim)):
        return value
    transposes = graph.marks.transposes
    if (value, order) not in transposes:
        closed = jax.make_jaxpr(lambda array: lax.transpose(array, order))(jax.ShapeDtypeStruct(value.shape, value.dtype))
        name_stack = value.producer.name_stack if value.producer else source_info_util.new_name_stack()
        node = Node(closed.jaxpr.eqns[0], -1, [value], name_stack)
        value.users.remove(node)  # the program's own readers decide what may be fused
        transposes[value, order] = Transposed(value, node)
    return transposes[value, order]


def is_transposed(graph: Graph, value: Value, order: tuple[int, ...]) -> bool:
    """Whether a fused op gives the value with its axes in that order, or wants it so."""
    return (value, order) in graph.marks.transposes
