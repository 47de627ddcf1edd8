"""Keeps the memory that XLA frees in the process, so that the next call does not fault every page in again.

glibc gives each thread that allocates an arena, and an arena of a thread holds at most 64 MB: what XLA's threads allocate beyond that
is mapped and unmapped at every call. One arena, which grows and is never trimmed, keeps it.
"""

import ctypes
import os
import resource
import warnings

from jaxfuse.runtime.environment import is_on

ENVIRONMENT = "JAXFUSE_RETAIN_MEMORY"
# of malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_LARGEST = 2**31 - 1  # what an int holds
_SETTINGS = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _LARGEST), (_TOP_PAD, 512 << 20))
_retained = False
FEW_FAULTS = 1000  # of 8192 pages that 32 MB are


def retain_memory() -> bool:
    """Makes this process keep memory that is freed: temporaries and results of JAX's computations above all.

    Call it before the first computation, best as the first line after the imports. It holds for the whole process and cannot be
    undone: resident memory stays at its peak (docs/memory.md has figures). Processes that are started later and import jaxfuse do the
    same, by the environment variable JAXFUSE_RETAIN_MEMORY.

    Returns: True; False where the C library is not glibc, whose settings these are. Nothing is changed there.

    Raises: RuntimeError where other threads have allocated already, as JAX's do from the first computation on. Their arenas stay.
    """
    global _retained
    if _retained:
        return True
    if not is_glibc():
        return False
    if (n := arenas()) > 1:
        raise RuntimeError(
            f"retain_memory: too late, {n - 1} threads of this process have allocated memory already, JAX's among them if it has "
            "computed or listed devices. Call it before that, or start the program by: python -m jaxfuse run script.py [args]")
    libc = ctypes.CDLL(None)
    _retained = all([libc.mallopt(name, value) for name, value in _SETTINGS])
    if not _retained:
        raise RuntimeError("retain_memory: glibc refuses the settings; set MALLOC_ARENA_MAX=1 in the environment of the program instead")
    os.environ[ENVIRONMENT] = "1"
    return True


def retain_if_asked(by_default: bool = False) -> None:
    """`retain_memory` where the environment asks for it; too late is a warning there, for it is an import that comes too late.
    by_default: also where the environment does not say."""
    if is_on(ENVIRONMENT, by_default):
        try:
            retain_memory()
        except RuntimeError as error:
            warnings.warn(f"{ENVIRONMENT}: {error}; or import jaxfuse first", RuntimeWarning, stacklevel=3)


def is_retained() -> bool:
    return _retained


def page_faults_per_call() -> int:
    """Measured here and now: of a jitted addition that gives 32 MB, whose result is dropped at every call."""
    import jax
    import jax.numpy as jnp

    add, calls = jax.jit(lambda x: x + 1), 8
    x = jax.device_put(jnp.zeros(8 << 20), jax.local_devices(backend="cpu")[0])
    for _ in range(3):
        add(x).block_until_ready()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        add(x).block_until_ready()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // calls


def arenas() -> int:
    """How many arenas glibc's malloc has: one, until a second thread allocates."""
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    count = (text.value or b"").count(b"<heap nr=")
    libc.free(text)
    return count


def is_glibc() -> bool:
    return hasattr(os, "confstr") and "CS_GNU_LIBC_VERSION" in os.confstr_names and bool(os.confstr("CS_GNU_LIBC_VERSION"))
