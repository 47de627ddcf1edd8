"""A primitive that has a reference in plain JAX and native kernels: its batching, its sharding, and the choice of kernel."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import ManualAxisType

from jaxfuse.ops.batch_axes import equally_varying, merge, split
from jaxfuse.ops.partition import sharded
from jaxfuse.program import symbolic
from jaxfuse.runtime import dispatch, ffi, platforms, private
from jaxfuse.runtime.reasons import no_kernel
from jaxfuse.runtime.settings import ours

Arrays = tuple[jax.Array, ...]


class Kernel(NamedTuple):
    """One way to run a stage on a platform, as lowering rules name it ("cpu", "cuda").

    `name` is what reports say; None: whatever the native module says of the calls that `run` makes.
    `refuse(config, args)` says in words why these arguments cannot be taken (None: they can), or that another kernel of the
    platform is for them; whether any is worth it is policy's. `args` need only have shape and dtype.
    `run(config, args, mesh_axes)` computes the outputs on arrays; `mesh_axes` are the mesh axes over which the batch is sharded,
    so sums over the batch must be completed by `psum` over them (empty: nothing to do). Without `run` it is the stage's
    reference, where XLA makes better code of that than of what users write. `is_plain`: it runs plain JAX, which vmap takes.
    """

    name: str | None
    refuse: Callable[[Any, tuple], str | None]
    run: Callable[[Any, Arrays, tuple[str, ...]], Arrays] | None
    platform: str = "cpu"
    is_plain: bool = False


# It moves fewer bytes than what XLA makes of users' own programs (counted in tests/gpu, timed in docs/gpu.md).
PLAIN = Kernel("plain JAX", lambda config, args: None, None, "cuda")


FLOATS = ("float32", "bfloat16", "float16")  # the dtypes that our kernels take


def refused_array(array) -> str | None:
    """Why no kernel takes the array, whatever its shape: its dtype, or that it is empty."""
    if str(array.dtype) not in FLOATS:
        return f"dtype {array.dtype}: the kernel takes {', '.join(FLOATS)}"
    return f"empty array of shape {tuple(array.shape)}" if 0 in array.shape else None


def widened(arrays: Arrays) -> Arrays:
    """With float32 for float16, for kernels that have none: few CPUs multiply it, every one casts it."""
    return tuple(a.astype(jnp.float32) if a.dtype == jnp.float16 else a for a in arrays)


STAGES: dict[Primitive, "Stage"] = {}


class Stage:
    """A primitive with a reference in plain JAX, native kernels in order of preference, and its batch axes.

    `reference(config, *args)` and the kernels return tuples; `config` is hashable and static.
    """

    def __init__(self, name: str, reference, kernels: tuple[Kernel, ...], batch_axes):
        self.name, self.reference, self.kernels, self.batch_axes = name, reference, kernels, batch_axes
        self.primitive = p = Primitive(name)
        STAGES[p] = self
        p.multiple_results = True
        private.run_alone(p)
        private.check_for_nans(p)
        cast(dict, jet.jet_rules)[p] = self._jet
        p.def_abstract_eval(self._abstract_eval)
        ad.primitive_jvps[p] = self._jvp
        ad.primitive_transposes[p] = self._transpose
        batching.primitive_batchers[p] = self._batch
        mlir.register_lowering(p, lowered_by(lambda ctx: (ctx, self._as_defined)))
        for platform in {kernel.platform for kernel in kernels}:
            mlir.register_lowering(p, lowered_by(functools.partial(self._for, platform)), platform=platform)

    def __call__(self, config, *args) -> list[jax.Array]:
        return self.primitive.bind(*equally_varying(args), config=config)

    def kernel(self, config, args, platform: str | None = None) -> tuple[Kernel | None, str]:
        """The first kernel of the platform (None: where programs run here) that takes these arguments, or (None, why the
        last one does not)."""
        platform = platform or platforms.current()
        reason: str = no_kernel()
        for kernel in self.kernels:
            if kernel.platform == platform:
                refused = symbolic.refused(kernel, config, args)
                if refused is None:
                    return kernel, ""
                reason = refused
        return None, reason

    def run(self, config, args, platform: str, mesh_axes: tuple[str, ...] = ()) -> Arrays:
        kernel, _ = self.kernel(config, args, platform)
        if kernel is not None and kernel.run is not None:
            return kernel.run(config, args, mesh_axes)
        if mesh_axes:
            raise NotImplementedError(f"{self.name}: no kernel for {args} on a shard")
        return self.reference(config, *args)

    @ours
    def _abstract_eval(self, *avals, config):
        return _out_types(self, config, tuple(map(type_of, avals)))

    @ours
    def _jvp(self, primals, tangents, *, config):
        """Derivatives of the reference (for `forward`, FusedOp replaces this rule by a better one)."""
        return jvp_of(functools.partial(self.reference, config), primals, tangents)

    @ours
    def _jet(self, primals, series, *, config):
        """Taylor series, of the reference."""
        return jet.jet(functools.partial(self.reference, config), primals, series, factorial_scaled=False)

    @ours
    def _transpose(self, cotangents, *args, config):
        """That of the reference, where it is linear in those arguments (for `tangent`, FusedOp's own)."""
        linear = [i for i, a in enumerate(args) if ad.is_undefined_primal(a)]
        types = [type_of(args[i].aval) for i in linear]
        given = tuple(ad.instantiate_zeros(ct) for ct in cotangents)
        found = jax.linear_transpose(_of_some(functools.partial(self.reference, config), args, linear), *types)(given)
        return [found[linear.index(i)] if i in linear else None for i in range(len(args))]

    @ours
    def _batch(self, args, dims, *, config):
        """vmap: into the batch axis where every output has one, else one call per item."""
        axes = self.batch_axes(config, [jnp.ndim(a) - (d is not None) for a, d in zip(args, dims)])
        size = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
        if size == 0:
            outs = jax.vmap(functools.partial(self.reference, config), in_axes=tuple(dims))(*args)
            return outs, [0] * len(outs)
        mergeable = None not in axes.outputs and all(d is None or ax is not None for d, ax in zip(dims, axes.inputs))
        plain = None if mergeable and self.kernels else self._plain(config, args, dims)
        if plain:
            outs = jax.vmap(plain, in_axes=tuple(dims))(*args)
            return outs, [0] * len(outs)
        if not mergeable:
            mapped = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims)]

            def one(items):
                items = iter(items)
                return self(config, *[a if d is None else next(items) for a, d in zip(args, dims)])

            outs = jax.lax.map(one, [a for a, d in zip(mapped, dims) if d is not None])
            return outs, [0] * len(outs)
        merged = [merge(a, d, ax, size) for a, d, ax in zip(args, dims, axes.inputs)]
        outs = self(config, *merged)
        return [split(o, ax, size) for o, ax in zip(outs, axes.outputs)], axes.outputs

    def _plain(self, config, args, dims):
        """What one item of a vmapped call runs, if that is plain JAX."""
        if not self.kernels:
            return functools.partial(self.reference, config)
        item = [jax.ShapeDtypeStruct(a.shape if d is None else (*a.shape[:d], *a.shape[d + 1 :]), a.dtype) for a, d in zip(args, dims)]
        kernel, _ = self.kernel(config, item)
        return (lambda *args: self.run(config, args, kernel.platform)) if kernel is not None and kernel.is_plain else None

    def _for(self, platform: str, ctx):
        """What is lowered for this platform, and in which context: `run`, on every shard of the batch where XLA divides the
        program among devices. It asks how while it compiles; of a program that is exported nobody will be there to be asked."""
        n, devices = private.divided_among(ctx), tuple(jax.devices())

        def whole(*args, config):
            return self.run(config, args, platform)

        def divided(*args, config):
            axes = self.batch_axes(config, [jnp.ndim(a) for a in args])
            kernel, _ = self.kernel(config, args, platform)
            if kernel is None or kernel.run is None or not any(ax is not None for ax in axes.inputs):
                return whole(*args, config=config)
            outs = _out_types(self, config, tuple(type_of(jax.typeof(a)) for a in args))

            def run(shards, mesh_axes=()):
                return self.run(config, shards, platform, mesh_axes)

            return sharded(run, axes, args, [len(o.shape) for o in outs], devices[:n])

        def exported(*args, config):
            with ffi.exporting():
                return self.run(config, args, platform)

        if private.is_exported(ctx):
            promised = n == 1 and platform == "cpu" and private.promise(map(ffi.promised, ffi.TARGETS))
            return ctx, exported if promised else self._as_defined
        if n == 1:
            return ctx, whole
        if len(devices) < n:
            return ctx, self._as_defined
        return private.with_devices(ctx, devices[:n]), divided

    def _as_defined(self, *args, config):
        return self.reference(config, *args)


