"""The terminal: a progress bar while it runs, a line as each case is done, tables at the end."""

from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from . import report

console = Console()
if not console.is_terminal:
    console = Console(width=200)  # into a file: tables that do not fold


@contextmanager
def progress(steps):
    """Yields (begin(title), advance())."""
    parts = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    # Redrawn rarely: the redrawing takes time from what is being measured.
    with Progress(*parts, console=console, refresh_per_second=0.5) as bar:
        task = bar.add_task("starting", total=steps)
        yield lambda title: bar.update(task, description=title), lambda: bar.advance(task)


def case_done(row, problems):
    times = "  ".join(f"{name} {answer['ms']:.3g}" if "ms" in answer else f"{name} –" for name, answer in row["peers"].items())
    console.print(f"{row['case']}  [bold]{times}[/] ms", highlight=False)
    for sentence in problems:
        console.print(f"  {sentence}", style="red", markup=False)


def tables(rows):
    for allocator in sorted({row["allocator"] for row in rows}, reverse=True):
        for kind, title in report.SECTIONS.items():
            found = [row for row in rows if row["kind"] == kind and row["allocator"] == allocator]
            if not found:
                continue
            names = report.columns(found)
            table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"{title} ({allocator} allocator)", header_style="bold")
            for index, heading in enumerate(report.header(names)):
                words = index < 2  # what is no number may fold
                table.add_column(heading.replace(" ", "\n"), justify="left" if words else "right", no_wrap=not words)
            for row in found:
                table.add_row(*report.cells(row, names))
            console.print(table)
