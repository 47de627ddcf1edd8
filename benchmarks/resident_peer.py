"""One process of resident.py, `python -m benchmarks.resident_peer make|measure PEER FILE CALLS CASE`: it makes a network's file, or
loads and calls it."""

import json
import sys
from pathlib import Path

import numpy as np

from . import cases, inputs
from .runtimes import RUNTIMES


def make(name: str, case: cases.Case, path: Path) -> None:
    """Writes the file."""
    if name == "frozen":
        import jax

        import jaxfuse

        from . import models

        model, given = models.NETWORKS[case.shape.network](), inputs.network(case)
        jaxfuse.freeze(model.apply, models.random_variables(model, given)).save(path, jax.ShapeDtypeStruct(given.shape, given.dtype))
    else:
        from . import torch_models

        RUNTIMES[name]().save(torch_models.network(case.shape).eval(), torch_models.given(case), path)


def measure(name: str, case: cases.Case, path: Path, calls: int) -> dict[str, float]:
    """MiB of this process: before the file is loaded, at its peak, and after the calls."""
    given = inputs.network(case, channels_first=name != "frozen")
    if name == "frozen":
        import jax

        import jaxfuse

        jax.devices()
        before = _mebibytes()["VmRSS"]
        loaded = jaxfuse.load(path)
        run = lambda array: np.asarray(loaded(array))
    else:
        runtime = RUNTIMES[name]()
        before = _mebibytes()["VmRSS"]
        run = runtime.load(path, case.dtype)
    for _ in range(calls):
        logits = run(given)
    assert np.isfinite(logits).all()
    now = _mebibytes()
    return {"before": before, "peak": now["VmHWM"], "after": now["VmRSS"]}


def _mebibytes() -> dict[str, float]:
    """What Linux tells of this process's memory, all at one moment."""
    rows = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {row[0].rstrip(":"): int(row[1]) / 1024 for row in rows if row[-1] == "kB"}


def main() -> None:
    what, name, path, calls, case_json = sys.argv[1:]
    case = cases.Case.from_json(json.loads(case_json))
    if what == "make":
        make(name, case, Path(path))
    else:
        print(json.dumps(measure(name, case, Path(path), int(calls))))


if __name__ == "__main__":
    main()
