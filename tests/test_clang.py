"""Clang takes the native module's sources as g++ does, without a warning.

Where the system has none, `python -m pip install ziglang` brings one; dnnl.hpp and pybind11 come with pyproject.toml's [build-system].
"""

import importlib.metadata
import importlib.util
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
ZIG = [sys.executable, "-m", "ziglang", "c++", "-target", "x86_64-linux-gnu"] if importlib.util.find_spec("ziglang") else None
CLANG = [found] if (found := shutil.which("clang++")) else ZIG
FLAGS = ["-std=c++17", "-O0", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi", '-DJAXFUSE_NO_CUDA=""', '-DJAXFUSE_COMPILER=""']
OF_A_BUILD = r"fatal error: '(dnnl\.hpp|pybind11/\S+|Python\.h)' file not found"

pytestmark = pytest.mark.skipif(CLANG is None or platform.machine() not in ("x86_64", "AMD64"), reason="no clang++ for x86")


def options(name: str) -> list[str]:
    """What CMakeLists.txt gives a file of one instruction set."""
    isa = re.search(r"_(avx2|avx512|portable)\.cc$", name)
    lists = (ROOT / "CMakeLists.txt").read_text()
    pattern = rf"SOURCE \$\{{{isa[1].upper()}_SOURCES\}} APPEND PROPERTY\s+COMPILE_OPTIONS ([^)]*)\)" if isa else "()"
    return re.search(pattern, lists)[1].split()


def headers() -> list[str]:
    """The folders of those that are installed."""
    folders = [jax.ffi.include_dir(), sysconfig.get_path("include")]
    for package, header in (("onednn-devel-cpu-gomp", "dnnl.hpp"), ("pybind11", "pybind11/pybind11.h")):
        try:
            files = importlib.metadata.files(package) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        folders += [str(f.locate().resolve()).removesuffix(header) for f in files if f.as_posix().endswith("/" + header)][:1]
    return [argument for folder in folders for argument in ("-isystem", folder)]


@pytest.mark.parametrize("name", sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "xla_ext").rglob("*.cc")))
def test_compiles_without_a_warning(name, tmp_path):
    run = subprocess.run([*CLANG, *FLAGS, *options(name), f"-I{ROOT / 'xla_ext'}", *headers(), "-c", str(ROOT / name), "-o",
                          str(tmp_path / "object.o")], capture_output=True, text=True)
    if missing := re.search(OF_A_BUILD, run.stderr):
        pytest.skip(f"{missing[1]} is not installed")
    assert run.returncode == 0 and "warning:" not in run.stderr, run.stderr[-3000:]
