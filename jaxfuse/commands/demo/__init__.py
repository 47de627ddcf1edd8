"""The demo: a network trained unfused and fused on real images, then ResNet-50 on a real photograph."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import jaxfuse
from jaxfuse.commands.demo import digits, photo, plot, training
from jaxfuse.runtime import memory

PNG = "jaxfuse-demo.png"
OTHER_STEPS = 20  # at most, with the other setting of memory
REDRAWN_PER_SECOND = 2  # rarely: the redrawing takes time from what is being measured


def run(quick: bool, out: Path) -> None:
    """Shows both parts on the terminal and writes `out`/jaxfuse-demo.png. quick: fewer steps and repetitions, nothing left out."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    busy = _others_running()
    if busy:
        console.print(busy, style="bold")
    if memory.is_retained():
        console.print(f"Freed memory stays in the process (jaxfuse.retain_memory), also unfused; {memory.ENVIRONMENT}=0 gives it back. "
                      "The table of the training shows both.")
    show_training(console, 40 if quick else 200, out / PNG)
    show_photo(console, 5 if quick else 20)
    if busy := busy or _others_running():
        console.print(busy, style="bold")


def _others_running() -> str:
    """What to say where other programs keep the CPUs busy, which makes the speeds mean little; "" where they do not, or where
    the system does not tell. Measured over half a second in which this process does nothing."""
    before = _ticks()
    time.sleep(0.5)
    spent = [after - start for after, start in zip(_ticks(), before)]
    share = 1 - sum(spent[3:5]) / sum(spent) if sum(spent) else 0  # the fourth is idle, the fifth waits for a disk
    if share < 0.25:
        return ""
    return f"Other programs keep {share:.0%} of this machine busy: the ratios of speed here are not to be trusted, run the demo again."


def _ticks() -> list[int]:
    """What all CPUs together have done since they started, by kind (man 5 proc_stat)."""
    try:
        return [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except OSError:
        return []


def show_training(console: Console, steps: int, png: Path) -> None:
    data = digits.load()
    size = data.train_images.shape[1]
    console.rule("Training a small residual network")
    console.print(
        f"{len(data.train_labels)} handwritten digits, scaled up to {size}×{size}; {steps} steps of {training.BATCH} images, "
        "from the same start with the same batches."
    )
    show_sites(console, jaxfuse.explain(training.loss_fn, *training.example(data)))
    with _spinner(console, "compiling the unfused step"):
        plain = training.Trainer(_as_it_is, data, steps)
    with _spinner(console, "compiling the fused step"):
        fusing = training.Trainer(jaxfuse.fuse, data, steps)
    with _progress(console, steps) as tell:
        unfused = plain.train(tell("unfused"))
        fused = fusing.train(tell("fused"))
        nudged = plain.train(tell("unfused, nudged"), nudge=True)
    plot.loss_curves(unfused, fused, nudged, png)
    table = _comparison()
    table.add_row("ms per step", f"{unfused.ms:.1f}", f"{fused.ms:.1f}", _ratio(unfused.ms, fused.ms))
    if memory.is_glibc():
        with _spinner(console, "the same with the other setting of memory, in a process of its own"):
            before, after = _with_the_other_setting(size, min(steps, OTHER_STEPS))
        title = f"the same, freed memory {'given back' if memory.is_retained() else 'kept'}"
        table.add_row(title, f"{before:.1f}", f"{after:.1f}", _ratio(before, after))
    table.add_row("test accuracy", f"{unfused.accuracy:.1%}", f"{fused.accuracy:.1%}", "")
    table.add_row("last loss", f"{unfused.losses[-1]:.5f}", f"{fused.losses[-1]:.5f}", "")
    console.print(table)
    gap, nudged_gap = (np.abs(run.losses - unfused.losses) for run in (fused, nudged))
    console.print(f"Difference of the losses: {gap[0]:.1e} in step 1, {gap.max():.1e} at most (step {gap.argmax() + 1}).")
    console.print(
        "Training amplifies rounding: unfused again, each weight one rounding error larger at the start (nudged), the losses "
        f"differ by up to {nudged_gap.max():.1e} and the test accuracy is {nudged.accuracy:.1%}."
    )
    console.print(f"Loss curves: {png}", highlight=False, soft_wrap=True)


def _with_the_other_setting(size: int, steps: int) -> list[float]:
    """Milliseconds of a step, unfused and fused, where freed memory goes back if here it stays, and stays if here it goes back."""
    program = f"from jaxfuse.commands.demo import training; training.print_milliseconds({size}, {steps})"
    environment = os.environ | {memory.ENVIRONMENT: str(int(not memory.is_retained()))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def show_sites(console: Console, report: jaxfuse.FusionReport) -> None:
    saved = sum(site.bytes_saved for site in report.fused) / 1e6
    table = Table("pattern", "input", "source", "kernel", box=SIMPLE_HEAD, header_style="bold", title_justify="left")
    table.title = f"{len(report.fused)} fused sites, about {saved:.0f} MB less memory traffic forward"
    for site in report.fused:
        table.add_row(site.pattern, "×".join(map(str, site.shapes[0])), site.source, site.kernel)
    console.print(table)
    for site in report.skipped:
        console.print(f"not fused: {site.pattern} at {site.source}: {site.reason}", highlight=False)


def show_photo(console: Console, repetitions: int) -> None:
    image = photo.load()
    weights = photo.variables(image)
    report = photo.sites(image, weights)
    console.rule("ResNet-50 on a photograph")
    patterns = ", ".join(f"{count} {pattern}" for pattern, count in Counter(site.pattern for site in report.fused).most_common())
    console.print(f"{photo.NAME}, 224×224, random weights; fused: {patterns or 'nothing'}.")
    with _spinner(console, "unfused: compiling and running"):
        unfused = photo.infer(_as_it_is, image, weights, repetitions)
    with _spinner(console, "fused: compiling and running"):
        fused = photo.infer(jaxfuse.fuse, image, weights, repetitions)
    table = _comparison()
    table.add_row("ms per image", f"{unfused.ms:.1f}", f"{fused.ms:.1f}", _ratio(unfused.ms, fused.ms))
    table.add_row("largest logit", f"{np.abs(unfused.logits).max():.5f}", f"{np.abs(fused.logits).max():.5f}", "")
    console.print(table)
    console.print(f"Largest difference of the logits: {np.abs(unfused.logits - fused.logits).max():.1e}.")


def _as_it_is(fn):
    return fn


def _spinner(console: Console, text: str):
    return console.status(text, refresh_per_second=REDRAWN_PER_SECOND)


@contextmanager
def _progress(console: Console, steps: int):
    """Yields tell(name) -> (loss, done) -> None: a bar of its own for each name."""
    parts = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"), TimeElapsedColumn()
    with Progress(*parts, console=console, refresh_per_second=REDRAWN_PER_SECOND) as bars:

        def tell(name):
            bar = bars.add_task(name, total=steps, loss="")
            return lambda loss, done: bars.update(bar, completed=done, loss=f"loss {loss:.3f}")

        yield tell


def _comparison() -> Table:
    table = Table("", box=SIMPLE_HEAD, header_style="bold")
    for heading in ("unfused", "fused", ""):
        table.add_column(heading, justify="right")
    return table


def _ratio(before: float, after: float) -> str:
    return f"{before / after:.2f} times the speed"
