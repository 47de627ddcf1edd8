"""Wheels for aarch64, compiled on another processor and tried by qemu. xla_ext/aarch64_root.sh makes the folder with a Python for it;
beside that Debian's g++-aarch64-linux-gnu and qemu-user-binfmt are needed.

`python -m tools.aarch64` prints the options of CMake for the Python that it runs in."""

import os
import re
import subprocess
import sys
from pathlib import Path


def compiling(interpreter: str) -> dict[str, str]:
    """The variables with which this interpreter's pip builds for the same Python there, by the same headers."""
    include, suffix = _asked(interpreter, "get_path('include')"), _asked(interpreter, "get_config_var('EXT_SUFFIX')")
    flags = dict(CMAKE_SYSTEM_NAME="Linux", CMAKE_SYSTEM_PROCESSOR="aarch64", CMAKE_CXX_COMPILER="aarch64-linux-gnu-g++",
                 Python_INCLUDE_DIR=include, PYTHON_MODULE_EXTENSION=suffix.replace("x86_64", "aarch64"))
    return dict(CMAKE_ARGS=" ".join(f"-D{name}={value}" for name, value in flags.items()), _PYTHON_HOST_PLATFORM="linux-aarch64")


def lacking(interpreter: str) -> str:
    """The header that Debian's Pythons have for each processor, where that for aarch64 is not there; others have one for all."""
    named = re.search(r"<(aarch64-linux-gnu/\S+)>", Path(_asked(interpreter, "get_config_h_filename()")).read_text())
    return named[1] if named and not Path("/usr/include", named[1]).exists() else ""


def runs(root: Path, wheel: Path) -> bool:
    """Whether the folder has the wheel's Python."""
    minor = wheel.name.split("-cp3")[1].split("-")[0]
    return (root / f"usr/bin/python3.{minor}").exists()


def variables(root: Path, package: Path) -> dict[str, str]:
    """Those of a process there that sees the unpacked wheel."""
    return dict(PATH=os.environ["PATH"], QEMU_LD_PREFIX=str(root), PYTHONPATH=str(package), HOME=str(package), JAX_PLATFORMS="cpu")


def _asked(interpreter: str, what: str) -> str:
    return subprocess.check_output([interpreter, "-c", f"import sysconfig; print(sysconfig.{what})"], text=True).strip()


if __name__ == "__main__":
    print(compiling(sys.executable)["CMAKE_ARGS"])
