"""The pool of threads by itself: `thread_pool.cc` beside this file, built with xla_ext's."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
SOURCES = HERE.parent / "xla_ext"
TESTS = ["sizes", "exceptions", "denormals", "invalid_operations", "one_processor", "workers_leave_the_callers_processor",
         "only_the_team_wakes", "threads_that_cannot_start", "forks", "exits_in_a_region"]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = shutil.which("c++")
    if not compiler or sys.platform != "linux":
        pytest.skip("needs a C++ compiler and Linux")
    path = tmp_path_factory.mktemp("thread_pool") / "thread_pool"
    sources = [HERE / "thread_pool.cc", SOURCES / "thread_pool.cc", SOURCES / "scratch.cc"]
    flags = os.environ.get("CXXFLAGS", "").split()  # xla_ext/sanitize.sh
    subprocess.run([compiler, "-std=c++17", "-O1", "-Wall", "-pthread", f"-I{SOURCES}", *flags, *sources, "-o", path], check=True)
    return path


@pytest.mark.parametrize("name", TESTS)
def test_thread_pool(program, name):
    done = subprocess.run([program, name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
