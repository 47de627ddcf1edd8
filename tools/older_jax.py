"""python -m tools.older_jax: a short set of the tests on older versions of JAX, for each Python of this machine that is named here. One
that is not there is said at the end, and is no failure: CI asks for one Python only.

The kernels are compiled once, and not at all where another build of this source has left its objects.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tools import pythons, wheels
from tools.pythons import ROOT

OF_PYTHON = {11: "0.10", 12: "0.11"}  # minor version of Python -> jax: the oldest that is supported, and the middle one
TESTS = ["--share", "test_fuse.py", "test_versions.py", "test_loops.py"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.older_jax", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=Path, help="the build-dir of an earlier build of this source (pip install -C build-dir=…)")
    given = parser.parse_args(argv)
    here = {minor: interpreter for minor, interpreter in pythons.found().items() if minor in OF_PYTHON}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        tools = wheels.build_tools(work)
        for minor, interpreter in here.items():
            wheels.say(f"--- Python 3.{minor}, jax {OF_PYTHON[minor]}")
            wheel = wheels.built(tools, interpreter, ROOT, work, (given.objects or work / "objects").resolve())
            jax = [f"{package}=={OF_PYTHON[minor]}.*" for package in ("jax", "jaxlib")]
            folder = work / f"jax-{OF_PYTHON[minor]}"
            python = pythons.environment(interpreter, folder / "env", str(wheel), *jax, *wheels.TESTS_NEED)
            wheels.say(wheels.tested(python, folder, ["--salt", OF_PYTHON[minor], *TESTS]))  # each takes other cases
    for minor in sorted(OF_PYTHON.keys() - here):
        wheels.say(f"--- jax {OF_PYTHON[minor]} was not tested: no Python 3.{minor} was found here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
