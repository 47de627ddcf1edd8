"""A result as JSON and as markdown."""

import json
import textwrap

from . import checks
from .cases import CASES
from .peers import OURS, PEERS

LINE = 118
SECTIONS = {
    "model": "Networks, 224×224 or 128 tokens",
    "batch_norm": "Batch norm in training, batch 8",
    "conv": "Convolution + bias + activation",
    "dense": "Dense layers, 128 tokens",
    "norm": "Layer, RMS and group norm, batch 8",
    "recurrent": "LSTM and GRU sequences, batch 8",
    "transformer": "Attention and transformer layers, batch 8",
    "optimizer": "Optimizer updates, in place",
    "issue": "Users' issues",
}
TASKS = {"forward": "forward", "gradient": "forward+backward", "inference": "inference", "training": "training step", "update": "update"}


def fitting_rows(path, result):
    """The rows of the file. Raises ValueError if it was measured on another machine or with other versions or settings."""
    old, result = json.loads(path.read_text()), _as_read(result)
    same = all(old[key] == result[key] for key in ("machine", "settings"))
    both = old["peers"].keys() & result["peers"].keys()
    if not same or any(old["peers"][name] != result["peers"][name] for name in both):
        other = "was measured on another machine or with other versions or settings"
        raise ValueError(f"benchmarks: {path} {other}; --json names another file")
    return old["rows"]


def merge(path, result):
    """Writes the result; rows of other cases that the file has from the same machine and the same versions stay."""
    result = _as_read(result)
    if path.exists():
        measured = {_key(row) for row in result["rows"]}
        rows = [row for row in fitting_rows(path, result) if _key(row) not in measured] + result["rows"]
        result = {**result, "peers": {**json.loads(path.read_text())["peers"], **result["peers"]}, "rows": rows}
    order = {case.name: index for index, case in enumerate(CASES)}
    result = {**result, "rows": sorted(result["rows"], key=lambda row: (row["allocator"], order.get(row["case"], len(order))))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(result))


def _as_read(result):
    return json.loads(json.dumps(result, allow_nan=False))


def _key(row):
    return row["case"], row["allocator"]


def columns(rows):
    """The peers that some row has, in the order of the table of peers."""
    return [name for name in PEERS if any(name in row["peers"] for row in rows)]


def _rivals(names):
    return [name for name in names if name not in OURS] if "jaxfuse" in names else []


def ratio(ms, rival):
    """Our speed over the rival's: that of a frozen network beside what has constant weights too."""
    ours = (PEERS[rival].has_constants and ms.get("frozen")) or ms["jaxfuse"]
    return ms[rival] / ours if ms[rival] and ours else None


def header(names):
    times = [f"{PEERS[name].title} ms" for name in names]
    return ["case", "run", *times, *(f"÷ {PEERS[name].title}" for name in _rivals(names)), "error/XLA's"]


def cells(row, names):
    """One row of the table as text. A ratio is our speed over the peer's; a star: most of the turns were disturbed."""
    answers = {name: row["peers"].get(name, {}) for name in names}
    ms = {name: answer.get("ms") for name, answer in answers.items()}
    ratios = [ratio(ms, name) for name in _rivals(names)]
    starred = {name for name, answer in answers.items() if ms[name] and 2 * answer["disturbed"] > len(answer["turns_ms"])}
    return [
        row["title"],
        f"{row['dtype']}, batch {row['batch']}, {TASKS[row['task']]}",
        *(number(ms[name]) + "*" * (name in starred) for name in names),
        *(number(ratio) for ratio in ratios),
        _errors(row),
    ]


def number(value):
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"


def _errors(row):
    """The output whose error against float64 is largest next to what it may be: "2.0e-07 / 3.0e-07"."""
    fused, unfused = row["errors"].get("jaxfuse"), row["errors"].get("xla")
    if not fused or not unfused:
        return "–"
    floor = checks.floor(row["kind"], row["dtype"])
    name = max(fused, key=lambda name: fused[name]["rms"] / max(unfused[name]["rms"], floor))
    return f"{fused[name]['rms']:.1e} / {unfused[name]['rms']:.1e}"


def markdown(result, kinds=tuple(SECTIONS)):
    """A text of what was measured where, and a table for each of these kinds of cases."""
    machine, settings = result["machine"], result["settings"]
    named = [f"{key} {value}" for key, value in versions(result["peers"]).items()]
    explanation = (
        f"{result['date']}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['os']}; "
        f"{', '.join(named)}. "
        f"Median ms per call of {settings['turns']} turns, each peer in its own process, the others stopped meanwhile. "
        "A star: other work on the machine disturbed most of the turns. "
        "“÷ peer” is jaxfuse's speed over the peer's: above 1 jaxfuse is faster. In inference torch.compile, OpenVINO and ONNX Runtime "
        "have the weights as constants, and are compared with `jaxfuse.freeze`. "
        "The last column is the root mean square error against float64, fused / unfused, where they compare worst."
    )
    lines = [*textwrap.wrap(explanation, LINE, break_on_hyphens=False), ""]
    for allocator in sorted({row["allocator"] for row in result["rows"]}, reverse=True):
        for kind in kinds:
            rows = [row for row in result["rows"] if row["kind"] == kind and row["allocator"] == allocator]
            if rows:
                lines += _section(f"{SECTIONS[kind]} ({allocator} allocator)", rows)
    return "\n".join(lines)


def versions(peers):
    shown = "jax", "jaxlib", "jaxfuse", "jaxfuse oneDNN", "torch", "torch oneDNN", "openvino", "onnxruntime"
    return {key: peer["versions"][key] for peer in peers.values() for key in shown if key in peer["versions"]}


def _section(title, rows):
    names = columns(rows)
    table = [header(names), ["---"] * 2 + ["---:"] * (len(header(names)) - 2), *(cells(row, names) for row in rows)]
    lines = [f"<details><summary>{title}, {len(rows)} rows</summary>" if len(rows) > 20 else f"**{title}**", ""]
    lines += [f"| {' | '.join(row)} |" for row in table] + [""]
    memory = [line for row in rows if row["task"] == "training" for line in [_memory(row)] if line]
    return lines + memory + ["</details>", ""] * (len(rows) > 20)


def _memory(row):
    temp = {name: row["peers"].get(name, {}).get("temp_bytes") for name in ("jaxfuse", "xla")}
    if not all(temp.values()):
        return ""
    fused, unfused = (f"{temp[name] / 2**20:.0f} MiB" for name in ("jaxfuse", "xla"))
    return f"Temporary memory of the {row['title']} {row['dtype']} training step: {fused} fused, {unfused} unfused.\n"
