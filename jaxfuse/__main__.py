"""python -m jaxfuse demo | bench | doctor"""

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
NO_BENCHMARKS = "the benchmarks come with the source repository, not with the installed package: run this from the root of a clone"
# module: package
DEMO_NEEDS = {"flax": "flax", "optax": "optax", "sklearn": "scikit-learn", "matplotlib": "matplotlib", "PIL": "pillow"}


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m jaxfuse", description="Fused convolutions and batch norms for JAX.")
    commands = parser.add_subparsers(metavar="command", required=True)

    text = "train and run real networks, unfused and fused: speed and numbers side by side"
    more = " A small residual network on handwritten digits, then ResNet-50 on a photograph. Takes one to two minutes."
    demo = commands.add_parser("demo", help=text, description=f"{text.capitalize()}.{more}")
    demo.add_argument("--quick", action="store_true", help="fewer steps and repetitions: less than half a minute")
    demo.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the loss curves go (default: here)")
    demo.set_defaults(run=_demo)

    # No option of its own but --tune, not even --help: whatever follows is the benchmark's. Hence a prefix that no argument has.
    text = "measure ops and models against XLA and PyTorch; what follows goes to python -m benchmarks. --tune: from which size on " \
        "each fused kernel wins on this machine, kept for policy \"measured\" (a few minutes; --tune --quick tries it)"
    bench = commands.add_parser("bench", help=text, add_help=False, prefix_chars="\0")
    bench.add_argument("rest", nargs=argparse.REMAINDER)
    bench.set_defaults(run=_bench)

    text = "what is built, which instruction set, how many threads, and why something is missing"
    doctor = commands.add_parser("doctor", help=text, description=f"Says {text}.")
    doctor.set_defaults(run=_doctor)
    return parser


def _demo(arguments) -> int:
    missing = [package for module, package in DEMO_NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        return _fail(f"the demo needs {' and '.join(missing)}; to install: python -m pip install {' '.join(missing)}")
    from jaxfuse import demo

    demo.run(arguments.quick, arguments.out)
    return 0


def _bench(arguments) -> int:
    if arguments.rest[:1] == ["--tune"]:
        from jaxfuse import tune

        if arguments.rest[1:] not in ([], ["--quick"]):
            return _fail(f"bench --tune takes no option but --quick, not {' '.join(arguments.rest[1:])}")
        return tune.run(quick=bool(arguments.rest[1:]))
    if not all((CHECKOUT / part).exists() for part in ("benchmarks/__main__.py", "pyproject.toml")):
        return _fail(NO_BENCHMARKS)
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    return subprocess.call([sys.executable, "-m", "benchmarks", *arguments.rest], env=os.environ | {"PYTHONPATH": path})


def _doctor(arguments) -> int:
    from jaxfuse import doctor

    print(doctor.doctor().rstrip())
    return 0


def _fail(sentence: str) -> int:
    print(f"jaxfuse: {sentence}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
