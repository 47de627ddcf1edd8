"""python -m benchmarks.resident [network …]: memory of a process that does nothing but load a network's file and call it.

`jaxfuse.load` of what `jaxfuse.freeze` saved, OpenVINO with its own format and ONNX Runtime, in float32. All of it is the resident
memory of the whole process, of files that it has mapped too: before the file is loaded, which is the runtime's own, at its peak
(VmHWM), and after the last call. glibc's settings are the default ones.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import cases, peers
from .runtimes import RUNTIMES

PEERS = ("frozen", *RUNTIMES)
ENDINGS = {"frozen": ".jaxfuse", **{name: runtime.ending for name, runtime in RUNTIMES.items()}}


def in_processes(name: str, case: cases.Case, interpreter: str, calls: int) -> dict[str, float]:
    """MiB before the file is loaded, at the peak, and after the calls: of one process, and another made the file."""

    def process(what: str) -> str:
        command = [interpreter, "-m", "benchmarks.resident_peer", what, name, str(path), str(calls), json.dumps(case.to_json())]
        environment = peers.environment(name, "default")
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"network{ENDINGS[name]}"
        process("make")
        return json.loads(process("measure").splitlines()[-1])


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.resident", description=__doc__, formatter_class=layout)
    parser.add_argument("names", nargs="*", help="networks, or cases in inference; all networks at batch 1 if none is given")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--torch-python", metavar="PATH", help="the interpreter that has torch and the inference runtimes")
    options = parser.parse_args()
    chosen = [case for case in cases.select(options.names or ["b1"]) if case.task == "inference" and case.dtype == "f32"]
    interpreters, left_out = peers.available(PEERS, options.torch_python)
    console = Console(width=120)
    for sentence in left_out:
        console.print(sentence, markup=False)
    table = Table("network", "batch", "", *[f"{what} MiB" for what in ("before", "peak", "after")], "peak - before")
    for case in chosen:
        for name, interpreter in interpreters.items():
            found = in_processes(name, case, interpreter, options.calls)
            cells = [f"{mebibytes:.0f}" for mebibytes in (*found.values(), found["peak"] - found["before"])]
            table.add_row(case.shape.title, str(case.batch), peers.PEERS[name].title, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
