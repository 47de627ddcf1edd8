"""What was fused, what was not, and why: the rows of a program, and what they can be shown as."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from jaxfuse.report import data, html, page, svg, text
from jaxfuse.report.program import Program
from jaxfuse.report.site import Rows, Site
from jaxfuse.runtime import near

FEW = 24  # rows that are printed with the overview; of more the overview says how to see them
ENDINGS = {".html": page.page, ".svg": svg.svg, ".json": data.to_json}


@dataclasses.dataclass(frozen=True)
class FusionReport:
    """The sites of a program, as tuples of `Site`; `str(report)` is an overview, and the rows where they are few.

    fused: what kernels run; skipped: what stays as it is; unfused_steps: what stays outside of a layer that is itself
    fused, and is among `fused` without that step; program: what `explain` knows of the program around them.
    """

    fused: tuple[Site, ...]
    skipped: tuple[Site, ...]
    unfused_steps: tuple[Site, ...] = ()
    program: Program | None = dataclasses.field(default=None, repr=False)

    def __str__(self):
        if not self.fused and not self.skipped:
            return text.NOTHING
        if untraced := text.untraced(self.rows):
            return untraced
        count = len(self.sites)
        rest = self.table() if count <= FEW else f"All {count} rows: print(report.table())"
        return f"{self.overview()}\n\n{rest}"

    @property
    def rows(self) -> Rows:
        """The sites, without the program."""
        return Rows(self.fused, self.skipped, self.unfused_steps)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every row: the fused, the skipped, the steps outside of fused ones."""
        return *self.fused, *self.skipped, *self.unfused_steps

    def overview(self) -> str:
        """How many sites of each pattern and direction are fused, and what stays XLA's, counted by reason."""
        if untraced := text.untraced(self.rows):
            return untraced
        parts = [text.headline(self.rows)]
        for block in text.summary(self.rows):
            parts += [block.title, text.printed(block)] if block.title else [text.printed(block)]
        return "\n\n".join(parts)

    def table(self) -> str:
        """Every row: the fused sites, the skipped ones, and the steps that stay outside of fused ones."""
        blocks = text.every(self.rows)
        return "\n".join(f"{block.title}\n{text.printed(block)}" for block in blocks) or text.NOTHING

    def to_dict(self) -> dict[str, Any]:
        """The report as numbers, strings, lists and dicts, as JSON has them.

        Returns: {"schema": 1, "fused": [site], "skipped": [site], "unfused_steps": [site], "program": program or None}. Sites
        and the program have the fields of `Site` and `Program`; a reason is {"kind": its type's name, "text": its words}.
        """
        return data.to_dict(self.rows, self.program)

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return data.to_json(self.rows, self.program)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> "FusionReport":
        """The report that gave this dict.

        Args:
          found: what `to_dict` returned, perhaps through JSON.

        Returns: a report equal to that one.

        Raises: ValueError if it is of another schema.
        """
        return cls(**data.from_dict(found))

    @classmethod
    def from_json(cls, found: str) -> "FusionReport":
        """The report that `to_json` wrote. Raises: ValueError if it is no JSON, or of another schema; TypeError if it is no text."""
        if not isinstance(found, (str, bytes, bytearray)):
            raise TypeError(f"FusionReport.from_json: found is of type {type(found).__name__}, expected the text that to_json gives; "
                            "from_dict takes a dict, and of a file give its read_text()")
        try:
            fields = json.loads(found)
        except ValueError as error:
            raise ValueError(f"FusionReport.from_json: found is {found[:40]!r}, expected the text that to_json gives ({error}); of a file "
                             "give its read_text()") from error
        return cls.from_dict(fields)

    def _repr_html_(self) -> str:
        """The overview for Jupyter."""
        return html.summary(self.rows)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the report to a file, by its ending.

        Args:
          path: "x.html" is a page that stands alone, with the lines of your code around each site; "x.svg" a drawing of modules
            and sites; "x.json" the text of `to_json`.

        Raises: ValueError for another ending, FileNotFoundError for a folder that is not there, and what else `open` raises.
        """
        write, path = writer(path), pathlib.Path(path)
        if wrong := near.no_folder(path):
            raise FileNotFoundError(f"FusionReport.save: {wrong}")
        path.write_text(write(self.rows, self.program), encoding="utf-8")


def writer(path: str | os.PathLike):
    """What makes the text of a file with this ending. Raises: ValueError for an ending that no report has."""
    if write := ENDINGS.get(pathlib.Path(path).suffix.lower()):
        return write
    raise ValueError(f"a report is saved as {', '.join(ENDINGS)}, not as {os.fspath(path)!r}")
