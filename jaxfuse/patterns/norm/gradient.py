"""What autodiff has made of a norm: the gradients of x, gamma and beta, found as JAX's own gradient of the norm's nodes."""

import dataclasses

import jax
import numpy as np

from jaxfuse.analysis.gradients import Gradient, between, gradients
from jaxfuse.analysis.normal import size
from jaxfuse.ops.batch_axes import reshaped
from jaxfuse.ops.norm import OP
from jaxfuse.ops.op import Linear, type_of
from jaxfuse.patterns.activation_grad import activation_grads_at
from jaxfuse.patterns.walk import depends_on, require_batch_sharding
from jaxfuse.program.autodiff import backward
from jaxfuse.program.graph import Emission, Value
from jaxfuse.program.site import Match, Unfit


def find(site) -> Gradient | None:
    """The gradient of the site's norm and the activation after it, if the program computes it: of the value x, or what x is a cast
    or another shape of, and of the parameters. Its `dy` is the cotangent of what the chain ends in."""
    chain = site.chain
    end = site.part.original(chain.region.start if chain.region else chain.end)
    inputs = next(([x, *site.parameters] for x in site.given if between([x, *site.parameters], end)), None)
    if inputs is None:
        return None
    for gradient in gradients(site.graph, between(inputs, end) or [], inputs, end, backward(site.graph)):
        dz, slopes = gradient.dy, activation_grads_at(site.graph, end, gradient.dy) if chain.activation else ()
        fitting = (slope.dy for slope in slopes if slope.dy.shape == dz.shape and slope.is_of(chain.activation))
        dy = next(fitting, None) if chain.activation else dz
        if dy is not None and gradient.defines:
            return gradient._replace(dy=dy)
    return None


def fused(site, gradient: Gradient, saved: tuple[Value, ...]) -> Match:
    """`saved` are mean and rstd, which the forward pass keeps. Raises `Unfit` where no kernel takes it."""
    form, chain, types = site.form, site.chain, site.types
    others, *added = gradient.added  # other gradients of x, which the kernel adds, and of the parameters
    config = dataclasses.replace(site.config, has_residual=False, wants_sum=bool(others), saving=True)
    wanted = any(v is not None for v in gradient.found[1:])
    linear = Linear(config, (True, wanted, wanted), types, 5)
    _, reason = OP.backward.kernel(linear, (*types, *[v.aval for v in saved], *types[:1] * (1 + config.wants_sum)))
    needs = (site.x, gradient.dy, *saved, *site.parameters, *[v for values in gradient.added for v in values])
    require_batch_sharding(needs)
    if depends_on(needs, gradient.defines):
        raise Unfit("the norm's gradients depend on each other")
    if reason:
        raise Unfit(reason)

    def run(read):
        def placed(array):
            return reshaped(array.astype(site.dtype), site.shape)

        def vectors(*arrays):
            return form.arrays(dict(zip(form.used(), arrays)).__getitem__)

        layout = chain.region_layout or chain.layout  # of the activation's value
        dy = layout.undo(read(gradient.dy), tuple(range(len(site.inner))))
        (gamma, beta), back = jax.vjp(vectors, *map(read, site.parameters))
        ds = [placed(sum(map(read, others[1:]), read(others[0])))] if others else []
        primals = placed(read(site.x)), gamma, beta
        here = dataclasses.replace(linear, types=tuple(type_of(jax.typeof(a)) for a in primals))  # as they are sharded
        dx, *dvectors = OP.backward(here, *primals, *map(read, saved), placed(dy), *ds)
        for value, more, array in zip(gradient.found, ((), *added), (dx, *(back(tuple(dvectors)) if wanted else ()))):
            if value is not None:
                yield value, reshaped(sum(map(read, more), array).astype(value.dtype), value.shape)

    bytes_saved = np.dtype(site.dtype).itemsize * size(site.x) * 4
    return Match(site.label, site.node, (), (Emission(needs, gradient.defines, run),), (gradient.dy, site.x), bytes_saved, "backward")
