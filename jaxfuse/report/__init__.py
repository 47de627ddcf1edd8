"""What was fused, what was not, and why: rows first, then text, pages, drawings and data made of them."""

from jaxfuse.report.counters import Counters, counters
from jaxfuse.report.diff import Change, Difference, diff
from jaxfuse.report.log import FusionError
from jaxfuse.report.program import Equation, Memory, Program
from jaxfuse.report.report import FusionReport
from jaxfuse.report.site import Site, Times

__all__ = [
    "Change", "Counters", "Difference", "Equation", "FusionError", "FusionReport", "Memory", "Program", "Site", "Times", "counters",
    "diff"]
