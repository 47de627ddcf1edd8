"""The platform that a program is traced or lowered for: kernels, rules and reports go by it.

"cpu", "cuda", "rocm" or "tpu", as lowering rules name them. JAX keeps traces that were made for different ones apart.
"""

import jax

NAMES = ("cpu", "cuda", "rocm", "tpu")
_assumed = jax.make_user_context(None)


def current() -> str:
    """That of the enclosing `assumed`, else `here`."""
    return _assumed.value or here()


def here() -> str:
    """That of JAX's default device."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None or isinstance(device, str):
        return _named(device or jax.default_backend(), lambda: jax.local_devices(backend=device)[0])
    return _named(device.platform, lambda: device)


def assumed(platform: str | None):
    """A context in which `current` is this platform; None: as before."""
    return _assumed(platform or _assumed.value)


def committed(tree) -> str | None:
    """The platform of the first array that is bound to a device. None if there is none, or if JAX has the CPU alone."""
    if jax.default_backend() == "cpu":
        return None
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer))
    device = next((min(a.devices(), key=lambda d: d.id) for a in arrays if a.committed), None)
    return device and _named(device.platform, lambda: device)


def _named(name: str, device) -> str:
    """JAX calls both CUDA and ROCm "gpu"; their clients tell them apart."""
    if name != "gpu":
        return name
    return "rocm" if "rocm" in device().client.platform_version.lower() else "cuda"
