"""The private parts of JAX that cannot be avoided. Tried with jax 0.10.2 and 0.11.2."""

from jax._src import dispatch


def needs_devices(primitive) -> None:
    """Makes the devices of the program known while `primitive` is lowered, as `custom_partitioning` inside it requires."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def jit_options(fn) -> dict | None:
    """Which arguments of a jitted function are static and which are donated, as `jax.jit` was told; None: fn is not jitted."""
    info = getattr(fn, "_jit_info", None)
    names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    return None if info is None else {name: getattr(info, name) for name in names}
