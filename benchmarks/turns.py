"""Side by side: every peer's process is started once, and while one of them works the others are stopped (SIGSTOP)."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from . import peers

ROOT = Path(__file__).resolve().parent.parent
TICK = 1 / os.sysconf("SC_CLK_TCK")
# Other work may take this share of the cores' time in a turn, and what the clock's ticks cannot tell, before the turn is repeated.
FOREIGN_SHARE, FOREIGN_TICKS = 0.05, 3


class WorkerError(RuntimeError):
    """A worker process ended."""


class Worker:
    """The process of one peer, stopped except while it answers."""

    def __init__(self, name, interpreter, allocator):
        self.name = name
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [interpreter, "-m", "benchmarks.peer", name],
            cwd=ROOT,
            env=peers.environment(name, allocator),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # its own process group: what it starts stops and ends with it
        )
        self.versions = self._read()["versions"]
        self._signal(signal.SIGSTOP)

    def ask(self, request):
        try:
            self._signal(signal.SIGCONT)
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._read()
            self._signal(signal.SIGSTOP)
        except (BrokenPipeError, ProcessLookupError):
            raise WorkerError(self._last_words()) from None
        return answer

    @property
    def pid(self):
        return self._process.pid

    def end(self):
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # what it was asked last, and will not read
            self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def _signal(self, number):
        os.killpg(self.pid, number)

    def _read(self):
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._last_words())
        return json.loads(line)

    def _last_words(self):
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines() or ["it said nothing"]
        return f"the process of {self.name} ended with exit code {code}: {lines[-1]}"


def _process_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK


def foreign_clock(worker):
    """Core seconds so far that neither `worker` nor this process used, the hypervisor's steal among them; None where the
    system does not tell."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = fields[3] + fields[4]
        return (sum(fields) - idle) * TICK - _process_seconds(worker.pid) - _process_seconds(os.getpid())
    except OSError:
        return None


@dataclass(frozen=True)
class Turn:
    ms: float
    calls: int
    foreign: float  # share of the cores' time that other work had

    @property
    def disturbed(self):
        return self.foreign > FOREIGN_SHARE


def one_turn(worker, seconds, clock=foreign_clock):
    before, start = clock(worker), time.perf_counter()
    answer = worker.ask({"do": "time", "seconds": seconds})
    after, wall = clock(worker), time.perf_counter() - start
    if "error" in answer:
        raise WorkerError(answer["error"])
    foreign = 0.0 if before is None else max(0.0, after - before - FOREIGN_TICKS * TICK) / (wall * os.cpu_count())
    return Turn(answer["ms"], answer["calls"], foreign)


def take_turns(workers, turns, seconds, turn=one_turn, wait=0.5, advance=lambda: None):
    """({worker's name: its turns}, {worker's name: why it has none}); round about, so that a drift of the machine meets all.

    A turn that other work disturbed is repeated, `turns` times per worker in all; then the quietest try counts, and says so.
    """
    taken, failed = {worker.name: [] for worker in workers}, {}
    repeats = dict.fromkeys(taken, turns)
    for _ in range(turns):
        for worker in [worker for worker in workers if worker.name not in failed]:
            try:
                tries = [turn(worker, seconds)]
                while tries[-1].disturbed and repeats[worker.name] > 0:
                    repeats[worker.name] -= 1
                    time.sleep(wait)
                    tries.append(turn(worker, seconds))
                taken[worker.name].append(min(tries, key=lambda one: one.foreign))
            except WorkerError as error:
                failed[worker.name] = str(error)
                del taken[worker.name]
            advance()
    return taken, failed


def summary(turns):
    """What a result keeps of one peer's turns."""
    return {
        "ms": statistics.median(turn.ms for turn in turns),
        "turns_ms": [turn.ms for turn in turns],
        "calls": sum(turn.calls for turn in turns),
        "disturbed": sum(turn.disturbed for turn in turns),
    }
