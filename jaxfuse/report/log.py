"""Reports while a function is compiled: JAXFUSE_LOG, and strict mode."""

import os
import sys

from jaxfuse.report.report import FusionReport


class FusionError(RuntimeError):
    """`fuse(..., strict=True)` met a site that stays unfused; the message has a line for each."""


def is_logged() -> bool:
    """Whether JAXFUSE_LOG=1 asks for a report of all that is fused."""
    return os.environ.get("JAXFUSE_LOG", "0") not in ("", "0")


def log(report: FusionReport) -> None:
    """One line per site on stderr."""
    for found in report.sites:
        print(f"jaxfuse: {found}", file=sys.stderr)
