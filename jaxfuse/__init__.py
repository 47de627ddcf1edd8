"""jaxfuse: fused convolutions and batch norms for JAX, found in the program you already have.

    fast = jaxfuse.fuse(fn)                  same signature, fewer trips to memory
    print(jaxfuse.explain(fn, *args))        what was fused, what was not, and why
"""

from jaxfuse import ops
from jaxfuse.fuse import explain, fuse
from jaxfuse.report import FusionError, FusionReport, Site

__all__ = ["FusionError", "FusionReport", "Site", "explain", "fuse", "ops"]
