"""jaxfuse: fused layers for JAX, found in the program you already have: convolutions, dense layers, attention, norms,
max pools, LSTM and GRU.

    fast = jaxfuse.fuse(fn)                  same signature, fewer trips to memory
    print(jaxfuse.explain(fn, *args))        what was fused, what was not, and why
    jaxfuse.retain_memory()                  before the first computation: memory that is freed stays in the process
"""

import sys

from jaxfuse import ops
from jaxfuse.frozen import ArtefactError, Frozen, Int8Site, freeze, load
from jaxfuse.fuse import explain, fuse
from jaxfuse.report import Counters, Difference, FusionError, FusionReport, Site, counters, diff
from jaxfuse.runtime import ffi, memory, reasons
from jaxfuse.runtime.memory import retain_memory
from jaxfuse.runtime.threads import get_num_threads, set_num_threads
from jaxfuse.runtime.versions import UnreadWarning

__version__ = "0.1.0"  # and in pyproject.toml
__all__ = [
    "ArtefactError", "Counters", "Difference", "Frozen", "FusionError", "FusionReport", "Int8Site", "Site", "UnreadWarning", "counters",
    "diff", "explain", "freeze", "fuse", "get_num_threads", "load", "ops", "reasons", "retain_memory", "set_num_threads"]


def __getattr__(name: str):
    remedy = "; import jaxfuse.flax.linen or jaxfuse.flax.nnx" if name in ("flax", "linen", "nnx") else ""
    raise AttributeError(f"module 'jaxfuse' has no attribute {name!r}{remedy}", name=name, obj=sys.modules[__name__])


memory.retain_if_asked()
ffi.register_all()  # programs that jax.export wrote call our targets without a line of ours
