"""Reports of plans."""

import dataclasses
from collections.abc import Collection

from jaxfuse.program.plan import Plan
from jaxfuse.program.site import Match, Refusal, UnfusedStep
from jaxfuse.report.measure import Clock
from jaxfuse.report.program import Listing
from jaxfuse.report.report import FusionReport
from jaxfuse.report.site import Site, site
from jaxfuse.runtime import platforms
from jaxfuse.runtime.reasons import Untraced


def rows(plan: Plan) -> FusionReport:
    """The sites alone."""
    return _report(plan, list(map(site, plan.found)))


def whole(plan: Plan, name: str, policy: str, measure: bool) -> FusionReport:
    """The sites with their equations, the program around them, and, if it is to be measured, the times."""
    platform, listing = platforms.current(), Listing(plan)
    places = list(map(listing.place, plan.found))
    found = [dataclasses.replace(site(row), equations=equations) for row, (_, equations) in zip(plan.found, places)]
    if measure:
        clock = Clock(platform)
        found = [dataclasses.replace(s, times=clock.times(place, row)) for s, row, (place, _) in zip(found, plan.found, places)]
    return dataclasses.replace(_report(plan, found), program=listing.program(name, platform, policy))


def with_packed(report: FusionReport, layers: Collection[tuple]) -> FusionReport:
    """The report of a frozen function, whose `layers` with packed weights, known by shape and dtype of x and w, go by our own loops. A
    layer like one of them whose weight is no constant is not told from it."""
    def own(site: Site) -> Site:
        is_packed = tuple(zip(site.shapes[:2], site.dtypes[:2])) in layers
        return dataclasses.replace(site, kernel="native") if is_packed and not site.times else site

    return dataclasses.replace(report, fused=tuple(map(own, report.fused)))


def untraceable(words: str, source: str) -> FusionReport:
    """Of a function that cannot be traced."""
    return FusionReport((), (Site("program", "forward", (), (), source, reason=Untraced(words)),))


def _report(plan: Plan, sites: list[Site]) -> FusionReport:
    found: dict[type, list[Site]] = {Match: [], Refusal: [], UnfusedStep: []}
    for row, described in zip(plan.found, sites):
        found[type(row)].append(described)
    return FusionReport(tuple(found[Match]), tuple(found[Refusal]), tuple(found[UnfusedStep]))
