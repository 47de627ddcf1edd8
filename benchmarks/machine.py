"""Where a result was measured."""

import os
import platform
import re
from pathlib import Path

# Of the many flags, those that decide which kernels run.
_ISA = re.compile(r"avx2|fma|f16c|avx512\w*|avx_vnni|amx_\w+|asimd\w*|bf16|i8mm|sve\w*")


def describe():
    """CPU model, cores, instruction sets, memory, system, python."""
    cpu = _cpuinfo()
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "isa": sorted(flag for flag in cpu.get("flags", cpu.get("Features", "")).split() if _ISA.fullmatch(flag)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
    }


def slug(machine):
    """A file name's part for this kind of machine: "amd-epyc-2-cores"."""
    return re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine['cores']} cores".lower()).strip("-")


def _cpuinfo():
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
