"""A report as a drawing for papers: the modules with their sites, one column for each pass."""

from html import escape

from jaxfuse.report import text
from jaxfuse.report.program import Program
from jaxfuse.report.site import Rows
from jaxfuse.report.tree import Branch, tree

WIDTH, GAP, PAD, CHIP, LINE = 380, 24, 8, 20, 18
COLORS = {"fused": ("#d5efe9", "#0f766e"), "skipped": ("#fdebc8", "#b45309"), "step": ("#e9e3f8", "#6d28d9")}
LEGEND = {"fused": "fused", "skipped": "left to XLA", "step": "step outside of a fused site"}
STYLE = """text{font:11px Helvetica,Arial,sans-serif;fill:#1f2933}.t{font-size:15px;font-weight:bold}.m{font-weight:bold}.n{fill:#6b7680}
.b{fill:#fff;stroke:#c3ccd5}"""


def svg(rows: Rows, program: Program | None) -> str:
    """The drawing as SVG text; without a program a list of the sites."""
    root = tree(rows, program) if program else Branch("root", "", children=[
        Branch("site", site.pattern, site.module, site=i) for i, site in enumerate((*rows.fused, *rows.skipped, *rows.unfused_steps))])
    drawing = _Drawing(rows)
    columns = [child for child in root.children if child.kind == "pass"] or [root]
    top, bottom, x = 74, 0.0, float(GAP)
    for column in columns:
        bottom = max(bottom, drawing.column(column, x, top))
        x += WIDTH + GAP
    width, height = max(x, 640), bottom + GAP
    drawing.text(GAP, 28, program.name if program else "", "t")
    drawing.text(GAP, 48, text.headline(rows), "n")
    drawing.legend(GAP, 56, {drawing.state(site) for site in _sites(root)})
    body = "\n".join(drawing.parts)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">\n'
            f"<style>{STYLE}</style>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{body}\n</svg>\n")


class _Drawing:
    def __init__(self, rows: Rows):
        self.parts: list[str] = []
        states = ["fused"] * len(rows.fused) + ["skipped"] * len(rows.skipped) + ["step"] * len(rows.unfused_steps)
        self._states = dict(enumerate(states))

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def state(self, branch: Branch) -> str:
        return self._states[branch.site] if branch.site is not None else "fused"

    def legend(self, x: float, y: float, states: set[str]) -> None:
        for state, words in LEGEND.items():
            if state in states:
                self._chip(x, y, 14, 12, state)
                self.text(x + 19, y + 10, words, "n")
                x += 19 + _width(words) + 22

    def column(self, branch: Branch, x: float, y: float) -> float:
        """Draws a pass from (x, y) on; returns where it ends."""
        if branch.kind == "pass":
            self.text(x, y + 14, branch.label, "m")
            y += 22
        y = self._inside(branch, x, y, WIDTH)
        others = _equations(branch)
        self.text(x + 2, y + 12, f"{others} equation{'s' * (others != 1)} outside of sites", "n")
        return y + LINE

    def _inside(self, branch: Branch, x: float, y: float, width: float) -> float:
        """The sites side by side, the modules with several below each other."""
        at, row_used = x, False
        for child in branch.children:
            sites = _sites(child)
            if len(sites) == 1:
                size = min(_width(sites[0].label) + 14, width)
                if row_used and at + size > x + width:
                    at, y = x, y + CHIP + 4
                self._site(sites[0], at, y, size)
                at, row_used = at + size + 5, True
            elif sites:
                if row_used:
                    at, y, row_used = x, y + CHIP + 6, False
                y = self._module(child, x, y, width)
        return y + (CHIP + 4) * row_used

    def _module(self, branch: Branch, x: float, y: float, width: float) -> float:
        at = len(self.parts)
        self.text(x + PAD, y + 15, branch.label, "m")
        bottom = self._inside(branch, x + PAD, y + 22, width - 2 * PAD) + 3
        self.parts.insert(at, f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{bottom - y:g}" rx="5" class="b"/>')
        return bottom + 6

    def _site(self, branch: Branch, x: float, y: float, width: float) -> None:
        self._chip(x, y, width, CHIP, self.state(branch), f"{branch.label} · {branch.note}" if branch.note else branch.label)
        self.text(x + 7, y + 14, branch.label)

    def _chip(self, x: float, y: float, width: float, height: float, state: str, title: str = "") -> None:
        fill, line = COLORS[state]
        dashes = "" if state == "fused" else ' stroke-dasharray="4 2"'
        said = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{line}"{dashes}>'
                          f"{said}</rect>")


def _width(words: str) -> float:
    """Of the words as they are drawn, about."""
    return 6.1 * len(words)


def _sites(branch: Branch) -> list[Branch]:
    return [branch] if branch.site is not None else [site for child in branch.children for site in _sites(child)]


def _equations(branch: Branch) -> int:
    """Of the branch, those of its sites aside."""
    if branch.site is not None:
        return 0
    return sum(map(_equations, branch.children)) if branch.children else int(branch.equation is not None)
