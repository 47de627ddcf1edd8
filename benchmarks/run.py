"""One case after another through the worker processes of one allocator setting."""

import tempfile
from datetime import UTC, datetime
from pathlib import Path

from . import checks, peers, turns


class Crew:
    """The workers by name, one per peer and one for the float64 reference; one that ended is started again for the next
    case."""

    def __init__(self, interpreters, allocator):
        self._interpreters, self.allocator, self.workers = interpreters, allocator, {}
        self.names = [name for name in interpreters if name != peers.REFERENCE]

    def __enter__(self):
        try:
            for name in self._interpreters:
                self._worker(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in list(self.workers):
            self.end(name)

    def _worker(self, name):
        if name not in self.workers:
            self.workers[name] = turns.Worker(name, self._interpreters[name], self.allocator)
        return self.workers[name]

    def end(self, name):
        self.workers.pop(name).end()

    def prepare(self, name, case, folder):
        """The worker's answer; {"error": sentence} if it could not."""
        try:
            return self._worker(name).ask({"do": "prepare", "case": case.to_json(), "folder": folder and str(folder)})
        except turns.WorkerError as error:
            self.end(name)
            return {"error": str(error)}


def measure(case, crew, count, seconds, advance=lambda: None):
    """The result's row of one case: numbers first, then times."""
    row = {
        "case": case.name,
        "kind": case.kind,
        "title": case.shape.title,
        "batch": case.batch,
        "dtype": case.dtype,
        "task": case.task,
        "allocator": crew.allocator,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with tempfile.TemporaryDirectory() as folder:
        prepared, row["errors"], row["unchecked"] = _check(case, crew, Path(folder), advance)
    row["astray"] = checks.astray(row["errors"], case.dtype)
    if "xla" in row["errors"]:
        ours = [name for name in peers.OURS if name in row["errors"]]
        worse = {name: checks.worse(row["errors"][name], row["errors"]["xla"], case.kind, case.dtype) for name in ours}
        row["worse_than_xla"] = [f"{name}: {sentence}" for name in ours for sentence in worse[name]]
    ready = [crew.workers[name] for name, answer in prepared.items() if "error" not in answer]
    taken, failed = turns.take_turns(ready, count, seconds, advance=advance)
    for name, sentence in failed.items():
        crew.end(name)
        prepared[name] = {"error": sentence}
    times = {name: turns.summary(one) for name, one in taken.items()}
    row["peers"] = {name: {**answer, **times.get(name, {})} for name, answer in prepared.items()}
    return row


def _check(case, crew, folder, advance):
    """({peer: answer to prepare}, {peer: its errors against float64, where it left outputs to compare}, why there is no
    reference). The reference comes first: it decides the cotangent."""
    reference = crew.prepare(peers.REFERENCE, case, folder)
    prepared, errors = {}, {}
    for name in (name for name in crew.names if peers.PEERS[name].takes(case)):
        prepared[name] = crew.prepare(name, case, folder)
        outputs = folder / f"{name}.npz"
        if outputs.exists() and "error" not in reference:
            errors[name] = checks.errors(folder, peers.REFERENCE, name)
            outputs.unlink()
        advance()
    return prepared, errors, reference.get("error")


def failures(row):
    """What must not be in a row, as sentences."""
    worse = [f"{row['case']}: {sentence}" for sentence in (*row.get("worse_than_xla", []), *row["astray"])]
    broken = [(name, answer["error"]) for name, answer in row["peers"].items() if "error" in answer]
    if row["unchecked"]:
        broken.append(("the float64 reference", row["unchecked"]))
    return worse + [f"{row['case']}: {name}: {sentence}" for name, sentence in broken]
