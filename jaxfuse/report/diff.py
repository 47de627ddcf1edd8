"""What changed between two reports."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator

from jaxfuse.report import text
from jaxfuse.report.report import FusionReport
from jaxfuse.report.site import Site

FUSED, SKIPPED, STEP = "fused", "skipped", "step outside"
# By what a site of one report is known in the other, the surest first: the code may have moved, and the shapes may have changed.
KEYS: tuple[Callable[[Site], Hashable], ...] = (
    lambda s: (_layer(s), s.direction, s.module, s.source, s.shapes, s.dtypes, s.pattern),
    lambda s: (_layer(s), s.direction, s.module, s.source, s.shapes),
    lambda s: (_layer(s), s.direction, s.module, s.shapes),
    lambda s: (_layer(s), s.direction, s.module, s.source),
    lambda s: (_layer(s), s.direction, s.source),
)


@dataclasses.dataclass(frozen=True)
class Change:
    """One site that is not as it was. a, b: the site in either report, None where there is none; what: the change in words."""

    what: str
    a: Site | None
    b: Site | None


@dataclasses.dataclass(frozen=True)
class Difference:
    """What `jaxfuse.diff` found; `str` of it is a table, and it is false where nothing changed."""

    changes: tuple[Change, ...]
    headlines: tuple[str, str]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        lines = [f"a: {self.headlines[0]}", f"b: {self.headlines[1]}"]
        if not self.changes:
            return "\n".join([*lines, "no site changed"])
        counts: dict[tuple[str, ...], int] = defaultdict(int)
        for change in self.changes:
            found = change.b or change.a
            if found:
                counts[change.what, found.pattern, found.direction, found.source, found.module] += 1
        rows = [(*key[:3], str(count), *key[3:]) for key, count in counts.items()]
        block = text.Block("", ("what changed", "pattern", "direction", "sites", "source", "module"), rows)
        return "\n".join([*lines, text.printed(block)])


def diff(report_a: FusionReport, report_b: FusionReport) -> Difference:
    """What changed from one report to another: sites that are fused in one only, other patterns, kernels, reasons, bytes.

    Sites are the same if layer, direction and module, source or shapes say so. That the code moved by some lines is no change.

    Args:
      report_a: the report before, perhaps read by `FusionReport.from_json`.
      report_b: the report after.

    Returns: a `Difference`: its `changes`, those of one report only at the end; printed, a short table.

    Raises: TypeError for what is no report.
    """
    for name, given in (("report_a", report_a), ("report_b", report_b)):
        if not isinstance(given, FusionReport):
            raise TypeError(f"jaxfuse.diff: {name} is of type {type(given).__name__}, expected a FusionReport; give what jaxfuse.explain "
                            "returned, or FusionReport.from_json of a report that was kept")
    pairs = _pairs(_stated(report_a), _stated(report_b))
    changes = [Change(what, a and a[1], b and b[1]) for a, b in pairs if (what := _what(a, b))]
    return Difference(tuple(changes), (text.headline(report_a.rows), text.headline(report_b.rows)))


Stated = tuple[str, Site]  # (what became of it, the site)


def _stated(report: FusionReport) -> list[Stated]:
    parts = (FUSED, report.fused), (SKIPPED, report.skipped), (STEP, report.unfused_steps)
    return [(state, site) for state, sites in parts for site in sites]


def _pairs(left: list[Stated], right: list[Stated]) -> Iterator[tuple[Stated | None, Stated | None]]:
    """Each site of one beside its own in the other. Steps are paired with steps: the layer itself has a row too."""
    for key in KEYS:
        waiting: dict[Hashable, list[Stated]] = defaultdict(list)
        for state, site in left:
            waiting[state == STEP, key(site)].append((state, site))
        left, unpaired = [], []
        for b in right:
            candidates = waiting[b[0] == STEP, key(b[1])]
            if candidates:
                yield candidates.pop(0), b
            else:
                unpaired.append(b)
        right = unpaired
        left = [a for candidates in waiting.values() for a in candidates]
    yield from ((None, b) for b in right)
    yield from ((a, None) for a in left)


def _what(a: Stated | None, b: Stated | None) -> str:
    """The change in words, "" if there is none."""
    if a is None or b is None:
        state = (a or b or ("", None))[0]
        return f"only in {'b' if a is None else 'a'}: {state}"
    (was, old), (now, new) = a, b
    fields = ("pattern", old.pattern, new.pattern), ("kernel", old.kernel, new.kernel), \
        ("reason", old.reason, new.reason), ("operands", old.operands, new.operands), \
        ("MB saved", text.megabytes([old]) or "0", text.megabytes([new]) or "0")
    if was != now:
        why = f": {new.reason}" if new.reason else f", by {new.kernel}"
        return f"{was} → {now}{why}"
    return "; ".join(f"{name}: {before} → {after}" for name, before, after in fields if before != after)


def _layer(site: Site) -> str:
    """What the site is of, whatever is fused with it: "conv" of "conv+bias+relu gradient"."""
    return site.pattern.split()[0].split("+")[0]
