"""The private parts of JAX that cannot be avoided. Tried with jax 0.10.2, 0.11.2 and 0.12.0.1.

A newer JAX may have moved any of them. Then what is said beside each stands in its place: all goes on, with less.
"""

import dataclasses
import functools
import importlib
import math
import pathlib
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def _named(module: str, name: str, otherwise: Any) -> Any:
    """What has this name in a private module of JAX; `otherwise` where it has gone."""
    try:
        return getattr(importlib.import_module(f"jax._src.{module}"), name)
    except (ImportError, AttributeError):
        return otherwise


JITTED = type(jax.jit(lambda: None))
ARRAY: type = _named("array", "ArrayImpl", jax.Array)  # the class of arrays that have values; none has it where JAX does not say
ShardingTypeError: type[Exception] = _named("core", "ShardingTypeError", TypeError)

# Since JAX 0.12 an equation may hold an object in place of parameters. The classes that stand for equations of old.
OBJECTS = {"CustomJVPTraced": "custom_jvp_call", "CustomVJPTraced": "custom_vjp_call", "RematTraced": "checkpoint"}


def name_of(eqn) -> str:
    """The primitive's name; with `jax_custom_jvp3`, `jax_custom_vjp3` and `jax_remat3` the same as without. A reshape that permutes
    axes first, as `order="F"` makes it, is none: patterns read a reshape's shape alone."""
    held = eqn.params.get("_prim")
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        return "transposed_reshape"
    return eqn.primitive.name if held is None else OBJECTS.get(type(held).__name__, type(held).__name__)


def params_of(eqn) -> dict[str, Any]:
    """The equation's parameters; of an object that has a program under `jaxpr` or `call_jaxpr`, as the equations of old."""
    held = eqn.params.get("_prim")
    match held and name_of(eqn):
        case "custom_jvp_call" | "custom_vjp_call":
            return {"call_jaxpr": held.traced.jaxpr, "symbolic_zeros": held.params["symbolic_zeros"]}
        case "checkpoint":
            return dict(held.params)
    if "ft_in" in eqn.params:  # a scan's inputs, since JAX 0.12
        consts, carry, _ = map(len, eqn.params["ft_in"].unpack())
        return eqn.params | {"num_consts": consts, "num_carry": carry}
    return eqn.params


def with_params(eqn, changed: dict[str, Any]):
    """The equation with some parameters changed: those of a loop, a branch or a checkpoint."""
    held = eqn.params.get("_prim")
    if held is None:
        return eqn.replace(params=eqn.params | changed)
    return eqn.replace(params=eqn.params | {"_prim": type(held)(**held.params | changed)})


def scan_over(eqn, body, num_consts: int, used: list[bool]) -> dict[str, Any]:
    """The parameters of a scan like this one over a body with other constants that returns those outputs which are `used`."""
    params = eqn.params | {"jaxpr": body}
    if "ft_in" in params:
        trees = importlib.import_module("jax._src.flattree")  # since JAX 0.12
        _, carry, xs = params["ft_in"].unpack()
        ft_in = trees.pack((trees.nones(num_consts), carry, xs))
        return params | {"ft_in": ft_in, "ft_out": params["ft_out"].filter_with_mask(used)}
    linear = {"linear": (False,) * len(body.in_avals)} if "linear" in params else {}
    return params | {"num_consts": num_consts} | linear


def is_symbolic_size(n) -> bool:
    """Whether the number is not known yet, as `jax.export` traces sizes."""
    return hasattr(n, "_get_vars")


def is_symbolic(arrays) -> bool:
    """Whether any of the shapes has such a number."""
    return any(is_symbolic_size(n) for a in arrays for n in getattr(a, "shape", ()))


BATCH = 32  # what a size is taken to be that is not known


def known(size) -> int:
    """The size itself, or of a symbolic one what it is for a representative batch."""
    return int(_evaluated(size, lambda names: dict.fromkeys(names, BATCH))) if is_symbolic_size(size) else size


def example(size) -> float:
    """The size itself, or of a symbolic one a number that stands for it in sums and products: small, and a fraction for each name, so
    that no number of the program, no other size and no neighbour can be the same. NaN where it is made by divisions and bounds."""
    if not is_symbolic_size(size):
        return size
    fractions = lambda names: {name: 3 + zlib.crc32(str(name).encode()) / 2**32 for name in names}
    return math.nan if "(" in str(size) else float(_evaluated(size, fractions))


def _evaluated(size, of_names: Callable):
    with jax.enable_x64(True):  # else JAX computes it in 32 bits
        return size._evaluate(of_names(size._get_vars()))


def is_exported(ctx) -> bool:
    """Whether the program that is being lowered is for `jax.export`."""
    return getattr(getattr(ctx.module_context, "lowering_parameters", None), "for_export", False)


def promise(targets) -> bool:
    """Tells `jax.export` that these custom calls keep their meaning. False where this JAX cannot be told so."""
    stable = _named("export._export", "_CUSTOM_CALL_TARGETS_GUARANTEED_STABLE", None)
    if not isinstance(stable, set):
        return False
    stable.update(targets)
    return True


