"""Both loss curves and what lies between them."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxfuse.commands.demo.training import Trained

WIDE, THIN = dict(color="#f0a35e", linewidth=4), dict(color="#1f4e79", linewidth=1.3)


def loss_curves(unfused: Trained, fused: Trained, nudged: Trained, path: Path) -> None:
    """Writes a PNG. Drawn on a canvas of its own: pyplot would choose a backend for the whole process."""
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    losses, differences = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    steps = np.arange(1, len(unfused.losses) + 1)

    losses.plot(steps, unfused.losses, **WIDE, label=f"unfused, {unfused.ms:.0f} ms per step")
    losses.plot(steps, fused.losses, **THIN, label=f"fused, {fused.ms:.0f} ms per step")
    losses.set(title="The same training, unfused and fused", ylabel="training loss", ylim=(0, None))

    gap, nudged_gap = np.abs(fused.losses - unfused.losses), np.abs(nudged.losses - unfused.losses)
    differences.plot(steps, nudged_gap, **WIDE, label="unfused, each weight one rounding error larger at the start")
    differences.plot(steps, gap, **THIN, label="fused")
    # linear around 0, as equal losses have no logarithm
    differences.set_yscale("symlog", linthresh=1e-7)
    differences.set(xlabel="step", ylabel="difference from\nthe unfused loss", ylim=(0, None), xlim=(0, len(steps) + 1))

    for axes in (losses, differences):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.savefig(path)
