"""Products of all steps of a sequence at once: by the kernel of dense layers where they are large enough, and summed in float32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxfuse.ops.dense import OP
from jaxfuse.ops.recurrent import is_worth_a_call, summed_wide
from jaxfuse.patterns.dense.site import batch_axes, config_of, is_product
from jaxfuse.patterns.kernel import types_of
from jaxfuse.program.graph import Emission, Graph, Node, evaluate
from jaxfuse.program.site import Unfit


def over_time(function, shared: list, steps: list, length: int) -> list:
    """`function(*shared, *of_step)` at every step, as lists; `steps` have all steps first."""
    axes = (*[None] * len(shared), *[0] * len(steps))
    graph = Graph(jax.make_jaxpr(jax.vmap(function, axes, axis_size=length))(*shared, *steps))
    products = {n.out: found for n in graph.nodes if is_product(n) and (found := _product(n))}
    return evaluate(graph, [*shared, *steps], products)


def _product(node: Node) -> Emission | None:
    """Of x `[steps, batch, inputs]`, or without a batch, and a matrix, in float32: figures in benchmarks/results/kernels.md. A narrow
    one is XLA's, but its gradient, which was a sum over the batch and is one over all steps now, is not left to XLA's bfloat16."""
    x, w = node.inputs
    if x.dtype.itemsize == w.dtype.itemsize == 2:
        return Emission.of((x, w), (node.out,), lambda x, w: [summed_wide(x, w, node.out.dtype, **node.params)])
    try:
        config = config_of(node)
    except Unfit:
        return None
    if batch_axes(node) or w.ndim != 2 or config.x_contracted != (x.ndim - 1,):
        return None
    config = dataclasses.replace(config, along=x.ndim - 2)
    if x.dtype != jnp.float32 or not is_worth_a_call(x.aval.size, w.shape[-1]) or OP.forward.kernel(config, types_of(x, w))[0] is None:
        return None
    return Emission.of((x, w), (node.out,), functools.partial(OP, config))
