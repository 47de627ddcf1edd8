"""Before a run: what it will measure, what a file has already, and how long it may take."""

import json
import statistics
from collections import Counter
from pathlib import Path

from . import report
from .peers import PEERS

# Seconds of one peer for one case where no result tells, and what a turn of a short call costs beside its own time.
UNKNOWN = {"model": 20.0, "issue": 3.0}
UNKNOWN_OP = 2.0
STARTING = 5.0  # s of every worker


def known_rows(folder, path):
    """Rows of all results there are, those of `path` last: they count if a case is in several."""
    files = [*sorted(Path(folder).glob("*.json")), *([path] if path and path.exists() else [])]
    return [row for file in files for row in json.loads(file.read_text())["rows"]]


def left_to_do(chosen, allocators, names, path, result):
    """[(case, allocator)] that the file has not with all these peers; `result` says of which machine, versions and settings."""
    rows = report.fitting_rows(path, result) if path and path.exists() else []
    done = {(row["case"], row["allocator"], name) for row in rows for name, answer in row["peers"].items() if "ms" in answer}
    return [(case, allocator) for allocator in allocators for case in chosen
            if any((case.name, allocator, name) not in done for name in names if PEERS[name].takes(case))]


def seconds(work, names, turns, turn_seconds, rows):
    """{kind: about how long its cases take}, from what they took before: to compile, to check, and in each turn."""
    before = {row["case"]: row for row in rows}
    total = Counter()
    for case, _ in work:
        for name in (name for name in names if PEERS[name].takes(case)):
            answer = before.get(case.name, {}).get("peers", {}).get(name, {})
            total[case.kind] += _of_peer(answer, turns, turn_seconds) or _of_kind(case.kind, name, rows, turns, turn_seconds)
        total[case.kind] += UNKNOWN.get(case.kind, UNKNOWN_OP) / 4  # the float64 reference
    return total


def _of_peer(answer, turns, turn_seconds):
    if "ms" not in answer:
        return None
    call = answer["ms"] / 1e3
    return answer["prepare_s"] + 2 * call + turns * max(turn_seconds, min(3 * call, max(call, 2.0)), call)


def _of_kind(kind, name, rows, turns, turn_seconds):
    """The median of the kind's cases; of another peer if this one was never measured."""
    for names in ([name], ["xla", "torch", "jaxfuse"]):
        found = [_of_peer(row["peers"].get(n, {}), turns, turn_seconds) for row in rows if row["kind"] == kind for n in names]
        if any(found):
            return statistics.median(filter(None, found))
    return UNKNOWN.get(kind, UNKNOWN_OP)


def sentence(work, skipped, names, per_kind):
    """ "112 cases and 5 peers, about 36 minutes: model 12 (14 min), …; 3 are in the file already" """
    counts = Counter(case.kind for case, _ in work)
    parts = ", ".join(f"{kind} {counts[kind]} ({_minutes(per_kind[kind])})" for kind in counts)
    text = f"{len(work)} cases and {len(names)} peers, about {_minutes(sum(per_kind.values()) + STARTING * (len(names) + 1))}"
    return text + (f": {parts}" if parts else "") + (f"; {skipped} are in the file already" if skipped else "")


def _minutes(seconds):
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
