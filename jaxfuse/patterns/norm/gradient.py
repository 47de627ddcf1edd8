"""What autodiff has made of a norm: the gradients of x, gamma and beta, found as JAX's own gradient of the norm's nodes."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.canonical import CAST, size
from jaxfuse.analysis.gradients import between, gradients
from jaxfuse.ops.batch_axes import reshaped
from jaxfuse.ops.norm import OP
from jaxfuse.ops.norm_config import NormConfig
from jaxfuse.ops.op import Linear, type_of
from jaxfuse.patterns.activation_grad import activation_grads_at
from jaxfuse.patterns.walk import Chain, depends_on, require_batch_sharding
from jaxfuse.program.autodiff import backward
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.liveness import dead_after
from jaxfuse.program.site import Match, Unfit


class NormGradient(NamedTuple):
    """Of the value x, or what x is a cast or another shape of, and of the parameters, for the cotangent `dy` of what the
    chain ends in. None: that gradient is not in the program."""

    dy: Value
    dx: Value | None
    added: tuple[Value, ...]  # to dx: other gradients of the same value
    of_parameters: list[tuple[Value | None, tuple[Value, ...]]]
    saved: tuple[Value, Value]  # mean and rstd, which the forward pass keeps

    @property
    def defines(self) -> tuple[Value, ...]:
        return tuple(v for v in (self.dx, *[v for v, _ in self.of_parameters]) if v is not None)


def find(graph: Graph, part, form, chain: Chain, x: Value, config: NormConfig) -> NormGradient | None:
    """The gradient of the norm and the activation after it, if the program computes it."""
    parameters = [part.original(v) for v in form.used()]
    end = part.original(chain.region.start if chain.region else chain.end)
    for root in _roots(x):
        nodes = between([root, *parameters], end)
        if nodes:
            break
    else:
        return None
    statistic = jax.ShapeDtypeStruct((*(x.shape[: form.first] or (1,)), config.inner[1]), jnp.float32)
    for gradient in gradients(graph, nodes, [root, *parameters], end, backward(graph)):
        dx, *others = gradient.found
        dy = _before_activation(graph, chain, end, gradient.dy)
        if dy is not None and (dx is not None or any(others)):
            return NormGradient(dy, dx, gradient.added[0], list(zip(others, gradient.added[1:])), (Value(statistic), Value(statistic)))
    return None


def fused(graph: Graph, label: str, anchor: Node, gradient: NormGradient, form, chain: Chain, x: Value, inner: tuple[int, ...],
          config: NormConfig, parameters: list[Value], dtype) -> Match:
    """`inner` is the shape of the value that the chain's layout starts from. Raises `Unfit` where no kernel takes them."""
    batch = x.shape[: form.first] or (1,)
    full = (*batch, *x.shape[form.first :])
    config = dataclasses.replace(config, has_residual=False, wants_sum=bool(gradient.added), saving=True)
    types = jax.ShapeDtypeStruct(full, dtype), *[jax.ShapeDtypeStruct(config.parameter_shape, jnp.float32)] * 2
    wanted = any(v is not None for v, _ in gradient.of_parameters)
    linear = Linear(config, (True, wanted, wanted), types, 5)
    statistics = [v.aval for v in gradient.saved]
    _, reason = OP.backward.kernel(linear, (*types, *statistics, *types[:1] * (1 + config.wants_sum)))
    needs = (x, gradient.dy, *gradient.saved, *gradient.added, *parameters, *[v for _, added in gradient.of_parameters for v in added])
    require_batch_sharding(needs)
    defines = gradient.defines
    if depends_on(needs, defines):
        raise Unfit("the norm's gradients depend on each other")
    if reason:
        raise Unfit(reason)

    def run(read):
        def placed(array):
            return reshaped(array.astype(dtype), full)

        def vectors(*arrays):
            return form.arrays(dict(zip(form.used(), arrays)).__getitem__)

        dy = (chain.region_layout or chain.layout).undo(read(gradient.dy), tuple(range(len(inner))))  # of the activation's value
        (gamma, beta), back = jax.vjp(vectors, *map(read, parameters))
        ds = [placed(sum((read(v) for v in gradient.added[1:]), read(gradient.added[0])))] if gradient.added else []
        primals = placed(read(x)), gamma, beta
        here = dataclasses.replace(linear, types=tuple(type_of(jax.typeof(a)) for a in primals))  # as they are sharded
        made = OP.backward(here, *primals, *map(read, gradient.saved), placed(dy), *ds)
        if gradient.dx is not None:
            yield gradient.dx, reshaped(made[0].astype(gradient.dx.dtype), gradient.dx.shape)
        for (value, added), array in zip(gradient.of_parameters, back(tuple(made[1:])) if wanted else ()):
            if value is not None:
                yield value, sum((read(v) for v in added), array).astype(value.dtype).reshape(value.shape)

    bytes_saved = np.dtype(dtype).itemsize * size(x) * 4
    return Match(label, anchor, (), (Emission(needs, defines, run),), (gradient.dy, x), bytes_saved, "backward")


def served(graph: Graph, gradient: NormGradient | None) -> set[int]:
    """Indices of the nodes that nobody needs once the gradient is computed otherwise."""
    return set(dead_after(graph, gradient.defines)) if gradient else set()


def _roots(x: Value) -> list[Value]:
    """x, and what it is a cast or a reshape of: the norm may read it in several shapes."""
    values = [x]
    while len(values) < 3 and values[-1].producer is not None and values[-1].producer.primitive in (CAST, "reshape"):
        values.append(values[-1].producer.inputs[0])
    return values


def _before_activation(graph: Graph, chain: Chain, z: Value, dz: Value) -> Value | None:
    """The cotangent of the activation's value."""
    if chain.activation is None:
        return dz
    slopes = (slope for slope in activation_grads_at(graph, z, dz) if slope.dy.shape == dz.shape and slope.is_of(chain.activation))
    return next((slope.dy for slope in slopes), None)
