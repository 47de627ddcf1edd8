"""The rules that `python -m jaxfuse bench --tune` measured on this machine, kept in a file of the user's cache.

A file that cannot be read, is of a newer format, or was measured on another machine or with other versions is ignored, with
one warning that says why. Nothing is read before the first site is judged.
"""

import contextlib
import functools
import importlib.metadata
import json
import platform
import re
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import jaxlib

from jaxfuse.runtime import cache, ffi
from jaxfuse.tuning.measured import parsed
from jaxfuse.tuning.rules.rule import Rule

FORMAT = 1
INSTEAD = "the rules that come with jaxfuse are in force, and `python -m jaxfuse bench --tune` measures here"


class Tuned(NamedTuple):
    """What the file has: the rules of each op and the day they were measured; or why it is ignored. All empty: no file."""

    rules: dict[str, tuple[Rule, ...]] = {}
    date: str = ""
    ignored: str = ""


def path() -> Path:
    """rules.json in the folder of caches."""
    return cache.folder() / "rules.json"


@functools.cache
def isa() -> tuple[str, ...]:
    """Names of the instruction sets that our kernels and oneDNN use here; empty without a native module."""
    return tuple(_info()[key] for key in ("simd", "isa") if _info().get(key))


@functools.cache
def computes_whole_vectors() -> bool:
    """Whether the CPU takes the vectors of its instruction set at once, as Zen 5 does AVX-512's and Zen 3 AVX2's, and not half by half, as
    Zen 4 and Zen 1."""
    return _info().get("vectors") == "whole"


@functools.cache
def multiplies_matrices() -> bool:
    """Whether our loops multiply matrices of bfloat16 and of bytes by one instruction (AMX). JAXFUSE_SIMD=avx512 leaves that out."""
    return _info().get("int8", "").endswith("amx")


@functools.cache
def identity() -> dict:
    """What measurements hold for: the machine, and the versions of what was measured."""
    version = "unknown"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("jaxfuse")
    versions = {"jaxfuse": version, "jaxlib": jaxlib.__version__}
    return versions | {"cpu": _cpu(), "isa": list(isa()), "threads": ffi.thread_limit().number if _info() else 0}


def rules(op: str) -> tuple[Rule, ...]:
    """The rules of an op that were measured here."""
    return _warned(path()).rules.get(op, ())


def read() -> Tuned:
    """The file as it is now."""
    where = path()
    try:
        return _parsed(json.loads(where.read_text()))
    except FileNotFoundError:
        return Tuned()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return Tuned(ignored=f"it cannot be read ({type(error).__name__}: {error})")


def save(measured: dict[str, tuple[Rule, ...]], date: str) -> Path:
    """Replaces the file, and says where it is. Raises OSError where that is not possible."""
    where = writable()
    rows = {op: [dict(shape=rule.shape, dtype=rule.dtype, onednn=rule.onednn, points=rule.points) for rule in own]
            for op, own in measured.items()}
    data = {"format": FORMAT, "date": date, **identity(), "rules": rows}
    cache.replace(where, json.dumps(data))
    _warned.cache_clear()
    return where


def writable() -> Path:
    """The file's path, its folder made. Raises OSError where nothing can be written."""
    where = path()
    where.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=where.parent):
        return where


@functools.cache
def _warned(where: Path) -> Tuned:
    """`read`, once in a process for each path; a file that is ignored is spoken of then."""
    tuned = read()
    if tuned.ignored:
        warnings.warn(f"jaxfuse: {where} is ignored: {tuned.ignored}; {INSTEAD}", RuntimeWarning, stacklevel=2)
    return tuned


def _parsed(data: dict) -> Tuned:
    if data["format"] != FORMAT:
        return Tuned(ignored=f"it is of format {data['format']}, and this version of jaxfuse reads format {FORMAT}")
    for key, here in identity().items():
        if data[key] != here:
            return Tuned(ignored=f"it was measured with {key} {data[key]}, and here it is {here}")
    return Tuned(parsed(data["rules"]), str(data["date"]))


def _info() -> dict:
    module = ffi.native()
    return module.info() if module else {}


def _cpu() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor() or platform.machine()
