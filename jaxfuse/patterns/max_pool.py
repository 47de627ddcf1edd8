"""Max pooling: one node, gained for its gradient, which XLA computes on a CPU by an arg-max and a scatter."""

import functools

import jax

from jaxfuse.ops.max_pool import OP, MaxPoolConfig
from jaxfuse.ops.op import Linear
from jaxfuse.ops.stage import type_of
from jaxfuse.patterns.kernel import require, require_batch_sharding
from jaxfuse.program.graph import Emission, Node, Value
from jaxfuse.program.site import Match, Refusal, Unfit


def anchors(graph):
    """lax.reduce_window of lax.max from -inf, however it is reached."""
    return [node for node in graph.nodes if node.primitive == "reduce_window_max"]


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields one Match or Refusal, and one for the gradients that autodiff has made of it."""
    (x,) = node.inputs
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    gradients = _gradients(node)
    config = MaxPoolConfig(**{name: tuple(node.params[name]) for name in names}, with_residuals=bool(gradients),
                           padding=tuple(map(tuple, node.params["padding"])))
    type_of_x = type_of(x.aval)
    try:
        require_batch_sharding((x,))
        require(OP.forward, config, (type_of_x,), unprofitable, "max_pool", config, (type_of_x,))
    except Unfit as unfit:
        yield Refusal("max_pool", node, (x,), unfit.reason)
        yield from [Refusal("max_pool", node, (n.inputs[0], x), unfit.reason, "backward") for n in gradients]
        return
    types = jax.eval_shape(lambda x: OP.forward.reference(config, x), type_of_x)
    made = (node.out, *map(Value, types[1:]))
    pool = functools.partial(OP.forward if config.with_residuals else OP, config)
    yield Match("max_pool", node, (node,), (Emission.of((x,), made, pool),), (x,), 0)
    unpool = functools.partial(OP.backward, Linear(config, (True,), (type_of_x,), 2))
    for gradient in gradients:
        dy, emission = gradient.inputs[0], Emission.of((x, made[1], gradient.inputs[0]), gradient.outputs, unpool)
        yield Match("max_pool", node, (gradient,), (emission,), (dy, x), 0, "backward")


def _gradients(node: Node) -> list[Node]:
    (x,) = node.inputs
    if any(d != 1 for name in ("base_dilation", "window_dilation") for d in node.params[name]):
        return []
    names = ("window_dimensions", "window_strides", "padding")
    return [n for n in x.users if n.primitive == "select_and_scatter_add" and n.inputs[1] is x
            and n.params["select_prim"].name == "ge" and all(n.params[name] == node.params[name] for name in names)]
