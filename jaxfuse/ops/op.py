"""Fused operations as JAX primitives: autodiff, once for all ops.

An op is written down as plain JAX functions (`FusedOp.reference`, `.residuals`, `.tangent`); this file makes three
primitives of them, each a `Stage` (stage.py):

    forward    args -> outs                                native kernel, or the reference
    tangent    (residuals, tangents) -> out tangents       linear in the tangents; runs as plain JAX (forward mode)
    backward   (residuals, cotangents) -> in cotangents    the transpose of `tangent`; native kernel, or the reference

`forward`'s JVP rule emits `tangent`, whose transpose rule emits `backward`, so reverse mode runs the kernels, forward
mode works as it did before fusing, and autodiff keeps nothing but the residuals. Every derivative beyond the first is taken
of the reference, as plain JAX. (`jax.custom_vjp` has no forward mode at all; that is why these are primitives.)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.sharding import NamedSharding, PartitionSpec

from jaxfuse.ops.batch_axes import BatchAxes, equally_varying
from jaxfuse.ops.stage import Stage, jvp_of, type_of
from jaxfuse.runtime.settings import ours


@dataclasses.dataclass(frozen=True)
class Linear:
    """Config of `tangent` and `backward`: which of the op's arguments have a tangent, and all their types."""

    config: Any
    active: tuple[bool, ...]
    types: tuple[jax.ShapeDtypeStruct, ...]
    n_residuals: int


class FusedOp:
    """An op from its plain definition.

    reference(config, *args) -> outs            what the op computes; the oracle of its tests and the fallback everywhere
    residuals(config, args, outs) -> residuals  what autodiff may keep: inputs, outputs and statistics only
    tangent(config, residuals, tangents)        out tangents of the first outs; `None` stands for a zero tangent
    pullback(linear, *residuals, *cotangents)   the transpose of `tangent` in plain JAX, where it can move less than JAX's own
    for_autodiff(config) -> config              the same op, with `config.residual_outs` more outs, last, that only `residuals` needs
    decomposed(config) -> function              the same value as several ops, of the same args, where the residuals would not
                                                be enough: autodiff goes through these; None: it need not
    """

    def __init__(self, name, *, reference, residuals, tangent, for_autodiff, forward_kernels, backward_kernels, forward_axes,
                 backward_axes, pullback=None, decomposed: Callable[[Any], Callable | None] = lambda config: None):
        self.name, self.residuals, self.tangent = name, residuals, tangent
        self.for_autodiff, self.decomposed = for_autodiff, decomposed
        self.forward = Stage(f"jaxfuse_{name}", reference, forward_kernels, forward_axes)
        self.tangents = Stage(f"jaxfuse_{name}_tangent", self._tangent_reference, (), lambda *_: BatchAxes((), (None,)))
        self.backward = Stage(
            f"jaxfuse_{name}_backward", pullback or self._backward_reference, backward_kernels, backward_axes)
        ad.primitive_jvps[self.forward.primitive] = self._linearize
        ad.primitive_transposes[self.tangents.primitive] = self._transpose

    @ours
    def __call__(self, config, *args):
        if self._sharded_beyond_batch(config, args):  # the kernels could not follow; plain JAX, as it was
            return list(self.forward.reference(config, *args))
        return self.forward(config, *args)

    def _sharded_beyond_batch(self, config, args) -> bool:
        """Whether the types say so, which they do under a mesh of `explicit` axes."""
        axes = self.forward.batch_axes(config, [jnp.ndim(a) for a in args]).inputs
        specs = [jax.typeof(a).sharding.spec for a in args]
        return any(spec.reduced or spec.unreduced for spec in specs) or any(
            name is not None and d != ax for spec, ax in zip(specs, axes) for d, name in enumerate(spec))

    @ours
    def _linearize(self, primals, tangents, *, config):
        differentiated, primals = self.for_autodiff(config), equally_varying(primals)
        if several_ops := self.decomposed(config):
            return jvp_of(several_ops, primals, tangents)
        if config.residual_outs:  # a second derivative of a call that was already differentiated once, or that saves for a gradient
            return jvp_of(functools.partial(self.forward.reference, config), primals, tangents)
        outs = self.forward(differentiated, *primals)
        n_outs = len(outs) - differentiated.residual_outs
        active = tuple(not isinstance(t, ad.Zero) for t in tangents)
        residuals = self.residuals(differentiated, primals, outs)
        linear = Linear(differentiated, active, tuple(type_of(jax.typeof(p)) for p in primals), len(residuals))
        out_tangents = self.tangents(linear, *residuals, *[t for t, a in zip(tangents, active) if a])
        return list(outs[:n_outs]), list(out_tangents)

    def _tangent_reference(self, linear: Linear, *args, tangent=None):
        residuals, given = args[: linear.n_residuals], iter(args[linear.n_residuals :])
        tangents = [next(given) if a else None for a in linear.active]
        return tuple((tangent or self.tangent)(linear.config, residuals, tangents))

    @ours
    def _transpose(self, cotangents, *args, config: Linear):
        residuals, tangents = args[: config.n_residuals], args[config.n_residuals :]
        if all(isinstance(ct, ad.Zero) for ct in cotangents):
            return [None] * len(args)
        wanted = [ad.is_undefined_primal(t) for t in tangents]
        of = [i for i, a in enumerate(config.active) if a]
        narrowed = dataclasses.replace(
            config, active=tuple(i in of and wanted[of.index(i)] for i in range(len(config.active)))
        )
        cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]
        found = iter(self.backward(narrowed, *residuals, *cotangents))
        return [None] * len(residuals) + [next(found) if w else None for w in wanted]

    def _backward_reference(self, linear: Linear, *args):
        return self.transposed(linear, args, self.tangent)

    def transposed(self, linear: Linear, args, tangent):
        """`backward`'s outputs by the transpose of `tangent`, the op's own or another way to compute it."""
        residuals, cotangents = args[: linear.n_residuals], args[linear.n_residuals :]
        types = [t for t, a in zip(self.types_here(linear, args), linear.active) if a]

        def tangent_of(*active_tangents):
            return self._tangent_reference(linear, *residuals, *active_tangents, tangent=tangent)

        return tuple(jax.linear_transpose(tangent_of, *types)(tuple(cotangents)))

    def types_here(self, linear: Linear, args):
        """Types of the op's arguments for the batch size at hand (vmap and sharding change it under the config)."""
        backward, forward = self.backward.batch_axes, self.forward.batch_axes
        here = jax.typeof(args[0])
        mesh, varying = here.sharding.mesh, here.manual_axis_type
        unsharded = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
        known = [t.update(manual_axis_type=varying, sharding=t.sharding or unsharded) for t in linear.types]
        axes = backward(linear, [len(a.shape) for a in args]).inputs
        size = next((a.shape[ax] for a, ax in zip(args, axes) if ax is not None), None)
        own = forward(linear.config, [len(t.shape) for t in linear.types]).inputs
        return [
            t if ax is None or size is None else t.update(shape=(*t.shape[:ax], size, *t.shape[ax + 1 :]))
            for t, ax in zip(known, own)
        ]
