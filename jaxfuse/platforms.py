"""The platform that a program runs on, named as lowering rules are: "cpu", "cuda", "rocm", "tpu"."""

import jax
from jax.extend import backend


def current() -> str:
    """Where JAX runs programs that are not told where."""
    name = jax.default_backend()
    if name != "gpu":
        return name
    return "rocm" if "rocm" in backend.get_backend().platform_version.lower() else "cuda"
