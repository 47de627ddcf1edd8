"""A program as a tree: passes, modules, sites, equations. The page and the drawing show it."""

import dataclasses
import os.path
from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import median_low
from typing import Literal

from jaxfuse.report.program import Equation, Program
from jaxfuse.report.site import Rows, Site, untransformed

Kind = Literal["root", "pass", "module", "body", "lines", "site", "equation"]
Key = tuple[Kind, str | int]
FORWARD, BACKWARD, UPDATE = "forward pass", "backward pass", "update"
MANY = 12  # equations side by side that are put together by the line they come from


@dataclasses.dataclass
class Branch:
    """A box: `label` and, smaller, `note`; the site or the equation that it stands for, by index; what is in it."""

    kind: Kind
    label: str
    note: str = ""
    site: int | None = None
    equation: int | None = None
    children: "list[Branch]" = dataclasses.field(default_factory=list)


def tree(rows: Rows, program: Program) -> Branch:
    """The boxes of a program in its order. An equation is in one box: that of the first site that speaks of it, or its module's."""
    planted = _Tree(program)
    free = set(range(len(program.equations)))
    sites = (*rows.fused, *rows.skipped, *rows.unfused_steps)
    owned: dict[int, tuple[int, list[int]]] = {}  # by the first equation of a site: its number, its equations
    for number, site in enumerate(sites):
        own = [index for index in site.equations if index in free]
        if own:
            free -= set(own)
            owned[own[0]] = number, own
    for index in sorted([*owned, *free], key=planted.order):
        if index in owned:
            number, own = owned[index]
            planted.add_site(number, sites[number], own)
        else:
            planted.add_equation(index)
    return _simplified(planted.root, lambda index: planted.order(index)[0], program)


class _Tree:
    def __init__(self, program: Program):
        self.program, self.equations = program, program.equations
        self.root = Branch("root", program.name)
        self._at: dict[tuple[Key, ...], Branch] = {(): self.root}
        self._bodies = {equation.parent for equation in self.equations}
        starts = (index for index, e in enumerate(self.equations) if e.direction == "backward" and e.parent is None)
        self._backward_from = next(starts, None)

    def order(self, index: int) -> tuple[int, ...]:
        """Equations in a body are where the loop is."""
        parent = self.equations[index].parent
        return (index,) if parent is None else (*self.order(parent), index)

    def path(self, index: int) -> tuple[Key, ...]:
        """The boxes around an equation."""
        equation = self.equations[index]
        names = filter(None, untransformed(equation.scope).split("/"))
        modules: tuple[Key, ...] = tuple(("module", name) for name in names)
        if equation.parent is not None:
            return *self.path(equation.parent), ("body", equation.parent), *modules
        return (("pass", self._pass(index, equation)), *modules) if self._backward_from is not None else modules

    def add_equation(self, index: int) -> None:
        if index in self._bodies:
            self._branch((*self.path(index), ("body", index)))
        else:
            equation = self.equations[index]
            leaf = Branch("equation", equation.primitive, ", ".join(equation.outputs), equation=index)
            self._branch(self.path(index)).children.append(leaf)

    def add_site(self, number: int, site: Site, own: Sequence[int]) -> None:
        paths = [self.path(index) for index in own]
        if self._backward_from is not None:
            wanted = BACKWARD if site.direction == "backward" else FORWARD
            paths = [path for path in paths if path[0][1] == wanted] or paths
        common = tuple(os.path.commonprefix(paths))  # type: ignore[type-var]  # it takes any sequences
        common = common[: next((i for i, key in enumerate(common) if key == ("body", own[0])), len(common))]
        below = dict.fromkeys(str(path[len(common)][1]) for path in paths if len(path) > len(common))
        branch = Branch("site", site.pattern, " · ".join(below) or site.module.split("/")[-1], site=number)
        branch.children = [Branch("equation", self.equations[i].primitive, ", ".join(self.equations[i].outputs), equation=i) for i in own]
        self._branch(common).children.append(branch)

    def _pass(self, index: int, equation: Equation) -> str:
        if equation.direction == "backward":
            return BACKWARD
        is_after = self._backward_from is not None and index > self._backward_from and "jvp(" not in equation.scope
        return UPDATE if is_after else FORWARD

    def _branch(self, path: tuple[Key, ...]) -> Branch:
        if path not in self._at:
            kind, name = path[-1]
            if isinstance(name, int):
                branch = Branch(kind, self.equations[name].primitive, self.equations[name].source, equation=name)
            else:
                branch = Branch(kind, name)
            self._branch(path[:-1]).children.append(branch)
            self._at[path] = branch
        return self._at[path]


def _simplified(branch: Branch, place: Callable[[int], int], program: Program) -> Branch:
    """In the order of the program: a box is where the middle one of its equations is, for one that was traced early, such as a
    constant, tells little. Without boxes around one box; many equations of one line are one box."""
    children = [_simplified(child, place, program) for child in branch.children]
    if branch.kind != "site":
        children.sort(key=lambda child: median_low(map(place, _equations(child))))
    if branch.kind != "site" and sum(child.kind == "equation" for child in children) > MANY:
        children = _by_line(children, program)
    branch.children = children
    if branch.kind != "module" or len(children) != 1 or children[0].kind not in ("module", "site"):
        return branch
    (only,) = children
    if only.kind == "module":
        only.label = f"{branch.label}/{only.label}"
    else:
        only.note = branch.label if not only.note or only.note == branch.label else f"{branch.label}/{only.note}"
    return only


def _equations(branch: Branch) -> list[int]:
    own = [branch.equation] if branch.equation is not None else []
    return own + [index for child in branch.children for index in _equations(child)]


def _by_line(children: list[Branch], program: Program) -> list[Branch]:
    """Neighbours that are equations of one line of code in one box."""
    def line(child: Branch) -> str:
        return program.equations[child.equation].source if child.kind == "equation" and child.equation is not None else ""

    found: list[Branch] = []
    for source, run in groupby(children, line):
        members = list(run)
        found += members if not source or len(members) < 3 else [Branch("lines", os.path.basename(source), children=members)]
    return found
