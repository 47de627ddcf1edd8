"""Which versions of JAX jaxfuse was tested on, and what is done where a program of another one cannot be read."""

import functools
import warnings

import jax

TESTED = ("0.10", "0.11", "0.12")

# Instruction sets (of our own kernels, of oneDNN) with which the tests of the native module were run, and on what.
INSTRUCTION_SETS: dict[tuple[str, ...], str] = {
    ("avx512", "avx512_core_amx"): "Intel Emerald Rapids",
    ("avx512", "avx512_core_bf16"): "AMD Zen 4 and Zen 5",
    ("avx512", "avx512_core"): "AMD Zen 4, limited by ONEDNN_MAX_CPU_ISA=AVX512_CORE",
    ("avx2", "avx2"): "AMD Zen 1 and Zen 3, and Zen 4 limited by JAXFUSE_SIMD=avx2 and ONEDNN_MAX_CPU_ISA=AVX2",
    ("portable", "sse41"): "AMD Zen 4, limited by JAXFUSE_SIMD=portable and ONEDNN_MAX_CPU_ISA=SSE41",
}


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


def tested_with(instruction_sets: tuple[str, ...]) -> str:
    """In words, whether the native module was tested with these instruction sets."""
    if machine := INSTRUCTION_SETS.get(instruction_sets):
        return f"tested with these instruction sets on {machine}"
    known = "; ".join(" and ".join(sets) for sets in INSTRUCTION_SETS)
    return f"not tested with these instruction sets, but with {known}"


def is_newer() -> bool:
    return jax.__version_info__[:2] > tuple(map(int, TESTED[-1].split(".")))


def unread(what: str, error: Exception) -> str:
    """Warns that `what` was left alone because reading it failed; returns the reason for the report."""
    reason = f"jaxfuse cannot read {what} under jax {jax.__version__} ({type(error).__name__}: {error})".splitlines()[0]
    remedy = "upgrade jaxfuse" if is_newer() else "please report this"
    warnings.warn(f"{reason}; it runs as it did, unfused; {remedy}", UnreadWarning, stacklevel=2)
    return reason
