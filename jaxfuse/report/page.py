"""A report as one page that needs no network."""

import base64
import hashlib
import json
import linecache
import os
import re
from html import escape
from importlib import resources
from typing import Any

from jaxfuse.report import html
from jaxfuse.report.program import Equation, Program
from jaxfuse.report.site import Rows, Site, Times
from jaxfuse.report.tree import Branch, tree
from jaxfuse.runtime.reasons import heading

SCRIPTS = "base", "layout", "graph", "table", "memory", "detail", "main"
AROUND = 6  # lines of code before and after that of a site
STATES = "fused", "skipped", "step"  # what the page calls the parts of `Rows`


def page(rows: Rows, program: Program | None) -> str:
    """The page as HTML text. It holds the lines of code around each site, where their files are there."""
    script = "\n".join(_file(f"{name}.js") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": escape(program.name if program else "report"),
        "about": escape(f"jaxfuse · platform {program.platform} · policy {program.policy}" if program else "jaxfuse"),
        "hash": f"sha256-{digest}",
        "style": _file("page.css"),
        "cards": "".join(map(_card, *zip(*_cards(rows, program)))),
        "summary": html.tables(rows),
        "data": _embedded(_data(rows, program)),
        "script": script,
    }
    return re.sub(r"\$(\w+)", lambda found: parts[found[1]], _file("page.html"))


def _file(name: str) -> str:
    return (resources.files("jaxfuse.report") / "web" / name).read_text(encoding="utf-8")


def _embedded(data: Any) -> str:
    """JSON that ends no script element, whatever strings are in it."""
    found = json.dumps(data, separators=(",", ":"))
    return found.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _card(number: str, words: str) -> str:
    return f'<div><b>{escape(number)}</b><span class="quiet">{escape(words)}</span></div>'


def _cards(rows: Rows, program: Program | None) -> list[tuple[str, str]]:
    """The numbers at the top: (number, what it is)."""
    sites = len(rows.fused) + len(rows.skipped)
    saved = sum(site.bytes_saved for site in rows.fused)
    found = [(f"{len(rows.fused)} of {sites}", "sites fused"), (_bytes(saved), "of memory traffic saved, by estimate")]
    if program and program.memory.before:
        before, after = max(program.memory.before), max(program.memory.after)
        found.append((f"{_bytes(before)} → {_bytes(after)}", "peak of live values, by estimate"))
    times = [site.times for site in rows.fused if site.times and site.times.fused and site.times.unfused]
    if times:
        unfused, fused = sum(t.unfused or 0 for t in times), sum(t.fused or 0 for t in times)
        found.append((f"{unfused:.1f} → {fused:.1f} ms", f"{len(times)} fused sites, each alone"))
    elif program:
        found.append((str(len(program.equations)), "equations"))
    return found


def _bytes(number: float) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _data(rows: Rows, program: Program | None) -> dict[str, Any]:
    """What the scripts read; they say what for."""
    strings: dict[str, int] = {}

    def number(word: str) -> int:
        return strings.setdefault(word, len(strings))

    def listed(e: Equation) -> list:
        return [number(e.primitive), list(map(number, e.inputs)), list(map(number, e.outputs)), e.bytes, e.reads,
                number(e.source), number(e.scope), number(e.direction), e.parent]

    equations = list(map(listed, program.equations)) if program else []
    sources = {e.source for e in program.equations} if program else set()
    root = tree(rows, program) if program else Branch("root", "")
    return {
        "sites": [_site(site, state) for sites, state in zip(rows, STATES) for site in sites],
        "equations": equations,
        "strings": list(strings),
        "tree": _boxes(root),
        "memory": {"before": program.memory.before, "after": program.memory.after} if program else None,
        "code": code(sources | {site.source for sites in rows for site in sites}, program.folder if program else os.getcwd()),
        "around": AROUND,
    }


def _site(site: Site, state: str) -> dict[str, Any]:
    times = site.times or Times(None, None)
    return {
        "state": state, "pattern": site.pattern, "direction": site.direction, "source": site.source, "module": site.module,
        "operands": site.operands, "types": [f"{d}[{','.join(map(str, s))}]" for d, s in zip(site.dtypes, site.shapes)],
        "kernel": site.kernel, "bytes_saved": site.bytes_saved, "reason": site.reason,
        "heading": heading(site.reason) if site.reason else "", "equations": site.equations,
        "fused_ms": times.fused, "unfused_ms": times.unfused, "why": times.why,
    }


def _boxes(branch: Branch) -> list:
    return [branch.kind, branch.label, branch.note, branch.site, branch.equation, list(map(_boxes, branch.children))]


def code(sources: set[str], folder: str) -> dict[str, dict[int, str]]:
    """The lines around each "file:line", by file and number; nothing of files that are not there."""
    found: dict[str, dict[int, str]] = {}
    for source in sorted(sources):
        name, _, line = source.rpartition(":")
        lines = linecache.getlines(os.path.join(folder, name)) if line.isdecimal() else []
        if lines:
            first, last = max(1, int(line) - AROUND), min(len(lines), int(line) + AROUND)
            found.setdefault(name, {}).update((n, lines[n - 1].rstrip()) for n in range(first, last + 1))
    return found
