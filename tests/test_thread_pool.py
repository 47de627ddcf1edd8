"""The pool of threads, and the cache of oneDNN's primitives, by themselves: the C++ files beside this one, built with xla_ext's."""

import os
import pathlib
import platform
import shutil
import subprocess
import sys

import pytest

from native_sources import INSTALLED_BY, headers

HERE = pathlib.Path(__file__).parent
SOURCES = HERE.parent / "xla_ext"
TESTS = ["sizes", "exceptions", "shares", "denormals", "invalid_operations", "one_processor", "workers_leave_the_callers_processor",
         "only_the_team_wakes", "threads_that_cannot_start", "forks", "exits_in_a_region"]


def built(folder, name, *more):
    compiler = shutil.which("c++")
    if not compiler or sys.platform != "linux":
        pytest.skip("needs a C++ compiler and Linux")
    sources = [HERE / f"{name}.cc", SOURCES / "thread_pool.cc", SOURCES / "scratch.cc"]
    flags = os.environ.get("CXXFLAGS", "").split()  # xla_ext/sanitize.sh
    subprocess.run([compiler, "-std=c++17", "-O1", "-Wall", "-pthread", f"-I{SOURCES}", *flags, *sources, *more, "-o", folder / name],
                   check=True)
    return folder / name


def passes(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return built(tmp_path_factory.mktemp("thread_pool"), "thread_pool")


@pytest.mark.parametrize("name", TESTS)
def test_thread_pool(program, name):
    passes(program, name)


def test_forks_while_primitives_are_kept(tmp_path):
    """The cache alone: of oneDNN nothing is called, so nothing is linked."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"this machine is {platform.machine()}, for which oneDNN has no package")
    if not any((pathlib.Path(folder) / "dnnl.hpp").exists() for folder in headers()):
        pytest.skip(f"no dnnl.hpp: {INSTALLED_BY}")
    source = SOURCES / "onednn" / "primitive.cc"
    passes(built(tmp_path, "primitive_cache", source, *headers(), "-no-pie", "-Wl,--unresolved-symbols=ignore-all"))
