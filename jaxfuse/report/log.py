"""Reports while a function is compiled: Python's logging, JAXFUSE_LOG, and strict mode."""

import logging
import sys

from jaxfuse.report.report import FusionReport
from jaxfuse.runtime.environment import is_on


class FusionError(RuntimeError):
    """`fuse(..., strict=True)` met a site that stays unfused; the message has a line for each."""


PRINTED = "JAXFUSE_LOG"
_logger = logging.getLogger("jaxfuse")


def is_logged() -> bool:
    """Whether a report of all that is fused is asked for: by JAXFUSE_LOG=1, or by the logger "jaxfuse" at level INFO."""
    return is_on(PRINTED) or _logger.isEnabledFor(logging.INFO)


def log(report: FusionReport) -> None:
    """One line per site, to the logger, and on stderr where JAXFUSE_LOG asks for it."""
    for found in report.sites:
        _logger.info("%s", found)
        if is_on(PRINTED):
            print(f"jaxfuse: {found}", file=sys.stderr)
