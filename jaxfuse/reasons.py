"""How it is put that what was recognised has no kernel. Such a row asks nothing of the user's program."""

from jaxfuse import platforms


def no_kernel(what: str = "") -> str:
    """The reason of a row that is recognised before its kernel exists, or of the step `what` that no kernel takes."""
    reason = f"no kernel yet on {platforms.current()}"
    return f"{what}: {reason}" if what else reason


def lacks_kernel(reason: str) -> bool:
    """Whether that is the reason, on a platform that has kernels at all."""
    return "no kernel yet on cpu" in reason or "no kernel yet on cuda" in reason
