"""How many threads this machine has for us: what the process may use of it, and which limit decides.

Of the sources of a limit that are there the lowest decides: the processors that the process may run on, one thread for each
physical core of them, the CPU quota of its control groups. Who asks by OMP_NUM_THREADS gets what was asked for.
"""

import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path("/")
MOST_THREADS = 1024  # as the native module has it


class Limit(NamedTuple):
    """A number of threads, and where it comes from."""

    number: int
    reason: str


def limit(environment: Mapping[str, str] = os.environ, root: Path = ROOT, processors: frozenset[int] | None = None) -> Limit:
    """The number of threads that kernels run on unless told by ``jaxfuse.set_num_threads``.

    ``root`` is where /proc and /sys are looked for, ``processors`` the numbers of those that the process may run on (None: as
    the system says). Warns if OMP_NUM_THREADS is no positive number; it is ignored then.
    """
    if processors is None:
        processors = _affinity()
    found = [Limit(len(processors), f"processors that the process may run on: {len(processors)}"), _cores(root, processors)]
    lowest = min([*found, *_quotas(root)], key=lambda each: each.number)
    asked = environment.get("OMP_NUM_THREADS", "").strip()
    first = asked.split(",")[0].strip()  # OpenMP takes a number for each level of nesting; ours is the outer one
    if first.isdecimal() and int(first) > 0:
        return Limit(min(int(first), MOST_THREADS), "OMP_NUM_THREADS")
    if asked:
        warnings.warn(
            f'jaxfuse: OMP_NUM_THREADS is "{asked}", expected a positive whole number; it is ignored, and kernels run on '
            f"{lowest.number} threads ({lowest.reason}). Correct it, or unset it",
            stacklevel=2,
        )
    return lowest


def start(native: ModuleType, limit: Limit) -> Limit:
    """Gives the native module so many threads, and returns how many they are: where the system refuses some, it warns, and the
    limit says so."""
    refusal = native.set_num_threads(limit.number)
    if not refusal:
        return limit
    number = native.num_threads()
    warnings.warn(
        f"jaxfuse: only {number} of {limit.number} threads ({limit.reason}) can be started, the system says: {refusal}. Kernels "
        "run on these; look at ulimit -u, at the container's limit of processes and at its memory",
        stacklevel=2,
    )
    return Limit(number, f"what the system allows of {limit.number} ({limit.reason}): {refusal}")


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _cores(root: Path, processors: frozenset[int]) -> Limit:
    """Two threads of one core share its vector units, which a kernel alone keeps busy."""
    topology = (root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list" for number in processors)
    cores = len({_read(path) or path for path in topology})
    return Limit(cores, f"physical cores of the {len(processors)} processors that the process may run on: {cores}")


def _quotas(root: Path) -> Iterator[Limit]:
    """Of the process's control groups, of both versions, and all that these are in."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = [f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu"] if controllers else ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        for mount in dict.fromkeys(mounts):
            # In a container the group may be named as the host has it, and lie at the mount itself.
            for folder in (Path(group), *Path(group).parents):
                yield from _quota(root / mount / folder.relative_to("/"), root)


def _quota(folder: Path, root: Path) -> Iterator[Limit]:
    path = folder / "cpu.max"
    words = _read(path).split()
    if not words:
        path = folder / "cpu.cfs_quota_us"
        words = [*_read(path).split(), *_read(folder / "cpu.cfs_period_us").split()]
    if len(words) == 2 and words[0].isdecimal() and int(words[1]) > 0:  # "max" or -1: none
        cpus = int(words[0]) / int(words[1])
        yield Limit(max(1, math.ceil(cpus)), f"CPU quota of {cpus:g} processors in /{path.relative_to(root)}")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