def jvp_of(function, primals, tangents):
    """jax.jvp of a function that returns a tuple, with symbolic zero tangents held fixed."""
    active = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    of_active = _of_some(function, primals, active)
    outs, out_tangents = jax.jvp(of_active, [primals[i] for i in active], [tangents[i] for i in active])
    return list(outs), list(out_tangents)


def _of_some(function, args, positions: list[int]):
    """`function` of the arguments at these positions; the others as they are."""

    def of_some(*given):
        whole = list(args)
        for i, value in zip(positions, given):
            whole[i] = value
        return tuple(function(*whole))

    return of_some


def lowered_by(choose):
    """A lowering rule: `choose(ctx)` gives the context to lower in and the function. Lowered as with `check_vma=False`: kernels
    need not say over which mesh axes of a `shard_map` their results vary."""

    @ours
    def rule(ctx, *values, **params):
        plain = [aval.update(manual_axis_type=ManualAxisType()) for aval in ctx.avals_in]
        types = ctx.avals_out
        ctx, function = choose(ctx.replace(avals_in=plain))
        with dispatch.part_of(private.notes_of(ctx)):
            return private.sharded_as(types, ctx, mlir.lower_fun(function, multiple_results=True)(ctx, *values, **params))

    return rule


def type_of(aval, weak_type: bool = False) -> jax.ShapeDtypeStruct:
    """With what `explicit` meshes and `shard_map` add to a type: the sharding, and the mesh axes it varies over."""
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, manual_axis_type=aval.manual_axis_type, weak_type=weak_type)


@functools.lru_cache(maxsize=4096)
def _out_types(stage: Stage, config, types: tuple[jax.ShapeDtypeStruct, ...]):
    """What the reference returns, so that shapes, dtypes and shardings are those of the same thing unfused."""
    outs = jax.make_jaxpr(lambda *args: tuple(stage.reference(config, *args)))(*types).out_avals
    return [out.update(weak_type=False) for out in outs]
