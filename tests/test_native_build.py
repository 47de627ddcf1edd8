"""What the native module's sources promise the compiler and the linker, tried on a few of them."""

import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
FLAGS = ("-std=c++17", "-O0", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def sources():
    return [path for folder in ("xla_ext", "cuda") for path in (ROOT / folder).iterdir() if path.suffix in (".h", ".cc", ".cu", ".cuh")]


def switches(text: str) -> list[str]:
    """The bodies of the switches in C++ code, whose closing braces stand below the `switch`."""
    return [found[2] for found in re.finditer(r"^( *)switch \([^\n]*\n(.*?)^\1\}", text, re.M | re.S)]


def test_a_switch_over_activations_has_no_default():
    """So that -Werror=switch finds the one that a new activation is missing from."""
    found = {path.name: [body for body in switches(path.read_text()) if "case Activation::" in body] for path in sources()}
    assert sum(len(bodies) > 0 for bodies in found.values()) >= 5
    assert not [name for name, bodies in found.items() for body in bodies if "default:" in body]
    for lists in ("CMakeLists.txt", "cuda/CMakeLists.txt"):
        assert re.search(r"target_compile_options\(.*-Werror=switch", (ROOT / lists).read_text())


@needs_compiler
def test_the_compiler_names_what_a_new_activation_lacks(tmp_path):
    for path in [*(ROOT / "xla_ext").glob("*.h"), ROOT / "xla_ext/dense_portable.cc"]:
        shutil.copy(path, tmp_path)
    activation = tmp_path / "activation.h"
    activation.write_text(activation.read_text().replace("enum class Activation {", "enum class Activation { another,"))
    loops = tmp_path / "activation_loops.h"  # as if it had got as far as being dispatched
    loops.write_text(loops.read_text().replace("    CASE(none);", "    CASE(none); CASE(another);"))
    run = subprocess.run([COMPILER, *FLAGS, "-c", "-o", "/dev/null", str(tmp_path / "dense_portable.cc")], capture_output=True, text=True)
    places = re.findall(r"([\w.]+):(\d+):\d+: warning: [^\n]*\[-W(?:switch|return-type)\]", run.stderr)
    functions = {function_at((tmp_path / name).read_text().splitlines()[: int(line)]) for name, line in places}
    assert run.returncode == 0
    assert functions == {"activated", "pulled_back", "is_told_by_value"}


def function_at(lines: list[str]) -> str:
    """The function that the last of these lines is in."""
    return next(found[1] for line in reversed(lines) if (found := re.match(r"\S.*?\b(\w+)\(.*\{$", line)))
