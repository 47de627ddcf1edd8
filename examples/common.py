"""What every example shares: real digits, a loop that shows its progress, and a closing table. Nothing here knows of jaxfuse's
insides."""

import argparse
import time

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits, load_sample_images

import jaxfuse

console = Console()
QUICK = 12  # steps of the short form


def arguments(description: str, steps: int = 300) -> argparse.Namespace:
    """--quick: the short form. --steps: how many steps to train for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that everything works")
    parser.add_argument("--steps", type=int, help=f"train steps (default: {steps}, with --quick {QUICK})")
    given = parser.parse_args()
    given.steps = given.steps or (QUICK if given.quick else steps)
    return given


def digits(size: int = 16):
    """(images float32 [1797, size, size, 1] in 0..1, labels int32 [1797]): scikit-learn's handwritten digits, scaled up."""
    small, labels = load_digits(return_X_y=True)
    images = small.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    return np.asarray(jax.image.resize(images, (len(images), size, size, 1), "linear")), labels.astype(np.int32)


def batches(data, size: int, steps: int, seed: int = 0):
    """`steps` batches (images, labels) drawn at random, the same ones for the same seed."""
    images, labels = data
    random = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = random.integers(0, len(images), size)
        yield images[chosen], labels[chosen]


def train(title: str, step, state, data, steps: int):
    """Runs `state, loss = step(state, *batch)` over the batches, so many of them, each taken when the step before it has ended. Returns
    (state, losses, median milliseconds of a step)."""
    losses, seconds = [], []
    columns = TextColumn("{task.description:>9}"), BarColumn(), TextColumn("loss {task.fields[loss]:.4f}"), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=steps, loss=float("nan"))
        for batch in data:
            start = time.perf_counter()
            state, loss = jax.block_until_ready(step(state, *batch))
            seconds.append(time.perf_counter() - start)
            losses.append(float(np.mean(loss)))
            progress.update(task, advance=1, loss=losses[-1])
    return state, losses, 1e3 * float(np.median(seconds[1:] or seconds))  # the first one compiles


def closing(fused_sites, runs: dict[str, tuple[list[float], float]]):
    """Says what was fused, and compares the runs {"unfused": (losses, milliseconds), "fused": ...}."""
    kinds: dict[str, int] = {}
    for site in fused_sites:
        kinds[f"{site.pattern} ({site.direction})"] = kinds.get(f"{site.pattern} ({site.direction})", 0) + 1
    console.print("fused: " + (", ".join(f"{n} × {kind}" for kind, n in sorted(kinds.items())) or "nothing"))
    table = Table("", "first loss", "last loss", "ms per step", "speed")
    slow = runs["unfused"][1]
    for name, (losses, ms) in runs.items():
        table.add_row(name, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{ms:.1f}", f"{slow / ms:.2f}×")
    console.print(table)


def photographs():
    """scikit-learn's two photographs, float32 [height, width, 3] in 0..1."""
    return [image.astype(np.float32) / 255 for image in load_sample_images().images]


def compared(step, start, data, policy: str = "measured"):
    """Trains from `start()` with `jax.jit(step)` and with `jaxfuse.fuse(step)`, the state donated, and closes. Returns the states by
    name."""
    data, runs, states = list(data), {}, {}  # kept, for both take the same batches
    report = jaxfuse.explain(step, start(), *data[0], policy=policy)
    fused = jaxfuse.fuse(step, donate_argnums=0, policy=policy)
    for name, function in (("unfused", jax.jit(step, donate_argnums=0)), ("fused", fused)):
        states[name], losses, ms = train(name, function, start(), data, len(data))
        runs[name] = losses, ms
    closing(report.fused, runs)
    return states