def notes_of(ctx) -> dict:
    """A dict that the lowering rules of one program share, and that lives as long as they run: JAX's own of what it has lowered. A
    dict of this call alone where there is none."""
    return getattr(ctx.module_context, "cached_primitive_lowerings", {})


def divided_among(ctx) -> int:
    """How many devices XLA divides the program that is being lowered among; 1 where a `shard_map` has done so."""
    axes = ctx.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return 1 if set(axes.manual_axes) == set(axes.mesh.axis_names) else axes.mesh.size
    return getattr(axes, "num_devices", 1)


def with_devices(ctx, devices: tuple):
    """`ctx` with these as the program's, which a `custom_partitioning` asks for. It needs their number alone, where it is not
    told of a mesh; JAX would have the mesh of the whole program."""
    axes = ctx.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return ctx
    known = dataclasses.replace(axes, device_assignment=devices, abstract_mesh=None)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=known))


def sharded_as(types, ctx, values) -> list:
    """The values of a program that is being lowered, with the shardings that their types have on explicit axes of a mesh; as
    XLA divides them where JAX cannot write that down."""
    written = _named("interpreters.mlir", "lower_with_sharding_in_types", lambda ctx, value, aval: value)
    return [written(ctx, value, aval) for value, aval in zip(values, types, strict=True)]


def run_alone(primitive) -> None:
    """Makes it compiled and run by itself where nothing is being traced, as JAX's own are: under `jax.disable_jit()` too, and a
    NaN under `jax_debug_nans` is an error that names it. Else as a jitted function."""

    def jitted(*args, **params):
        with jax.disable_jit(False):
            return jax.jit(functools.partial(primitive.bind, **params))(*args)

    _named("dispatch", "simple_impl", lambda primitive: primitive.def_impl(jitted))(primitive)


def check_for_nans(primitive) -> None:
    """Makes `checkify`'s NaN checks ask what the primitive gives, as they do of JAX's own; else they do not see it."""
    if check := _named("checkify", "nan_error_check", None):
        _named("checkify", "error_checks", {})[primitive] = functools.partial(check, primitive)


def weakly_typed(array):
    """The array as JAX has what is made of Python's numbers alone; else as it is."""
    return _named("lax.lax", "_convert_element_type", lambda array, weak_type: array)(array, weak_type=True)


# Called at every call of a frozen function. It gives all that a trace depends on beside the arguments, hashable: settings of JAX, and
# the named axes of `vmap` and meshes. What is equal to nothing where JAX does not say.
trace_context = _named("config", "trace_context", object)


def is_traced() -> bool:
    """Whether what is computed now becomes part of a program, rather than being run."""
    context, kind = _named("core", "trace_ctx", None), _named("interpreters.partial_eval", "DynamicJaxprTrace", None)
    if context is None or kind is None:
        return isinstance(jnp.zeros(()), jax.core.Tracer)
    return isinstance(context.trace, kind)


# What is asked of a jitted function's options.
JIT_INFO = ("in_shardings_leaves", "out_shardings_leaves", "in_shardings_treedef", "out_shardings_treedef", "in_layouts_leaves",
            "out_layouts_leaves", "use_resource_env", "compiler_options_kvs")


def is_jitted(fn) -> bool:
    """Whether `jax.jit` returned it. By its class: `functools.wraps` gives its attributes to functions that do something else. What `pjit`
    was given partition specs for is another thing: it reads them under `with mesh:`, which jit does not know."""
    info: Any = getattr(fn, "_jit_info", None)
    if not (isinstance(fn, JITTED) and hasattr(fn, "_fun") and all(hasattr(info, name) for name in JIT_INFO)):
        return False  # else a function like any other, which has its options itself
    shardings = *info.in_shardings_leaves, *info.out_shardings_leaves
    return not (info.use_resource_env and any(isinstance(s, PartitionSpec) for s in shardings))


def hide_frames(*modules: str) -> None:
    """Leaves these modules, such as "program.graph", out of the tracebacks that JAX shortens, as it leaves out its own."""
    package, leave_out = pathlib.Path(__file__).parent.parent, _named("traceback_util", "register_exclusion", lambda path: None)
    for name in modules:
        leave_out(str(package.joinpath(*name.split(".")).with_suffix(".py")))


def jit_options(fn) -> dict[str, Any]:
    """The keyword arguments of `jax.jit` that fn was jitted with; none if it was not."""
    if not is_jitted(fn):
        return {}
    info = fn._jit_info
    names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "keep_unused", "device", "backend", "inline")
    options = {name: value for name in names if (value := getattr(info, name, None))}
    for side in ("in", "out"):
        shardings, layouts = (getattr(info, f"{side}_{what}_leaves") for what in ("shardings", "layouts"))
        if not all(type(s).__name__ == "UnspecifiedValue" for s in shardings) and not any(layouts):
            options[f"{side}_shardings"] = getattr(info, f"{side}_shardings_treedef").unflatten(shardings)
    if info.compiler_options_kvs:
        options["compiler_options"] = dict(info.compiler_options_kvs)
    return options


def unjitted(fn):
    """The function that `jax.jit` was given; fn itself, if it is not jitted."""
    return fn._fun if is_jitted(fn) else fn
