"""Wheels for aarch64, compiled on another processor and tried by qemu. xla_ext/aarch64_root.sh makes the folder with a Python for it;
beside that Debian's g++-aarch64-linux-gnu and qemu-user-binfmt are needed.

`python -m tools.aarch64` prints the options of CMake for the Python that it runs in."""

import os
import subprocess
import sys
from pathlib import Path


def compiling(interpreter: str) -> dict[str, str]:
    """The variables with which this interpreter's pip builds for the same Python there. The headers of both are the same."""
    asked = "import sysconfig; print(sysconfig.get_path('include'), sysconfig.get_config_var('EXT_SUFFIX'))"
    include, suffix = subprocess.check_output([interpreter, "-c", asked], text=True).split()
    flags = dict(CMAKE_SYSTEM_NAME="Linux", CMAKE_SYSTEM_PROCESSOR="aarch64", CMAKE_CXX_COMPILER="aarch64-linux-gnu-g++",
                 Python_INCLUDE_DIR=include, PYTHON_MODULE_EXTENSION=suffix.replace("x86_64", "aarch64"))
    return dict(CMAKE_ARGS=" ".join(f"-D{name}={value}" for name, value in flags.items()), _PYTHON_HOST_PLATFORM="linux-aarch64")


def runs(root: Path, wheel: Path) -> bool:
    """Whether the folder has the wheel's Python."""
    minor = wheel.name.split("-cp3")[1].split("-")[0]
    return (root / f"usr/bin/python3.{minor}").exists()


def variables(root: Path, package: Path) -> dict[str, str]:
    """Those of a process there that sees the unpacked wheel."""
    return dict(PATH=os.environ["PATH"], QEMU_LD_PREFIX=str(root), PYTHONPATH=str(package), HOME=str(package), JAX_PLATFORMS="cpu")


if __name__ == "__main__":
    print(compiling(sys.executable)["CMAKE_ARGS"])
