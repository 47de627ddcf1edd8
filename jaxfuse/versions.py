"""Which versions of JAX jaxfuse was tested on, and what is done where a program of another one cannot be read."""

import functools
import warnings

import jax

TESTED = ("0.10", "0.11", "0.12")


class UnreadWarning(RuntimeWarning):
    """jaxfuse left something alone that it should have read: a newer JAX writes programs in another way, or it has a fault."""


@functools.cache
def warn_if_newer() -> None:
    """One `UnreadWarning` where this JAX is newer than the versions that were tested."""
    if is_newer():
        warnings.warn(
            f"jax {jax.__version__} is newer than the versions that jaxfuse was tested on ({', '.join(TESTED)}). What cannot be read "
            "is left as it is, and explain(fn, *args) says so. If a newer jaxfuse exists: python -m pip install --upgrade jaxfuse",
            UnreadWarning, stacklevel=2)


def is_newer() -> bool:
    return jax.__version_info__[:2] > tuple(map(int, TESTED[-1].split(".")))


def unread(what: str, error: Exception) -> str:
    """Warns that `what` was left alone because reading it failed; returns the reason for the report."""
    reason = f"jaxfuse cannot read {what} under jax {jax.__version__} ({type(error).__name__}: {error})".splitlines()[0]
    remedy = "upgrade jaxfuse" if is_newer() else "please report this"
    warnings.warn(f"{reason}; it runs as it did, unfused; {remedy}", UnreadWarning, stacklevel=2)
    return reason
