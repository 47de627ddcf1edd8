"""The directive `figures`: the newest measurements of a kind of case, as a table. Their place is benchmarks/results/, and only that.

    ```{figures} norm
    ```
"""

import json
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from benchmarks import report

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
PEERS = {"xla": "XLA", "xla-tuned": "XLA tuned", "torch": "PyTorch", "torch-compile": "torch.compile"}


class Figures(SphinxDirective):
    required_arguments = 1
    optional_arguments = 1  # a word of the cases' titles

    def run(self):
        self.env.note_dependency(str(RESULTS))
        parent = nodes.Element()
        self.state.nested_parse(StringList(table(*self.arguments), "figures"), 0, parent)
        return parent.children


def table(kind: str, word: str = "") -> list[str]:
    """Lines of markdown. Raises ValueError if nothing of the kind was measured."""
    def rows_of(result):
        return [row for row in result["rows"] if row["kind"] == kind and word.lower() in row["title"].lower()
                and row["allocator"] == "tuned" and row["peers"].get("jaxfuse", {}).get("ms")]

    results = [json.loads(path.read_text()) | {"name": path.stem} for path in sorted(RESULTS.glob("*.json"))]
    results = sorted((result for result in results if rows_of(result)), key=lambda result: result["date"])
    if not results:
        raise ValueError(f"figures: nothing of {kind!r} and {word!r} is in {RESULTS}")
    result = results[-1]
    machine = result["machine"]
    instructions = "AVX-512" if "avx512f" in machine["isa"] else "AVX2"
    peers = [name for name in PEERS if name in result["peers"]]
    where = f"{result['date']}, {machine['cores']} cores of {machine['cpu']} ({instructions}; `benchmarks/results/{result['name']}.md`)"
    lines = [f"{where}: ms, and jaxfuse's speed over each peer's.", "",
             f"| case | run | jaxfuse ms | {' | '.join('÷ ' + PEERS[name] for name in peers)} |", "|---|---|" + "---:|" * (1 + len(peers))]
    for row in rows_of(result):
        ours = row["peers"]["jaxfuse"]["ms"]
        ratios = [row["peers"].get(name, {}).get("ms") for name in peers]
        cells = [row["title"], f"{row['dtype']}, batch {row['batch']}, {report.TASKS[row['task']]}", f"{ours:.3g}",
                 *("–" if theirs is None else f"{theirs / ours:.2f}" for theirs in ratios)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def setup(app):
    app.add_directive("figures", Figures)
    return {"parallel_read_safe": True}
