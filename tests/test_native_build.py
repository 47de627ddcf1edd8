"""What the native module's sources promise the compiler and the linker, tried on a few of them."""

import pathlib
import platform
import re
import shutil
import subprocess

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
FLAGS = ("-std=c++17", "-O0", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi")

needs_x86 = pytest.mark.skipif(COMPILER is None or platform.machine() not in ("x86_64", "AMD64"), reason="no C++ compiler for x86")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def loops() -> list[str]:
    """The namespaces whose loops are compiled for every instruction set."""
    return re.search(r"set\(LOOPS ([^)]*)\)", (ROOT / "CMakeLists.txt").read_text())[1].split()


def compiled_loops(namespace: str, isa: str) -> str:
    """The source that CMake makes of them for one."""
    text = (ROOT / "xla_ext/loops.cc.in").read_text()
    for name, value in dict(NAMESPACE=namespace, FILE=namespace.replace("::", "_"), ISA=isa).items():
        text = text.replace(f"@{name}@", value)
    return text


def sources():
    return [path for folder in ("xla_ext", "xla_ext/onednn", "cuda") for path in (ROOT / folder).iterdir()
            if path.suffix in (".h", ".cc", ".cu", ".cuh")]


def switches(text: str) -> list[str]:
    """The bodies of the switches in C++ code, whose closing braces stand below the `switch`."""
    return [found[2] for found in re.finditer(r"^( *)switch \([^\n]*\n(.*?)^\1\}", text, re.M | re.S)]


def test_a_switch_over_activations_has_no_default():
    """So that -Werror=switch finds the one that a new activation is missing from."""
    found = {path: [body for body in switches(path.read_text()) if "case Activation::" in body] for path in sources()}
    assert sum(len(bodies) > 0 for bodies in found.values()) >= 4
    assert not [path for path, bodies in found.items() for body in bodies if "default:" in body]
    for lists in ("CMakeLists.txt", "cuda/CMakeLists.txt"):
        assert re.search(r"target_compile_options\(.*-Werror=switch", (ROOT / lists).read_text())


@needs_compiler
def test_the_compiler_names_what_a_new_activation_lacks(tmp_path):
    for path in (ROOT / "xla_ext").glob("*.h"):
        shutil.copy(path, tmp_path)
    source = tmp_path / "dense_portable.cc"
    source.write_text(compiled_loops("dense", "portable"))
    activation = tmp_path / "activation.h"
    activation.write_text(activation.read_text().replace("ROW(none, 0, y)", "ROW(none, 0, y) ROW(another, 0, y)"))
    run = subprocess.run([COMPILER, *FLAGS, "-c", "-o", "/dev/null", str(source)], capture_output=True, text=True)
    places = re.findall(r"([\w.]+):(\d+):\d+: warning: [^\n]*\[-W(?:switch|return-type)\]", run.stderr)
    functions = {function_at((tmp_path / name).read_text().splitlines()[: int(line)]) for name, line in places}
    assert run.returncode == 0
    assert functions == {"activated", "pulled_back", "pulled_back_by_value"}


def function_at(lines: list[str]) -> str:
    """The function that the last of these lines is in."""
    return next(found[1] for line in reversed(lines) if (found := re.match(r"\S.*?\b(\w+)\(.*\{$", line)))


def options(sources: str) -> list[str]:
    """What CMakeLists.txt gives the files of one instruction set."""
    lists = (ROOT / "CMakeLists.txt").read_text()
    return re.search(rf"SOURCE \$\{{{sources}\}} APPEND PROPERTY\s+COMPILE_OPTIONS ([^)]*)\)", lists)[1].split()


def test_the_cpu_is_asked_for_what_the_compiler_may_use():
    asked = (ROOT / "xla_ext/simd_level.cc").read_text()
    for option in options("avx2_SOURCES") + options("avx512_SOURCES"):
        name = option.removeprefix("-m")
        assert option.startswith("-mno-") or f'"{name}"' in asked or f"bit_{name.upper()}" in asked, option


@needs_x86
@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_compiler_flags_of_the_users_own(isa):
    """CXXFLAGS="-march=native" on a machine with AVX-512 leaves each file its own instruction set."""
    subprocess.run([COMPILER, *FLAGS, "-march=skylake-avx512", *options(f"{isa}_SOURCES"), f"-I{ROOT / 'xla_ext'}", "-fsyntax-only",
                    "-x", "c++", "-"], input=compiled_loops("product", isa), text=True, check=True)


@needs_compiler
def test_a_build_without_onednn_has_all_that_is_asked_of_it(tmp_path):
    """What onednn.h declares absent.cc defines. (`xla_ext/sanitize.sh absent` builds it all.)"""
    folder, target = ROOT / "xla_ext/onednn", tmp_path / "absent.o"
    header = re.sub(r"//.*", "", (folder / "onednn.h").read_text())
    declared = re.findall(r"^[\w:* ]+?\b(\w+)\([^{}]*?\);", header, re.M)
    subprocess.run([COMPILER, *FLAGS, f"-I{ROOT / 'xla_ext'}", f"-I{jax.ffi.include_dir()}", '-DJAXFUSE_NO_ONEDNN="of a test"', "-c",
                    str(folder / "absent.cc"), "-o", str(target)], check=True)
    symbols = subprocess.run(["nm", "-C", str(target)], capture_output=True, text=True, check=True).stdout
    assert sorted(declared) == sorted(re.findall(r" T jaxfuse::onednn::(\w+)\(", symbols)) and len(declared) > 10


@needs_x86
def test_no_function_of_an_instruction_set_is_shared(tmp_path):
    """A weak function would be one for all, perhaps the one with instructions that this CPU lacks. Without optimisation, which
    would inline some."""
    source, target = tmp_path / "all.cc", tmp_path / "all.o"
    source.write_text("".join(compiled_loops(namespace, "avx2") for namespace in loops()))
    subprocess.run([COMPILER, *FLAGS, f"-I{ROOT / 'xla_ext'}", *options("avx2_SOURCES"), "-c", str(source), "-o", str(target)], check=True)
    symbols = subprocess.run(["nm", "-C", str(target)], capture_output=True, text=True, check=True).stdout
    assert symbols.count("avx2_kernels") == len(list((ROOT / "xla_ext").glob("*_kernels.h"))) > 5
    assert not re.findall(r"^\w+ [WVuw] .*", symbols, re.M)
