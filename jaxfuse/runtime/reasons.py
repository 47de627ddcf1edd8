"""Why a row of a report is not fused, as types: strict mode and reports go by the class, never by the words."""

from jaxfuse.runtime import platforms

XLA_DOES_THIS = "XLA does this: no kernel was faster"
WITH_KERNELS = ("cpu", "cuda")


class Reason(str):
    """The words. A plain `str` as reason says what in the program, or in the arrays, no kernel takes."""

    heading = "the program"
    asks_nothing = False  # of the user's program: no other spelling of it would be fused


class NoKernel(Reason):
    """It was recognised before its kernel exists on this platform."""

    heading = "no kernel yet"

    @property
    def asks_nothing(self) -> bool:  # type: ignore[override]
        return platforms.current() in WITH_KERNELS


class LeftToXla(Reason):
    """A kernel was built and measured, and gained nothing."""

    heading = "XLA is as fast"
    asks_nothing = True


class Unprofitable(Reason):
    """Policy "measured" expects no gain. Policy "always" has no such rows."""

    heading = 'policy "measured" expects no gain'


class SwitchedOff(Reason):
    heading = 'policy "never"'


class LeftOut(Reason):
    """The user has said so: `patterns`, `skip` or `limit` of `fuse`."""

    heading = "left out by patterns, skip or limit"
    asks_nothing = True


class Exported(Reason):
    """It is part of a program that `jax.export` wrote, which is not looked into."""

    heading = "exported before"
    asks_nothing = True


class Untraced(Reason):
    heading = "the function cannot be traced"


def no_kernel(what: str = "") -> NoKernel:
    """The reason of a row that is recognised before its kernel exists, or of the step `what` that no kernel takes."""
    reason = f"no kernel yet on {platforms.current()}"
    return NoKernel(f"{what}: {reason}" if what else reason)


def left_to_xla() -> Reason:
    """The reason of a row for which a kernel was built and measured on CPU, and gained nothing."""
    return LeftToXla(XLA_DOES_THIS) if platforms.current() == "cpu" else no_kernel()


def asks_nothing(reason: str) -> bool:
    """Whether no other program would have been fused there: what strict mode lets pass."""
    return isinstance(reason, Reason) and reason.asks_nothing


def heading(reason: str) -> str:
    """Under which heading a report counts it."""
    return (reason if isinstance(reason, Reason) else Reason).heading


def kinds() -> dict[str, type[Reason]]:
    """The types of reasons by name."""
    found: list[type[Reason]] = [Reason, *Reason.__subclasses__()]
    return {kind.__name__: kind for kind in found}
