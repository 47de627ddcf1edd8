"""README's table and its two pictures, made from one result: python -m benchmarks --readme RESULT.json."""

import json
import textwrap
from pathlib import Path

from . import pictures, report

BEGIN, END = "<!-- benchmark table -->", "<!-- end -->"
CASES = (
    *(f"resnet50.b{batch}.{dtype}.inference" for batch in (1, 8) for dtype in ("f32", "bf16")),
    *(f"resnet50.b8.{dtype}.training" for dtype in ("f32", "bf16")),
    *(f"mobilenet_v2.b1.{dtype}.inference" for dtype in ("f32", "bf16")),
)
COLUMNS = {"jaxfuse": "jaxfuse", "frozen": "freeze", "xla": "XLA", "torch": "PyTorch", "torch-compile": "torch.compile",
           "openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}


def refresh(root: Path, result_path: Path) -> None:
    """Puts the networks of the result between the markers of root/README.md, and draws them into root/docs/images/.

    Raises ValueError for a result of --quick, and for a README without the markers.
    """
    result = json.loads(Path(result_path).read_text())
    if result["settings"]["quick"]:
        raise ValueError(f"benchmarks: {result_path} is of --quick, which measures nothing worth quoting")
    readme = root / "README.md"
    text = readme.read_text()
    if text.count(BEGIN) != 1 or END not in text.partition(BEGIN)[2]:
        raise ValueError(f"benchmarks: {readme} must have one line {BEGIN} and after it a line {END}")
    before, _, rest = text.partition(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n{table(result, Path(result_path).stem)}{END}{rest.partition(END)[2]}")
    images = root / "docs" / "images"
    images.mkdir(parents=True, exist_ok=True)
    pictures.networks(rows(result), COLUMNS, images / "speed.png")
    pictures.memory([row for row in result["rows"] if row["task"] == "training"], images / "memory.png")


def rows(result: dict) -> list[dict]:
    """At most eight networks, each with the milliseconds of its peers under "ms"; XLA's are those of its faster setting."""
    by_name = {row["case"]: row for row in result["rows"] if row["allocator"] == "tuned"}
    found = []
    for row in (by_name[name] for name in CASES if name in by_name):
        ms = {name: answer["ms"] for name, answer in row["peers"].items() if answer.get("ms")}
        ms["xla"] = min(ms["xla"], ms.pop("xla-tuned", ms["xla"]))
        found.append(row | {"ms": ms})
    return found


def table(result: dict, name: str) -> str:
    """As markdown, the fastest of each row in bold."""
    machine, versions = result["machine"], report.versions(result["peers"])
    shown = [f"{key} {versions[key].partition('+')[0].partition('-')[0]}" for key in ("jax", "torch", "openvino", "onnxruntime")
             if key in versions]
    words = (f"Milliseconds, {result['date']}: {machine['cores']} cores of {machine['cpu']}, {', '.join(shown)}. "
             f"The fastest is bold. XLA is the faster of two settings. All rows: `benchmarks/results/{name}.md`.")
    lines = [f"| network | {' | '.join(COLUMNS.values())} |", "|---|" + "---:|" * len(COLUMNS)]
    for row in rows(result):
        best = min(row["ms"].values())
        cells = [_cell(row["ms"].get(name), best) for name in COLUMNS]
        lines.append(f"| {title(row)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *textwrap.wrap(words, report.LINE, break_on_hyphens=False), ""])


def title(row: dict) -> str:
    return f"{row['title']}, {row['dtype']}, batch {row['batch']}, {report.TASKS[row['task']]}"


def _cell(ms: float | None, best: float) -> str:
    number = report.number(ms)
    return f"**{number}**" if ms == best else number
