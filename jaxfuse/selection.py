"""Which of a program's sites a user lets be fused: some patterns, all but some, the first few. It is how a culprit is found."""

import dataclasses
import math
import numbers
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxfuse.ops.errors import OpError, one_of
from jaxfuse.program import symbolic
from jaxfuse.program.site import Match, Refusal
from jaxfuse.report.site import Site, where
from jaxfuse.runtime.near import meant
from jaxfuse.runtime.reasons import LeftOut

SOURCE = re.compile(r".*:\d+")  # "file:line"
# What layers are called, and what reports call sites, where a pattern has another name.
ALIASES = {"convolution": "conv", "conv per sample": "conv", "linear": "dense", "matmul": "dense", "mlp": "dense", "bn": "batch_norm",
           "bn inference": "batch_norm", "layer_norm": "norm", "layernorm": "norm", "rms_norm": "norm", "group_norm": "norm",
           "instance_norm": "norm", "lstm": "recurrent", "gru": "recurrent", "rnn": "recurrent", "pool": "max_pool", "pooling": "max_pool",
           "softmax": "attention", "attention scores": "attention", "adam": "optimizer", "adamw": "optimizer", "momentum": "optimizer",
           "sgd": "optimizer", "exported program": "exported"}
NO_SITES = "fuse: skip takes names of sites, patterns does not: "


@dataclasses.dataclass(frozen=True)
class Selection:
    """What `fuse` was told to leave out.

    patterns: the only patterns that are fused, None for all; skip: patterns, "file:line"s, names of sites such as
    "conv+bias+relu", and sites of a report or their places in words, that are not; limit: how many sites are fused, in the order in
    which they are found.
    """

    patterns: tuple[str, ...] | None = None
    skip: tuple[str | Site, ...] = ()
    limit: int | None = None

    @classmethod
    def of(cls, known: Sequence[str], patterns: Iterable[str] | None, skip: Iterable[str | Site], limit: int | None) -> "Selection":
        """Checked. Raises: ValueError for an unknown pattern, for anything else that names no site, and for a negative limit."""
        for name, given in (("patterns", patterns), ("skip", skip)):
            if isinstance(given, (str, Site)):
                raise OpError(f"fuse: {name} is {given!r}, expected a sequence; write {name}=({given!r},)")
        chosen = None if patterns is None else tuple(
            _pattern(name, known, NO_SITES if "+" in str(name) else "fuse: ") for name in patterns)
        if limit is not None and not (isinstance(limit, numbers.Integral) and limit >= 0):
            raise OpError(f"fuse: limit is {limit!r}, expected a number of sites, 0 or more; leave it out for all")
        return cls(chosen, tuple(_skipped(each, known) for each in skip), limit)

    def names(self, pattern: str, found: Site) -> bool:
        """Whether `skip` names this site of the pattern."""
        return any(each == pattern or _is(each, found) for each in self.skip)

    def warn_of_strangers(self, rows: Iterable[Match | Refusal]) -> None:
        """Warns of what `skip` names and these rows of a program are not: with a misspelt name nothing would be left out. Patterns are
        checked when they are given."""
        places = [each for each in self.skip if isinstance(each, Site) or "+" in each or SOURCE.fullmatch(each)]
        found = [where(row) for row in rows] if places else []
        for each in places:
            name = each.place if isinstance(each, Site) else each
            if not any(name == site.place or _is(each, site) for site in found):
                near = meant(name, {word for site in found for word in (site.place, site.pattern, site.source)})
                warnings.warn(f"jaxfuse: skip names {name!r}, which no site of this program is{near}", UserWarning, stacklevel=2)


ALL = Selection()


class Decider:
    """Decides over the sites of one program, in the order in which they are found: `unprofitable` is the policy's. `taken` are those
    that are fused so far."""

    def __init__(self, unprofitable: Callable[..., str], selection: Selection = ALL, taken: list[Match] | None = None):
        self.unprofitable, self.selection = unprofitable, selection
        self.taken: list[Match] = [] if taken is None else taken

    def of_symbolic_shapes(self) -> "Decider":
        """The same, of a part of the program whose shapes are not known."""
        return Decider(symbolic.unprofitable(self.unprofitable), self.selection, self.taken)

    def unwanted(self, pattern: str, row: Match | Refusal) -> LeftOut | None:
        """Why the user does not want it fused, whether or not a kernel takes it."""
        chosen = self.selection
        if chosen.patterns is not None and pattern not in chosen.patterns:
            return LeftOut(f"patterns={chosen.patterns} leaves {pattern} out")
        return LeftOut("skip names it") if chosen.skip and chosen.names(pattern, where(row)) else None

    def left_out(self, pattern: str, match: Match) -> LeftOut | None:
        """Why the user does not want it fused. None: it is fused, and counted."""
        if unwanted := self.unwanted(pattern, match):
            return unwanted
        chosen = self.selection
        if chosen.limit is not None and len(self.taken) >= chosen.limit:
            return LeftOut(f"limit={chosen.limit} sites are fused already")
        if _process.fused + len(self.taken) >= _process.limit:
            return LeftOut(f"{_process.limit} sites of this process are fused already")
        self.taken.append(match)
        return None

    def give_up(self, matches: Sequence[Match]) -> None:
        """They were taken, and are not fused after all."""
        self.taken[:] = [match for match in self.taken if not any(match is each for each in matches)]

    def tell(self) -> None:
        """Counts what is taken for the process, once the program is planned."""
        if _process.limit < math.inf:
            _process.fused += len(self.taken)
            for match in self.taken:
                _process.tell(where(match).place)


class _Process:
    """The limit of all programs of a process together, and who is told of each site within it."""

    limit: float = math.inf

    def __init__(self) -> None:
        self.fused = 0
        self.tell: Callable[[str], object] = lambda words: None


_process = _Process()


def limit_process(limit: int, tell: Callable[[str], object]) -> None:
    """From here on so many sites are fused in this process, all its programs together; `tell` hears of each, in words."""
    _process.limit, _process.tell = limit, tell


def _skipped(each: Any, known: Sequence[str]) -> str | Site:
    if isinstance(each, Site) or isinstance(each, str) and ("+" in each or SOURCE.fullmatch(each)):
        return each
    if isinstance(each, str) and (each.endswith(".py") or "/" in each) and ":" not in each:
        raise OpError(f"fuse: skip holds {each!r}, a file without a line; give the line of a site, as reports print it: '{each}:12'")
    if isinstance(each, str) and ":" not in each:
        return _pattern(each, known, "fuse: skip: ")
    raise OpError(f"fuse: skip holds {each!r}, expected a pattern, a file:line or a Site of a report; print(jaxfuse.explain(…)) shows them")


def _pattern(name: Any, known: Sequence[str], where: str) -> str:
    """The name, if it is a pattern's. To that of a site, as reports print it ("bn+relu", "adam x52"), the pattern is the answer."""
    parts = re.sub(r" x\d+$", "", name).split("+") if isinstance(name, str) else []
    found = {name.lower(): pattern for part in parts[::-1] if (pattern := ALIASES.get(part, part)) in known}
    return one_of(name, known, "pattern", where, ALIASES | found)


def _is(each: str | Site, found: Site) -> bool:
    """Whether an entry of `skip` names this site, its pattern apart. Of a `Site` the reason, the kernel and the times may be others."""
    if isinstance(each, Site):
        return all(getattr(each, name) == getattr(found, name) for name in ("pattern", "direction", "shapes", "source", "scopes"))
    return each in (found.pattern, found.source, found.place) or SOURCE.fullmatch(each) is not None and found.source.endswith(f"/{each}")
