"""The summary as small HTML tables: for Jupyter, and for the page."""

from html import escape

from jaxfuse.report import text
from jaxfuse.report.site import Rows


def summary(rows: Rows) -> str:
    """The headline, the patterns, the reasons."""
    return f"<p><b>{escape(text.headline(rows))}</b></p>\n{tables(rows)}" if any(rows) else tables(rows)


def tables(rows: Rows) -> str:
    """The patterns and the reasons, each in a `div`."""
    if not any(rows):
        return f"<div>{escape(text.NOTHING)}</div>"
    return "\n".join(map(_table, text.summary(rows)))


def _table(block: text.Block) -> str:
    def cells(tag: str, values: tuple[str, ...]) -> str:
        aligned = (f'<{tag} class="number" style="text-align:right">' if name in text.NUMBERS else f'<{tag} style="text-align:left">'
                   for name in block.columns)
        return f"<tr>{''.join(f'{start}{escape(value)}</{tag}>' for start, value in zip(aligned, values))}</tr>"

    title = f"<h2>{escape(block.title)}</h2>\n" if block.title else ""
    rows = "\n".join(cells("td", row) for row in block.rows)
    return f"<div>{title}<table>\n<thead>{cells('th', block.columns)}</thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>"
