"""python -m benchmarks.scaling: a data-parallel train step over 1, 2 and 4 processes of this machine, by jax.distributed.

Strong scaling shares one batch among the processes, weak scaling gives each a batch of its own. Every process has one core, so that
more processes are more cores until there are no more. What a step sends is counted in the compiled program.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
BATCH, SIZE = 128, 32
WARM_UP = 2  # steps


def worker(address: str, count: int, rank: int, steps: int, fused: int) -> None:
    """One process of the job. The first prints what was found, as JSON."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # before the kernels count them
    import jaxfuse

    jax.distributed.initialize(address, count, rank)
    fuse = partial(jaxfuse.fuse, policy="always") if fused else lambda function: function
    found = {way: _measured(count, rank, batch, steps, fuse) for way, batch in (("strong", BATCH), ("weak", BATCH * count))}
    print(json.dumps(found))


def _measured(count: int, rank: int, batch: int, steps: int, fuse) -> dict:
    """Milliseconds of a step with this batch over all processes, what it sends, and the milliseconds of sending that alone."""
    from . import communication, models

    mesh = jax.make_mesh((count,), ("batch",), axis_types=(AxisType.Auto,))
    divided, whole = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())
    random = np.random.default_rng(rank)
    images = random.standard_normal((batch // count, SIZE, SIZE, 3), np.float32)
    labels = random.integers(0, 10, batch // count, np.int32)
    batch = [jax.make_array_from_process_local_data(divided, part) for part in (images, labels)]
    model = Network()
    variables = models.random_variables(model, jax.ShapeDtypeStruct((1, SIZE, SIZE, 3), np.float32))
    state = models.TrainState(variables["params"], variables["batch_stats"], jax.tree.map(np.zeros_like, variables["params"]))
    state = jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(whole, leaf, leaf.shape), state)
    step = jax.jit(models.make_train_step(model, fuse), donate_argnums=0).lower(state, *batch).compile()
    sent = communication.sent(step.as_text())

    def one_step():
        nonlocal state
        state, loss = step(state, *batch)
        return loss

    alone = _all_reduce(mesh, divided, sent.bytes) if sent.count else lambda: ()
    return {"ms": _median(one_step, steps), "alone": _median(alone, steps), "count": sent.count, "bytes": sent.bytes}


def _median(call: Callable, times: int) -> float:
    """Milliseconds."""
    found = []
    for _ in range(WARM_UP + times):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found[WARM_UP:])


class Network(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        for features, stride in ((32, 1), (64, 2), (64, 1), (128, 2)):
            x = nn.Conv(features, (3, 3), stride, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(1000)(x.mean((1, 2)))


def _all_reduce(mesh, divided, size: int) -> Callable:
    """One of so many bytes."""
    array = jax.make_array_from_process_local_data(divided, np.ones((1, size // 4), np.float32))
    whole = jax.shard_map(lambda x: jax.lax.psum(x, "batch"), mesh=mesh, in_specs=PartitionSpec("batch"), out_specs=PartitionSpec())
    return partial(jax.jit(whole), array)


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["--worker"]:
        worker(given[1], *map(int, given[2:]))
        return 0
    parser = argparse.ArgumentParser("python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed (default: %(default)s)")
    parser.add_argument("--processes", type=int, nargs="+", default=(1, 2, 4), metavar="N", help="how many (default: 1 2 4)")
    parser.add_argument("--unfused", action="store_true", help="of the step as it is")
    arguments = parser.parse_args(argv)
    found = {count: _job(count, arguments.steps, int(not arguments.unfused)) for count in arguments.processes}
    cores = len(os.sched_getaffinity(0))
    table = Table("scaling", "processes", "cores", "batch", "ms", "images/s", "speed", "all-reduces", "KB", "as one, alone, ms")
    for column in table.columns[1:]:
        column.justify = "right"
    for way in ("strong", "weak"):
        for count in arguments.processes:
            step, batch = found[count][way], BATCH * (count if way == "weak" else 1)
            speed = found[arguments.processes[0]][way]["ms"] / step["ms"] * batch / BATCH
            table.add_row(way, str(count), str(min(count, cores)), str(batch), f"{step['ms']:.0f}", f"{1e3 * batch / step['ms']:.0f}",
                          f"{speed:.2f}×", str(step["count"]), f"{step['bytes'] / 1e3:.0f}", f"{step['alone']:.1f}")
    Console(highlight=False, width=None if Console().is_terminal else 120).print(table)
    return 0


def _job(count: int, steps: int, fused: int) -> dict:
    sys.path.append(str(ROOT / "examples"))  # which shows how processes are started
    from distributed import started

    processes = started(count, [sys.executable, "-m", "benchmarks.scaling", "--worker"], str(steps), str(fused), cwd=ROOT)
    failed = [process for process in processes if process.returncode]
    if failed:
        raise SystemExit(failed[0].stderr[-2000:])
    return json.loads(processes[0].stdout.splitlines()[-1])


if __name__ == "__main__":
    raise SystemExit(main())
