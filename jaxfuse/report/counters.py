"""What this process has fused so far, in numbers."""

import collections
import threading
from typing import NamedTuple

from jaxfuse.program.plan import Plan
from jaxfuse.program.site import Match, Refusal, UnfusedStep
from jaxfuse.runtime.reasons import heading


class Counters(NamedTuple):
    """What `counters` returns.

    programs: how many were traced and rewritten, a program for each signature; fused: sites by (pattern, direction), such as
    ("conv+relu", "forward"); skipped: sites by the kind of reason, as reports head it.
    """

    programs: int
    fused: dict[tuple[str, str], int]
    skipped: dict[str, int]


_lock = threading.Lock()
_programs = 0
_fused: collections.Counter[tuple[str, str]] = collections.Counter()
_skipped: collections.Counter[str] = collections.Counter()


def counters() -> Counters:
    """How many programs this process has rewritten, and their sites: a test's or a job's check that something is fused at all.

    Layers of `jaxfuse.flax` count as programs of their own, each time they are traced. What `explain` looks at does not count.
    """
    with _lock:
        return Counters(_programs, dict(_fused), dict(_skipped))


def count(plan: Plan) -> None:
    """One more program."""
    global _programs
    with _lock:
        _programs += 1
        _fused.update((row.pattern, row.direction) for row in plan.found if isinstance(row, Match))
        _skipped.update(heading(row.reason) for row in plan.found if isinstance(row, Refusal) and not isinstance(row, UnfusedStep))
