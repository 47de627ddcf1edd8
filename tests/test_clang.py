"""Clang takes the native module's sources as g++ does, without a warning.

`python -m pip install '.[clang]'` brings one, as zig's, where the system has none, and the headers dnnl.hpp and pybind11's.
"""

import importlib.util
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import pytest

from native_sources import INSTALLED_BY, ROOT, compiled_loops, generated, headers, instruction_sets, options

ZIG = [sys.executable, "-m", "ziglang", "c++", "-target", "x86_64-linux-gnu"] if importlib.util.find_spec("ziglang") else None
CLANG = [found] if (found := shutil.which("clang++")) else ZIG
FLAGS = ["-std=c++17", "-O0", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi", '-DJAXFUSE_NO_CUDA=""', '-DJAXFUSE_COMPILER=""']
OF_A_BUILD = r"fatal error: '(dnnl\.hpp|pybind11/\S+|Python\.h)' file not found"

pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason=f"this machine is {platform.machine()}"),
    pytest.mark.skipif(CLANG is None, reason=f"no clang++: {INSTALLED_BY}"),
]
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "xla_ext").rglob("*.cc"))


def compile_with_clang(source: pathlib.Path, target: pathlib.Path, *more: str) -> None:
    generated(target.parent)
    includes = [f"-I{ROOT / 'xla_ext'}", f"-I{target.parent}", *headers()]
    run = subprocess.run([*CLANG, *FLAGS, *more, *includes, "-c", str(source), "-o", str(target)], capture_output=True, text=True)
    if missing := re.search(OF_A_BUILD, run.stderr):
        pytest.skip(f"no {missing[1]} for clang: {INSTALLED_BY}")
    assert run.returncode == 0 and "warning:" not in run.stderr, run.stderr[-3000:]


@pytest.mark.parametrize("name", SOURCES)
def test_a_file(name, tmp_path):
    compile_with_clang(ROOT / name, tmp_path / "object.o", '-DJAXFUSE_NO_ONEDNN="of a test"')


@pytest.mark.parametrize("namespace, isa", [(namespace, isa) for isa, names in instruction_sets().items() for namespace in names])
def test_loops(namespace, isa, tmp_path):
    source = tmp_path / "loops.cc"
    source.write_text(compiled_loops(namespace, isa))
    compile_with_clang(source, tmp_path / "object.o", *options(isa))
