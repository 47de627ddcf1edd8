"""python -m benchmarks.memory [network …]: a train step as it is, and with `jaxfuse.retain_memory()`: time, page faults, memory.

Each run is a process of its own; the settings take turns. Float32, batch 8, 224×224, medians over the calls of all turns.
The last row is what it costs a program whose threads allocate much: eight threads that decode and resize photographs.
"""

import argparse
import concurrent.futures
import io
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
LOADER = "8 threads decode"
SETTINGS = {"as it is": "0", "retained": "1"}
WARM_UP = 4  # calls: the first compiles, the others give the arena its size


def measure(network: str, fused: bool, calls: int) -> dict:
    """One process: [milliseconds], faults and milliseconds in the operating system per call, resident memory at its peak."""
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
    assert np.isfinite(loss)
    return _result(times[WARM_UP:], before, after)


def load_images(calls: int) -> dict:
    """As `measure`, of eight threads; a call is 64 photographs."""
    import numpy as np
    from PIL import Image

    import jaxfuse  # noqa: F401  reads JAXFUSE_RETAIN_MEMORY

    ramps = np.add.outer(np.arange(768), np.arange(1024))[..., None] * [1, 2, 3]
    file = io.BytesIO()
    Image.fromarray((ramps % 256).astype(np.uint8)).save(file, "jpeg")

    def load(_) -> int:
        return np.asarray(Image.open(io.BytesIO(file.getvalue())).resize((224, 224)), np.float32).size

    def call() -> float:
        start = time.perf_counter()
        assert sum(threads.map(load, range(64))) == 64 * 224 * 224 * 3
        return 1e3 * (time.perf_counter() - start)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        call()
        before = resource.getrusage(resource.RUSAGE_SELF)
        times = [call() for _ in range(calls)]
        after = resource.getrusage(resource.RUSAGE_SELF)
    return _result(times, before, after)


def _result(times: list[float], before: resource.struct_rusage, after: resource.struct_rusage) -> dict:
    return {
        "ms": times, "faults": (after.ru_minflt - before.ru_minflt) / len(times),
        "kernel": 1e3 * (after.ru_stime - before.ru_stime) / len(times), "MiB": after.ru_maxrss / 1024}


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
    parser.add_argument("networks", nargs="*", choices=[*NETWORKS, LOADER, []], help=f"default: {' '.join(NETWORKS)}")
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", choices=["fused", "unfused"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        (name,) = options.networks
        print(json.dumps(load_images(options.calls) if name == LOADER else measure(name, options.one == "fused", options.calls)))
        return
    columns = ("ms", "faults", "ms in the system", "peak MiB")
    table = Table("train step", "", *[f"{what}, {setting}" for what in columns for setting in SETTINGS])
    chosen = options.networks or [*NETWORKS, LOADER]
    for name, fused in track([(n, f) for n in chosen for f in (True, False) if f or n != LOADER], console=Console(stderr=True)):
        made = row(name, fused, options.turns, options.calls)
        cells = [f"{made[setting][key]:.0f}" for key in ("ms", "faults", "kernel", "MiB") for setting in SETTINGS]
        table.add_row(name, "" if name == LOADER else "fused" if fused else "unfused", *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
