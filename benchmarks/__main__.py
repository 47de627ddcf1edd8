"""python -m benchmarks [names...]: the numbers against float64, then the times side by side."""

import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from jaxfuse.commands.parser import Parser
from jaxfuse.runtime import near

from . import cases, machine, peers, pictures, plan, readme, report, roofline, run, screen
from .turns import WorkerError

ROOT = Path(__file__).resolve().parent.parent
SELECTION = f'kinds ({", ".join(cases.KINDS)}) or dotted parts of a case\'s name ("resnet50.bf16"); all if none is given'
MERGING = "a file of the same machine, versions and settings keeps its other cases"
TUNE = "python -m jaxfuse bench --tune"
ALLOCATOR = "glibc's malloc settings, the same for every peer"
ROOFS = ("The peaks of this machine are not known: python -m benchmarks.roofline {} --f32 GFLOP/s --bf16 GFLOP/s --memory GB/s "
         "--last-level GB/s --cache MB draws each op under its roofs.")


def _arguments(argv):
    parser = Parser("python -m benchmarks", description=__doc__)
    option = parser.add_argument
    option("names", nargs="*", help=SELECTION)
    option("--list", action="store_true", help="print the names of the cases and end")
    option("--json", type=Path, metavar="OUT.json", help=f"where the result goes, and OUT.md beside it; {MERGING}")
    option("--resume", action="store_true", help="leave out the cases that the result's file has already for all these peers")
    option("--quick", action="store_true", help="small shapes and short turns, to try the machinery; says nothing about speed")
    option("--peers", default=",".join(peers.PEERS), help="whom to measure (default: %(default)s)")
    option("--allocator", choices=[*peers.ALLOCATORS, "both"], default="tuned", help=f"{ALLOCATOR} (default: %(default)s)")
    option("--torch-python", metavar="PATH", help="the interpreter that has torch and the inference runtimes, if it is not this one")
    option("--turns", type=int, default=5, help="turns of each peer (default: %(default)s)")
    option("--readme", type=Path, metavar="RESULT.json", help="make README's table and pictures of this result, and end")
    option("--tune", action="store_true", help=f"when each kernel wins on this machine: {TUNE}")
    arguments = parser.parse_args(argv)
    if arguments.tune:
        parser.error(f"argument --tune: write {TUNE}")
    arguments.peers = arguments.peers.split(",")
    unknown = [name for name in arguments.peers if name not in peers.PEERS]
    if unknown:
        remedy = near.meant(unknown[0], peers.PEERS) or f"; there are {', '.join(peers.PEERS)}"
        parser.error(f"argument --peers: no peer is named {unknown[0]!r}{remedy}")
    if arguments.turns < 1:
        parser.error(f"argument --turns: {arguments.turns} turns measure nothing; give 1 or more")
    if arguments.readme and not arguments.readme.is_file():
        remedy = near.files(str(arguments.readme)) or "; results are kept in benchmarks/results"
        parser.error(f"argument --readme: there is no file {arguments.readme}{remedy}")
    return arguments


def _measure(work, interpreters, turns, seconds, result, save):
    """Fills the result, saving it after every case; returns what must not be in it."""
    problems = []
    measured = sum(peers.PEERS[name].takes(case) for case, _ in work for name in interpreters)
    with screen.progress(measured * (1 + turns)) as (begin, advance):
        for allocator in dict.fromkeys(allocator for _, allocator in work):
            with run.Crew({**interpreters, peers.REFERENCE: sys.executable}, allocator) as crew:
                for name in interpreters:
                    versions = crew.workers[name].versions
                    result["peers"][name] = {"environment": peers.PEERS[name].environment, "versions": versions}
                for case in (case for case, of in work if of == allocator):
                    begin(f"{case.name} ({allocator})")
                    row = run.measure(case, crew, turns, seconds, advance)
                    result["rows"].append(row)
                    save()
                    screen.case_done(row, run.failures(row))
                    problems += run.failures(row)
    return problems


def _draw(result, path):
    """Speeds over the peers beside the result, and ops under the roofs of the machine where its peaks are known."""
    try:
        picture = path.with_suffix(".png") if path else Path(tempfile.gettempdir()) / "jaxfuse-bench.png"
        if pictures.ratios(result["rows"], picture):
            screen.console.print(f"{picture} has the speeds as a picture.", highlight=False)
        if result["settings"]["quick"]:
            return  # its shapes are not those whose arithmetic is counted
        ops = roofline.points((row for row in result["rows"] if row["allocator"] == "tuned"), roofline.ZEN5)
        if ops and roofline.measured_on(result["machine"]):
            roofline.show(ops, roofline.ZEN5, path.with_name(f"{path.stem}-roofline.png"), screen.console)
        elif ops:
            screen.console.print(ROOFS.format(path), highlight=False, markup=False)
    except ImportError:
        screen.console.print(pictures.ABSENT, style="yellow")


def main(argv=None):
    arguments = _arguments(argv)
    if arguments.readme:
        readme.refresh(ROOT, arguments.readme)
        return 0
    if arguments.resume and not arguments.json:
        raise ValueError("benchmarks: --resume goes on with a file: --json names it")
    chosen = cases.select(arguments.names)
    if arguments.list:
        print(*(case.name for case in chosen), sep="\n")
        return 0
    interpreters, left_out = peers.available(arguments.peers, arguments.torch_python)
    for sentence in left_out:
        screen.console.print(sentence, style="yellow", markup=False)
    if not interpreters:
        return 1
    if arguments.quick:
        chosen = [cases.quick(case) for case in chosen]
    here, today = machine.describe(), datetime.now(UTC).date().isoformat()
    allocators = list(peers.ALLOCATORS) if arguments.allocator == "both" else [arguments.allocator]
    turns, seconds = (min(arguments.turns, 2), 0.02) if arguments.quick else (arguments.turns, 0.15)
    settings = {"turns": turns, "seconds": seconds, "quick": arguments.quick, "allocators": peers.ALLOCATORS}
    result = {"date": today, "machine": here, "settings": settings, "peers": {}, "rows": []}
    path = arguments.json
    if path is None and not arguments.quick:
        path = ROOT / "benchmarks" / "results" / f"{today}-{machine.slug(here)}.json"

    def save():
        if path:
            report.merge(path, result)

    everything = [(case, allocator) for allocator in allocators for case in chosen]
    work = plan.left_to_do(chosen, allocators, interpreters, path, result) if arguments.resume else everything
    per_kind = plan.seconds(work, interpreters, turns, seconds, plan.known_rows(ROOT / "benchmarks" / "results", path))
    screen.console.print(plan.sentence(work, len(everything) - len(work), interpreters, per_kind), highlight=False)
    if not work:
        return 0
    problems = _measure(work, interpreters, turns, seconds, result, save)
    screen.tables(result["rows"])
    for sentence in problems:
        screen.console.print(sentence, style="red", markup=False)
    if path:
        screen.console.print(f"{path} and {path.with_suffix('.md').name} are written.", highlight=False)
    _draw(result, path)
    return 1 if problems else 0


def guarded(argv=None):
    """`main`'s exit code; a sentence for what is the user's mistake or a worker's end."""
    try:
        return main(argv)
    except (ValueError, WorkerError) as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(guarded())
