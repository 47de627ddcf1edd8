"""One worker process, `python -m benchmarks.peer NAME`: requests as lines of JSON on standard input, answers on standard output."""

import contextlib
import ctypes
import json
import os
import platform
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from . import peers
from .cases import Case

WARM = 0.5  # s; a call longer than this does not need another one before it counts
BEYOND = 2.0  # s that a turn may go on after its first counted call


def time_calls(run, seconds, clock=time.perf_counter):
    """Seconds of each counted call: at least `seconds` of them and three, unless that takes BEYOND longer than the first alone."""

    def call():
        start = clock()
        run()
        return clock() - start

    # Stopped while others worked, this process has lost its caches: what is short is called once for nothing.
    first = call()
    times = [first if first > WARM else call()]
    while (sum(times) < seconds or len(times) < 3) and sum(times[1:]) + times[-1] < BEYOND:
        times.append(call())
    return times


class Server:
    def __init__(self, name):
        self.name, self.prepared = name, None
        framework = peers.lookup(name).framework
        if framework == "torch":
            from .torch_peer import TorchPeer as Framework
        elif framework == "jax":
            from .jax_peer import JaxPeer as Framework
        else:
            from .exported_peer import ExportedPeer as Framework
        self.framework = Framework(name)

    def prepare(self, case, folder):
        """Compiles the case, calls it twice, and leaves its outputs in the folder if one is given."""
        self.prepared = None  # the last case's buffers go before the next one's come
        folder = Path(folder) if folder else None
        start = time.perf_counter()
        self.prepared = self.framework.prepare(Case.from_json(case), folder)
        compiled = time.perf_counter() - start
        if folder and self.prepared.outputs:
            np.savez(folder / f"{self.name}.npz", **self.prepared.outputs)
        self.prepared.outputs = None
        if self.name != peers.REFERENCE:
            self.prepared.run()
        return {"prepare_s": compiled, "temp_bytes": self.prepared.temp_bytes}

    def time(self, seconds):
        times = time_calls(self.prepared.run, seconds)
        return {"ms": 1e3 * statistics.median(times), "calls": len(times)}

    def answer(self, request):
        try:
            return getattr(self, request.pop("do"))(**request)
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}


def _end_with_parent():
    """A worker that is stopped does not notice that its parent is gone; Linux can end it then."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main():
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    server = Server(sys.argv[1])
    versions = {"python": platform.python_version(), "numpy": np.__version__, **server.framework.versions}
    print(json.dumps({"versions": versions}), file=answers)
    for line in sys.stdin:
        print(json.dumps(server.answer(json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
