"""The threads that the CPU kernels run on: one pool for the process, whoever calls."""

from jaxfuse.runtime import ffi
from jaxfuse.runtime.processors import MOST_THREADS, Limit


def get_num_threads() -> int:
    """The number of threads that the CPU kernels run on.

    Raises ``NotImplementedError`` if the native module is not built.
    """
    return ffi.num_threads()


def set_num_threads(n: int) -> None:
    """Lets the CPU kernels run on ``n`` threads, at most 1024, from the next call on: in this process and those forked from it.

    The number to begin with is ``OMP_NUM_THREADS``, else what ``python -m jaxfuse doctor`` says of this machine. XLA's own
    threads are not changed. Warns if the system refuses some of the threads; kernels run on those that it allows. Raises
    ``ValueError`` if ``n`` is not a whole number of 1 to 1024, ``NotImplementedError`` if the native module is not built.
    """
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_THREADS:
        raise ValueError(f"jaxfuse.set_num_threads: n is {n!r}, expected a whole number of 1 to {MOST_THREADS}")
    ffi.set_num_threads(Limit(n, "jaxfuse.set_num_threads"))


def limit() -> Limit:
    """The number of threads, and what decided it. Raises as ``get_num_threads`` does."""
    return ffi.thread_limit()
