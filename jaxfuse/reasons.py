"""How it is put that what was recognised has no kernel. Such a row asks nothing of the user's program."""

import jax


def no_kernel(what: str = "") -> str:
    """The reason of a row that is recognised before its kernel exists, or of the step `what` that no kernel takes."""
    return f"{what}: no kernel yet on {jax.default_backend()}" if what else f"no kernel yet on {jax.default_backend()}"


def lacks_kernel(reason: str) -> bool:
    """Whether that is the reason, on the platform that has kernels at all."""
    return "no kernel yet on cpu" in reason
