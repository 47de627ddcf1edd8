"""Results as pictures, by matplotlib."""

from pathlib import Path

from . import report
from .peers import OURS, PEERS

OUR_COLOUR, FROZEN_COLOUR, OTHERS, FAINT = "#1f5fa8", "#6ba3dc", "#b9bec6", "#555555"
COLOURS = {"xla": "#c9a227", "xla-tuned": "#8a6d00", "torch": "#d9541e", "torch-compile": "#8c2d04", "openvino": "#6a51a3",
           "onnxruntime": "#2a8a57"}
ABSENT = "matplotlib is not installed, so there is no picture: python -m pip install matplotlib"


def _pyplot():
    """Raises ImportError where matplotlib is absent."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def networks(rows: list[dict], columns: dict[str, str], path: Path) -> None:
    """A panel for each network, a bar for each peer: milliseconds."""
    plt = _pyplot()
    figure, panels = plt.subplots(-(-len(rows) // 4), min(len(rows), 4), figsize=(13, 2.7 * -(-len(rows) // 4)), squeeze=False)
    for panel, row in zip(panels.flat, rows):
        names = [name for name in reversed(columns) if name in row["ms"]]
        colours = [{"jaxfuse": OUR_COLOUR, "frozen": FROZEN_COLOUR}.get(name, OTHERS) for name in names]
        bars = panel.barh([columns[name] for name in names], [row["ms"][name] for name in names], color=colours)
        panel.bar_label(bars, [report.number(row["ms"][name]) for name in names], padding=2, fontsize=8)
        panel.set_title(f"{row['title']}, {row['dtype']}\n{report.TASKS[row['task']]}, batch {row['batch']}", fontsize=9)
        panel.set_xlim(0, 1.18 * max(row["ms"].values()))
        panel.set_xticks([])
        panel.tick_params(axis="y", length=0, labelsize=8)
        panel.spines[["top", "right", "bottom"]].set_visible(False)
    for panel in panels.flat[len(rows):]:
        panel.set_axis_off()
    figure.subplots_adjust(wspace=0.6, hspace=0.3)
    figure.suptitle("Milliseconds: shorter is faster. jaxfuse is blue.", fontsize=10, color=FAINT)
    _saved(plt, figure, path)


def memory(rows: list[dict], path: Path) -> None:
    """Temporary memory of train steps, fused and unfused."""
    plt = _pyplot()
    rows = [row for row in rows if all(row["peers"].get(name, {}).get("temp_bytes") for name in ("jaxfuse", "xla"))]
    figure, panel = plt.subplots(figsize=(6.5, 1 + 0.75 * len(rows)))
    places = range(len(rows))
    for name, word, shift, colour in (("xla", "unfused", -0.2, OTHERS), ("jaxfuse", "fused", 0.2, OUR_COLOUR)):
        sizes = [row["peers"][name]["temp_bytes"] / 2**20 for row in rows]
        bars = panel.barh([place + shift for place in places], sizes, 0.38, color=colour, label=word)
        panel.bar_label(bars, [f"{size:.0f} MiB, {word}" for size in sizes], padding=3, fontsize=8)
    panel.set_yticks(list(places), [f"{row['title']}\n{row['dtype']}, batch {row['batch']}" for row in rows], fontsize=9)
    panel.set_xlim(0, 1.3 * panel.dataLim.x1)
    panel.set_xticks([])
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    panel.set_title("Temporary memory of a train step", fontsize=10, color=FAINT)
    _saved(plt, figure, path)


def ratios(rows: list[dict], path: Path) -> bool:
    """jaxfuse's speed over every peer's, a line for each case. Returns whether there was anything to draw."""
    plt = _pyplot()
    found = [(row, {name: report.ratio({n: a.get("ms") for n, a in row["peers"].items()}, name)
                    for name in row["peers"] if name not in OURS}) for row in rows if row["peers"].get("jaxfuse", {}).get("ms")]
    found = [(row, {name: value for name, value in values.items() if value}) for row, values in found]
    if not any(values for _, values in found):
        return False
    figure, panel = plt.subplots(figsize=(9, 1.2 + 0.24 * len(found)))
    for name in (name for name in COLOURS if any(name in values for _, values in found)):
        points = [(values[name], len(found) - i) for i, (_, values) in enumerate(found) if name in values]
        panel.scatter(*zip(*points), s=22, color=COLOURS[name], label=PEERS[name].title, zorder=3)
    panel.axvline(1, color=FAINT, linewidth=1)
    panel.set_xscale("log", base=2)
    panel.margins(y=0.6 / len(found))
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    panel.set_yticks([len(found) - i for i in range(len(found))],
                     [f"{row['title'][:60]}, {row['dtype']}, batch {row['batch']}, {report.TASKS[row['task']]}" for row, _ in found])
    panel.tick_params(axis="y", labelsize=7, length=0)
    panel.grid(axis="y", color="#eeeeee", zorder=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.set_title("jaxfuse's speed over each peer's: right of 1 jaxfuse is faster", fontsize=10, color=FAINT)
    panel.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    _saved(plt, figure, path)
    return True


KIND_COLOURS = {"conv": OUR_COLOUR, "dense": "#d9541e", "transformer": "#6a51a3", "recurrent": "#2a8a57", "batch_norm": "#c9a227",
                "norm": "#c0392b"}
KIND_TITLES = {"conv": "conv", "dense": "dense", "transformer": "attention, BERT layer", "recurrent": "LSTM, GRU",
               "batch_norm": "batch norm", "norm": "layer, RMS, group norm"}


def roofline(points, peaks, path: Path) -> None:
    """A panel for each dtype: GFLOP/s over FLOPs for a byte, under the roofs of arithmetic, memory and cache. A dot is jaxfuse, the
    end of its line XLA."""
    plt = _pyplot()
    dtypes = [dtype for dtype in ("f32", "bf16") if any(point.case.dtype == dtype for point in points)]
    figure, panels = plt.subplots(1, len(dtypes), figsize=(6.3 * len(dtypes), 4.8), squeeze=False, sharey=True)
    low, high = (edge(point.intensity for point in points) for edge in (min, max))
    for panel, dtype in zip(panels.flat, dtypes):
        peak = getattr(peaks, dtype)
        for bandwidth, style, name in ((peaks.memory, "-", "memory"), (peaks.last_level, "--", "last-level cache")):
            ridge = peak / bandwidth
            panel.plot([low / 2, ridge, 2 * high], [low / 2 * bandwidth, peak, peak], style, color=FAINT, linewidth=1, zorder=1)
            panel.annotate(f"{name}, {bandwidth:g} GB/s", (low / 1.9, low / 1.9 * bandwidth), xytext=(0, 5), textcoords="offset points",
                           rotation=45, rotation_mode="anchor", transform_rotates_text=True, fontsize=7, color=FAINT)
        above = dict(xytext=(0, 3), textcoords="offset points", ha="right")
        panel.annotate(f"{peak:g} GFLOP/s", (2 * high, peak), fontsize=7, color=FAINT, **above)
        panel.set_title(dtype, fontsize=9)
        for kind, colour in KIND_COLOURS.items():
            chosen = [point for point in points if (point.case.kind, point.case.dtype) == (kind, dtype)]
            for task, marker in (("forward", "o"), ("gradient", "D")):
                dots = [(point.intensity, point.ours) for point in chosen if point.case.task == task]
                if dots:
                    label = f"{KIND_TITLES[kind]}, {report.TASKS[task]}"
                    panel.scatter(*zip(*dots), s=22, marker=marker, color=colour, zorder=3, label=label)
            for point in (point for point in chosen if point.xla):
                panel.plot([point.intensity] * 2, [point.xla, point.ours], color=colour, linewidth=0.8, alpha=0.5, zorder=2)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel("FLOPs for a byte of operands and results", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels.flat[0].set_ylabel("GFLOP/s", fontsize=8)
    panels.flat[-1].legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle("Ops under the roofs of the machine: a dot is jaxfuse, the other end of its line is XLA", fontsize=10, color=FAINT)
    _saved(plt, figure, path)


def _saved(plt, figure, path: Path) -> None:
    figure.savefig(path, dpi=110, bbox_inches="tight", facecolor="white", metadata={"Software": None})
    plt.close(figure)
