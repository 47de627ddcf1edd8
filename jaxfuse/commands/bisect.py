"""python -m jaxfuse bisect module:check: the one fused site that makes a check fail."""

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.table import Table

from jaxfuse import selection
from jaxfuse.commands.target import Unusable, found, function, split
from jaxfuse.commands.terminal import Terminal

ALL = 1 << 30  # sites; more than any program has
CHILD = "import sys; from jaxfuse.commands import bisect; bisect.child(*sys.argv[1:])"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of the check: what was fused, and why it failed, "" where it passed."""

    sites: tuple[str, ...]
    failure: str


def run(target: str) -> int:
    """Runs "module:check", or "file.py:check", with more and with fewer sites fused, and names the first that makes it fail.

    Of n sites that takes log2(n) + 1 runs, and one more for the first.

    Args:
      target: a function without parameters, which calls what it has fused. It fails by an exception, by returning False or by the
        end of its process. Every run is a process of its own, and has to do the same each time: fixed seeds.

    Returns: 0 where a site was found, 1 where the check fails with no site fused or passes with all of them.

    Raises: Unusable for a name that is not there.
    """
    console = Terminal(highlight=False, markup=False, soft_wrap=True)
    runs: list[Run] = []

    def tried(limit: int) -> Run:
        with console.status(f"run {len(runs) + 1}, {'all' if limit == ALL else f'the first {limit}'} sites fused"):
            runs.append(_run(target, limit))
        return runs[-1]

    fails, passes = tried(ALL), Run((), "")  # that it passes with none is seen last, and only where the first site is to blame
    while fails.failure and len(fails.sites) - len(passes.sites) > 1:
        middle = tried((len(passes.sites) + len(fails.sites)) // 2)
        passes, fails = (passes, middle) if middle.failure else (middle, fails)
    if fails.failure and not passes.sites:
        passes = tried(0)
    console.print(_table(runs))
    console.print(f"\n{_verdict(passes, fails, runs[0].sites)}")
    return int(bool(passes.failure) or not fails.failure)


def child(target: str, limit: str, path: str) -> None:
    """What the process of a run does. A line of the file for each site that is fused, as it is fused, then one for the outcome."""
    with open(path, "w") as file:

        def tell(**line) -> None:
            print(json.dumps(line), file=file, flush=True)

        tell(begun=True)
        selection.limit_process(int(limit), lambda words: tell(site=words))
        try:
            check = function(found(*split(target)), target)
            tell(failure="it returned False" if _is_false(check()) else "")
        except Unusable as error:
            tell(unusable=str(error))
        except Exception as error:
            tell(failure=f"{type(error).__name__}: {error}".splitlines()[0])


def _is_false(result) -> bool:
    """False, as Python, NumPy and JAX have it."""
    return result is not None and np.shape(result) == () and np.asarray(result).dtype == bool and not result


def _run(target: str, limit: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        done = subprocess.run([sys.executable, "-c", CHILD, target, str(limit), str(path)], capture_output=True, text=True)
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not lines:
        raise Unusable(f"the process of {target} does not start: {done.stderr.strip()[-500:]}")
    outcome = lines[-1]
    if "unusable" in outcome:
        raise Unusable(outcome["unusable"])
    sites = tuple(line["site"] for line in lines if "site" in line)
    return Run(sites, outcome.get("failure", f"its process ended with code {done.returncode}"))


def _verdict(passes: Run, fails: Run, sites: tuple[str, ...]) -> str:
    """What the two runs on both sides of the first site with which the check fails say; `sites` are all that there are."""
    if not fails.failure and not fails.sites:
        return "The check passes, and nothing is fused in it: it has to call what jaxfuse.fuse returned."
    if not fails.failure:
        return f"The check passes with all {len(fails.sites)} sites fused: there is nothing to find."
    if passes.failure:
        return f"The check fails with no site fused too: {passes.failure}"
    return (f"The check fails once this site is fused:\n  {fails.sites[-1]}\nThe failure: {fails.failure}\n"
            f"To leave it out: {_without(fails.sites[-1], sites)}")


def _without(site: str, sites: tuple[str, ...]) -> str:
    """How to leave it out: by its line, or by all that is known of it where other sites have the same line."""
    line, count = site.rpartition(" at ")[2], sites.count(site)
    is_alone = all(each == site for each in sites if each.endswith(f" at {line}"))
    alike = f", which leaves out all {count} sites that read like it" if count > 1 else ""
    return f"jaxfuse.fuse(fn, skip=[{line if is_alone else site!r}]){alike}"


def _table(runs: list[Run]) -> Table:
    table = Table("run", "sites fused", "check", box=None)
    for number, each in enumerate(runs, 1):
        table.add_row(str(number), str(len(each.sites)), "fails" if each.failure else "passes")
    return table
