"""Products of all steps of a sequence at once: by the kernel of dense layers where they are large enough, and summed in float32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxfuse.ops.dense import OP, DenseConfig
from jaxfuse.ops.recurrent import is_worth_a_call, summed_wide
from jaxfuse.ops.stage import type_of
from jaxfuse.program.graph import Emission, Graph, Node, evaluate


def over_time(function, shared: list, steps: list, length: int) -> list:
    """`function(*shared, *of_step)` at every step, as lists; `steps` have all steps first."""
    axes = (*[None] * len(shared), *[0] * len(steps))
    graph = Graph(jax.make_jaxpr(jax.vmap(function, axes, axis_size=length))(*shared, *steps))
    products = {n.out: found for n in graph.nodes if n.primitive == "dot_general" and (found := _product(n))}
    return evaluate(graph, [*shared, *steps], products)


def _product(node: Node) -> Emission | None:
    """Of x `[steps, batch, inputs]`, or without a batch, and a matrix, in float32: figures in benchmarks/results/kernels.md. A narrow
    one is XLA's, but its gradient, which was a sum over the batch and is one over all steps now, is not left to XLA's bfloat16."""
    (x, w), types = node.inputs, [type_of(v.aval) for v in node.inputs]
    if not node.params["dimension_numbers"][0][0]:
        return None
    if x.dtype.itemsize == w.dtype.itemsize == 2:
        return Emission.of((x, w), (node.out,), lambda x, w: [summed_wide(x, w, node.out.dtype, **node.params)])
    config = DenseConfig.of(node.params, node.out.dtype)
    if node.params.get("out_sharding") is not None or config.x_batch or w.ndim != 2 or config.x_contracted != (x.ndim - 1,):
        return None
    config = dataclasses.replace(config, along=x.ndim - 2)
    if x.dtype != jnp.float32 or not is_worth_a_call(x.aval.size, w.shape[-1]) or OP.forward.kernel(config, types)[0] is None:
        return None
    return Emission.of((x, w), (node.out,), functools.partial(OP, config))
