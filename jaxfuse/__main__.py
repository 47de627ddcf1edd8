"""python -m jaxfuse demo | run | explain | bisect | bench | doctor"""

import argparse
import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from jaxfuse.commands import target
from jaxfuse.commands.parser import Parser
from jaxfuse.runtime import memory, near

INTERRUPTED, UNREAD = 130, 141  # as shells have it: after Ctrl-C, and where nobody reads what is printed
CHECKOUT = Path(__file__).resolve().parent.parent
NO_BENCHMARKS = "the benchmarks come with the source repository, not with the installed package: run this from the root of a clone; " \
    "bench --tune needs none"
# module: package
DEMO_NEEDS = {"flax": "flax", "optax": "optax", "sklearn": "scikit-learn", "matplotlib": "matplotlib", "PIL": "pillow"}


PAGE = """\
Fused layers for JAX: convolutions, dense layers, attention, norms, max pools, LSTM and GRU.

In a program:

    import jaxfuse
    fast = jaxfuse.fuse(fn)              a network, a loss, a whole train step
    print(jaxfuse.explain(fn, *args))    what was fused, what was not, and why
    frozen = jaxfuse.freeze(fn, params)  inference with constant weights
"""
FIRST_STEPS = """\
first steps:

    python -m jaxfuse doctor                      what works on this machine, and what to do about the rest
    python -m jaxfuse demo --quick                half a minute: real networks, unfused and fused
    python -m jaxfuse explain train.py:step       what becomes of a function of yours, as a page
    python -m jaxfuse run train.py                your script, with memory that stays in the process

when something is wrong:

    python -m jaxfuse bisect check.py:check       the one site that makes a check fail
    python -m jaxfuse bench --tune                from which size on a kernel wins on this machine

`python -m jaxfuse COMMAND --help` says more of each.
"""


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    arguments.given = sys.argv[1:] if argv is None else argv
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        if arguments.run is _run:  # the script's own
            raise
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m jaxfuse", description=PAGE, epilog=FIRST_STEPS, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(title="commands", metavar="command")
    parser.set_defaults(run=lambda _: parser.print_help())

    text = "train and run real networks, unfused and fused: speed and numbers side by side"
    more = " A small residual network on handwritten digits, then ResNet-50 on a photograph. Takes some minutes on a few cores; " \
        "the speeds count only where nothing else runs."
    demo = commands.add_parser("demo", help=text, description=f"{_sentence(text)}.{more}")
    demo.add_argument("--quick", action="store_true", help="fewer steps and repetitions")
    demo.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the loss curves go (default: here)")
    demo.set_defaults(run=_demo)

    text = "start a Python script as `python script.py` does, with memory retained (jaxfuse.retain_memory)"
    more = " `-m module` starts a module. What follows the script belongs to it."
    run = commands.add_parser("run", help=text, description=f"{_sentence(text)}.{more}", usage="%(prog)s [-m] script [args]")
    run.add_argument("-m", dest="is_module", action="store_true", help="it is a module, not a file")
    run.add_argument("script")
    run.add_argument("rest", nargs=argparse.REMAINDER, metavar="args")
    run.set_defaults(run=_run)

    text = "what becomes of a function when it is fused: an overview here, and a page"
    more = " `module:example_arguments`, a tuple or a dict or a function that returns one, has its arguments; --arguments names another."
    explain = commands.add_parser("explain", help=text, description=f"{_sentence(text)}.{more}")
    explain.add_argument("target", metavar="module:function", help="or file.py:function")
    explain.add_argument("--arguments", default="", metavar="NAME", help="where the arguments are (default: example_arguments)")
    explain.add_argument("--out", type=Path, metavar="FILE", help=".html, .svg or .json (default: function.html)")
    explain.add_argument("--policy", default="measured", help='"measured", "always" or "never"')
    explain.add_argument("--platform", help='"cpu", "cuda", "rocm" or "tpu" (default: that of this machine)')
    explain.add_argument("--measure", action="store_true", help="also the milliseconds of every site, fused and unfused")
    explain.set_defaults(run=_explain)

    text = "which fused site makes a check fail"
    more = ": it runs with more and with fewer sites fused, log2 of their number times, in a process of its own each time. It is a " \
        "function without parameters, which calls what it has fused. It fails by an exception, by returning False, or by the end of " \
        "its process."
    bisect = commands.add_parser("bisect", help=text, description=f"Says {text}{more}")
    bisect.add_argument("target", metavar="module:check", help="or file.py:check")
    bisect.set_defaults(run=_bisect)

    # No option of its own but --tune, not even --help: whatever follows is the benchmark's. Hence a prefix that no argument has.
    text = "measure ops and networks beside XLA and PyTorch, as python -m benchmarks (a clone); --tune: when each kernel wins here"
    bench = commands.add_parser("bench", help=text, add_help=False, prefix_chars="\0")
    bench.add_argument("rest", nargs=argparse.REMAINDER)
    bench.set_defaults(run=_bench)

    text = "what works on this machine, why the rest does not, and what to do next"
    doctor = commands.add_parser("doctor", help=text, description=f"Says {text}.")
    doctor.add_argument("--rules", action="store_true", help="also from which size on each op is fused by policy \"measured\" here")
    doctor.set_defaults(run=_doctor)
    return parser


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _demo(arguments) -> int:
    missing = [package for module, package in DEMO_NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        return _fail(f"the demo needs {' and '.join(missing)}; to install: python -m pip install {' '.join(missing)}")
    from jaxfuse.commands import demo

    memory.retain_if_asked(by_default=True)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _fail(f"demo: no folder can be made at {arguments.out}: {error.strerror}")
    demo.run(arguments.quick, arguments.out)
    return 0


def _run(arguments) -> int:
    """The script gets `sys.argv` and `sys.path` as Python would set them; its exit code and its errors are its own."""
    if not memory.retain_memory():
        print("jaxfuse: memory cannot be retained here: it takes glibc", file=sys.stderr)
    sys.argv = arguments.given[arguments.given.index(arguments.script, 1) :]  # argparse drops a "--"
    if arguments.is_module:
        sys.path[0] = os.getcwd()
        try:
            target.require_module(arguments.script)
        except target.Unusable as error:
            return _fail(f"run: {error}")
        runpy.run_module(arguments.script, run_name="__main__", alter_sys=True)
    elif not Path(arguments.script).exists():
        return _fail(f"run: there is no file {arguments.script}{near.files(arguments.script)}")
    else:
        sys.path[0] = str(Path(arguments.script).resolve().parent)
        runpy.run_path(os.path.abspath(arguments.script), run_name="__main__")
    return 0


def _bench(arguments) -> int:
    if "--tune" in arguments.rest:
        from jaxfuse.commands import tune

        others = [each for each in arguments.rest if each != "--tune"]
        if others not in ([], ["--quick"]):
            return _fail(f"bench --tune takes no option but --quick, not {' '.join(others)}{near.meant(others[0], ['--quick'])}")
        return tune.run(quick=bool(others))
    if not all((CHECKOUT / part).exists() for part in ("benchmarks/__main__.py", "pyproject.toml")):
        return _fail(NO_BENCHMARKS)
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    return subprocess.call([sys.executable, "-m", "benchmarks", *arguments.rest], env=os.environ | {"PYTHONPATH": path})


def _doctor(arguments) -> int:
    from jaxfuse.commands import doctor

    print(doctor.doctor(arguments.rules).rstrip())
    return 0


def _explain(arguments) -> int:
    from jaxfuse.commands import explain

    given = {name: value for name, value in vars(arguments).items() if name not in ("run", "given")}
    try:
        return explain.run(**given)
    except target.Unusable as error:
        return _fail(f"explain: {error}")


def _bisect(arguments) -> int:
    from jaxfuse.commands import bisect

    try:
        return bisect.run(arguments.target)
    except target.Unusable as error:
        return _fail(f"bisect: {error}")


def _fail(sentence: str) -> int:
    print(f"jaxfuse: {sentence}", file=sys.stderr)
    return 1


def _leave(code: int) -> NoReturn:
    """Ctrl-C leaves a compilation running on a thread of XLA's. jaxlib 0.10 destroys at exit what that one works with, and ends in
    a segmentation fault: then nothing is destroyed."""
    if code != INTERRUPTED:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _quietly() -> int:
    """`main`, whose reader may stop early, as `| head` does: no traceback then, and what is not yet written is dropped. The errors of
    a script that `run` runs are its own."""
    if sys.argv[1:2] == ["run"]:
        return main()
    try:
        try:
            return main()
        finally:  # here rather than at exit, where Python would complain
            print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


if __name__ == "__main__":
    _leave(_quietly())
