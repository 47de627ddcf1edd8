"""A recognised norm as a Match: with the residual add before it, the activation after it, and the sum where it is read."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.batch import reshaped
from jaxfuse.canonical import ADD, CAST, size, varying_axes
from jaxfuse.graph import Emission, Node, Value
from jaxfuse.match import Match, Refusal, Walk, longest
from jaxfuse.ops.norm import OP, normalised
from jaxfuse.patterns.activations import name_activation
from jaxfuse.patterns.norm_form import read_form
from jaxfuse.reasons import no_kernel


def fused(graph, part, node: Node, norm, name: str, claimed: set[int], measured):
    """The norm as a Match with as much before and after it as the kernel takes; a Refusal for what it does not."""
    x, before = norm.x, add_before(part, norm.x, claimed)
    chains, _ = Walk(part, norm.end.ndim - 1, claimed, name_activation).chains(norm.end)
    form = read_form(x, norm.axes, norm.same, norm.nodes, norm.end)
    dtype = x.dtype if any(chain.end.dtype == x.dtype for chain in chains) else norm.end.dtype

    def attempt(chain):
        if isinstance(form, str):
            return form
        if chain.affine or chain.residual is not None:
            return no_kernel("it adds to or scales the normalised value")
        return _match(graph, part, node, norm, form, chain, before if x.dtype == dtype else None, measured, name)

    found, chain, refused = longest(chains, dtype, attempt)
    label = f"{'add+' * (before is not None)}{name}"
    nodes = (*[before] * (before is not None), *norm.nodes)
    if found:
        yield found
    if refused and (not found or _steps(refused[0])):
        claims = () if found else (*nodes, *refused[0].nodes)
        yield Refusal(label + _steps(refused[0]), node, (x,), refused[1], nodes=claims)


def _match(graph, part, node: Node, norm, form, chain, before: Node | None, measured, name: str) -> Match | str:
    """The match, or why not."""
    x, end = part.original(norm.x), part.original(chain.end)
    inner = {id(part.original(v)): part.original(v) for n in (*norm.nodes, *chain.nodes) for v in n.outputs}
    mine = {n.index for n in (*norm.nodes, *chain.nodes)}
    for value in inner.values():
        reader = next((n for n in value.users if n.index not in mine), None)
        if value is not end and reader is not None and not _is_cast_of(value, x) and not _is_before(value, x):
            return no_kernel(f"{value!r} is read by {reader} too, in the backward pass")
    activation = chain.activation.name if chain.activation else "none"
    full, mine = (x,), mine | {before.index} if before else mine
    wants_sum = before is not None and (graph.is_returned(x) or any(n.index not in mine for n in x.users))
    if before is not None:
        full = tuple(part.original(v) for v in before.inputs)
    config = form.config(rank=x.ndim, has_residual=before is not None, wants_sum=wants_sum,
                         activation=activation)
    batch = x.shape[: form.first] or (1,)
    type_of_x = jax.ShapeDtypeStruct((*batch, *x.shape[form.first :]), end.dtype)
    vector = jax.ShapeDtypeStruct(config.parameter_shape, jnp.float32)
    types = (*[type_of_x] * len(full), vector, vector)
    kernel, reason = OP.forward.kernel(config, types)
    reason = reason or measured("norm", config, types)
    if reason:
        return reason
    parameters = [part.original(v) for v in form.used()]

    def run(read):
        arrays = [reshaped(read(v).astype(end.dtype), x.shape) for v in full]
        gamma, beta = form.arrays(lambda v: read(part.original(v)))
        outs = normalised(config, *arrays, gamma, beta)
        y, *sums = outs if wants_sum else (outs,)
        yield end, reshaped(chain.layout.place(reshaped(y, norm.end.shape)), end.shape)
        yield from zip([x], sums)

    nodes = (*[before] * (before is not None), *norm.nodes, *chain.nodes)
    bytes_saved = np.dtype(end.dtype).itemsize * size(x) * (2 + len(full) + len([n for n in chain.nodes if n.primitive != CAST]))
    emission = Emission((*full, *parameters), (end, *[x] * wants_sum), run)
    label = f"{'add+' * (before is not None)}{name}{_steps(chain)}"
    return Match(label, node, nodes, (emission,), kernel.name, full, bytes_saved)


def _is_before(value: Value, x: Value) -> bool:
    """Whether it is computed first, as what x is a reshape of."""
    return x.producer is not None and value.producer.index < x.producer.index


def _is_cast_of(value: Value, x: Value) -> bool:
    return value.producer.primitive == CAST and value.producer.inputs[0] is x


def _steps(chain) -> str:
    steps = [step for step in chain.label("").split("+")[1:] if step not in ("bn", "bias", "scale")]
    return "".join(f"+{step}" for step in steps)


def add_before(part, x: Value, claimed: set[int]) -> Node | None:
    """A residual add that nothing else took, right before the norm."""
    node = x.producer
    if node is not None and node.primitive in ADD and node.index not in claimed and len(set(node.inputs)) == 2:
        if all(v.shape == x.shape and v.dtype == x.dtype and size(v) > 1 and len(varying_axes(v)) > 1 for v in node.inputs):
            return node
    return None
