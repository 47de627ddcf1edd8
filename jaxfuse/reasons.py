"""How it is put that what was recognised has no kernel. Such a row asks nothing of the user's program."""

from jaxfuse import platforms

XLA_DOES_THIS = "XLA does this: no kernel was faster"


def no_kernel(what: str = "") -> str:
    """The reason of a row that is recognised before its kernel exists, or of the step `what` that no kernel takes."""
    reason = f"no kernel yet on {platforms.current()}"
    return f"{what}: {reason}" if what else reason


def left_to_xla() -> str:
    """The reason of a row for which a kernel was built and measured on CPU, and gained nothing."""
    return XLA_DOES_THIS if platforms.current() == "cpu" else no_kernel()


def lacks_kernel(reason: str) -> bool:
    """Whether that is the reason, on a platform that has kernels at all."""
    return reason == XLA_DOES_THIS or "no kernel yet on cpu" in reason or "no kernel yet on cuda" in reason
