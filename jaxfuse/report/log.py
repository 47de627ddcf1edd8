"""Reports while a function is compiled: Python's logging, JAXFUSE_LOG, and strict mode."""

import logging
import os
import sys

from jaxfuse.report.report import FusionReport


class FusionError(RuntimeError):
    """`fuse(..., strict=True)` met a site that stays unfused; the message has a line for each."""


_logger = logging.getLogger("jaxfuse")


def is_logged() -> bool:
    """Whether a report of all that is fused is asked for: by JAXFUSE_LOG=1, or by the logger "jaxfuse" at level INFO."""
    return _is_printed() or _logger.isEnabledFor(logging.INFO)


def log(report: FusionReport) -> None:
    """One line per site, to the logger, and on stderr where JAXFUSE_LOG asks for it."""
    for found in report.sites:
        _logger.info("%s", found)
        if _is_printed():
            print(f"jaxfuse: {found}", file=sys.stderr)


def _is_printed() -> bool:
    return os.environ.get("JAXFUSE_LOG", "0") not in ("", "0")
