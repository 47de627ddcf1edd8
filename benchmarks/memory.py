"""python -m benchmarks.memory [network …]: a train step as it is, and with `jaxfuse.retain_memory()`: time, page faults, memory.

Each run is a process of its own; the settings take turns. Float32, batch 8, 224×224, medians over the calls of all turns.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

from rich.console import Console
from rich.progress import track
from rich.table import Table

NETWORKS = ("mobilenet_v2", "resnet50", "convnext_tiny")
SETTINGS = {"as it is": "0", "retained": "1"}
WARM_UP = 4  # calls: the first compiles, the others give the arena its size


def measure(network: str, fused: bool, calls: int) -> dict:
    """One process: [milliseconds], faults and kernel milliseconds per call, resident memory at its peak."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxfuse

    from . import models

    images = jnp.asarray(np.random.default_rng(0).standard_normal((8, 224, 224, 3)), jnp.float32)
    labels = jnp.arange(8, dtype=jnp.int32)
    model = models.NETWORKS[network]()
    variables = models.random_variables(model, images)
    state = models.TrainState(variables["params"], variables.get("batch_stats", {}), jax.tree.map(jnp.zeros_like, variables["params"]))
    step = jax.jit(models.make_train_step(model, jaxfuse.fuse if fused else lambda fn: fn), donate_argnums=0)
    times: list[float] = []
    for call in range(WARM_UP + calls):
        if call == WARM_UP:
            before = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, images, labels))
        times.append(1e3 * (time.perf_counter() - start))
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "ms": times[WARM_UP:], "faults": (after.ru_minflt - before.ru_minflt) / calls,
        "kernel": 1e3 * (after.ru_stime - before.ru_stime) / calls, "MiB": after.ru_maxrss / 1024, "loss": float(loss)}


def in_process(network: str, fused: bool, setting: str, calls: int) -> dict:
    command = [sys.executable, "-m", "benchmarks.memory", network, "--calls", str(calls), "--one", "fused" if fused else "unfused"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    environment = kept | {"JAXFUSE_RETAIN_MEMORY": SETTINGS[setting], "JAX_PLATFORMS": "cpu"}
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def row(network: str, fused: bool, turns: int, calls: int) -> dict[str, dict]:
    """setting -> medians over the turns."""
    runs: dict[str, list] = {setting: [] for setting in SETTINGS}
    for turn in range(turns):
        for setting in list(SETTINGS)[:: 1 if turn % 2 == 0 else -1]:
            runs[setting].append(in_process(network, fused, setting, calls))
    return {setting: {key: statistics.median([v for one in made for v in (one[key] if key == "ms" else [one[key]])]) for key in made[0]}
            for setting, made in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", choices=[*NETWORKS, []], help=f"default: {' '.join(NETWORKS)}")
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", choices=["fused", "unfused"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.networks[0], options.one == "fused", options.calls)))
        return
    columns = ("ms", "faults", "ms in the kernel", "peak MiB")
    table = Table("train step", "", *[f"{what}, {setting}" for what in columns for setting in SETTINGS])
    for network, fused in track([(n, f) for n in options.networks or NETWORKS for f in (True, False)], console=Console(stderr=True)):
        made = row(network, fused, options.turns, options.calls)
        cells = [f"{made[setting][key]:.0f}" for key in ("ms", "faults", "kernel", "MiB") for setting in SETTINGS]
        table.add_row(network, "fused" if fused else "unfused", *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
