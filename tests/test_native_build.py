"""What the native module's sources promise the compiler and the linker, tried on a few of them."""

import pathlib
import platform
import re
import shutil
import subprocess

import jax
import pytest

from jaxfuse.ops.activations import KINDS
from jaxfuse.runtime import ffi
from native_sources import ROOT, compiled_loops, generated, instruction_sets, loops, options

COMPILER = shutil.which("g++") or shutil.which("clang++")
FLAGS = ("-std=c++17", "-O0", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi")
BEYOND_PORTABLE = [isa for isa in instruction_sets() if isa != "portable"]

needs_x86 = pytest.mark.skipif(COMPILER is None or platform.machine() not in ("x86_64", "AMD64"), reason="no C++ compiler for x86")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def sources():
    return [path for folder in ("xla_ext", "xla_ext/onednn", "cuda") for path in (ROOT / folder).iterdir()
            if path.suffix in (".h", ".cc", ".cu", ".cuh")]


def test_every_file_of_kernels_has_its_loops():
    assert len(loops()) == len(list((ROOT / "xla_ext").glob("*_kernels.h"))) > 5


def test_activations_are_listed_in_one_table():
    """No other file has a list of them that a new one could be missing from."""
    known = re.compile(r"Activation::(\w+)|\bcase (\w+):")
    named = {path.name: {name for names in known.findall(path.read_text()) for name in names} & {*KINDS} for path in sources()}
    # As such, or for its speed, or for its parameters: what is asked there is not asked of another activation.
    assert {name for names in named.values() for name in names} == {"none", "relu", "piecewise_linear"}
    assert not [path.name for path in sources() if re.search(r"case Activation::(?!name\b)", path.read_text())]


@needs_compiler
def test_a_row_is_all_that_a_new_activation_needs(tmp_path):
    """Without one of its formulas, or with one that is no C++, nothing is built."""
    for name, row, message in [
        ("whole", 'Kind(value=Both(lambda x, _: x, "tanh(z) * z"), pullback="const N t = tanh(z); return g * t;")', ""),
        ("no_pullback", 'Kind(value=Both(lambda x, _: x, "z"))', "another lacks pullback"),
        ("no_value", 'Kind(pullback="g")', "another lacks value"),
        ("unknown", 'Kind(value=Both(lambda x, _: x, "sine(z)"), pullback="g")', "sine"),
    ]:
        run = generated(tmp_path / name, f'    "another": {row},\n')
        if run.returncode == 0:
            source = tmp_path / name / "epilogue_portable.cc"
            source.write_text(compiled_loops("epilogue", "portable"))
            includes = [f"-I{tmp_path / name}", f"-I{ROOT / 'xla_ext'}"]
            run = subprocess.run([COMPILER, *FLAGS, "-Werror", "-fsyntax-only", *includes, str(source)], capture_output=True, text=True)
        assert (run.returncode != 0, message in run.stderr) == (message != "", True), run.stderr


@pytest.mark.skipif(ffi.native() is None, reason="no native module")
def test_a_library_of_another_table_is_not_used():
    info = ffi.native().info()
    assert [row.split()[0] for row in info["activations"].split(", ")[:-1]] == [*KINDS]
    with pytest.raises(RuntimeError, match="_native.so was built from another table of activations; reinstall jaxfuse"):
        ffi.check(info | dict(activations=info["activations"] + "another 0 y, "), pathlib.Path("_native.so"))


def test_the_cpu_is_asked_for_what_the_compiler_may_use():
    asked = "".join((ROOT / f"xla_ext/{name}.cc").read_text() for name in ("simd_level", "contraction"))
    for option in sum(map(options, BEYOND_PORTABLE), []):
        name = option.removeprefix("-m")
        asked_as = f'"{name}"', f"bit_{name.upper()}", f"k{name.title().replace('-', '')}"
        assert option.startswith(("-mno-", "-D")) or any(known in asked for known in asked_as), option


@needs_x86
@pytest.mark.parametrize("isa", ["avx2", "portable", "avx512"])
def test_compiler_flags_of_the_users_own(isa):
    """CXXFLAGS="-march=native" on a machine with AVX-512 leaves each file its own instruction set."""
    subprocess.run([COMPILER, *FLAGS, "-march=skylake-avx512", *options(isa), f"-I{ROOT / 'xla_ext'}", "-fsyntax-only",
                    "-x", "c++", "-"], input=compiled_loops("product", isa), text=True, check=True)


@needs_x86
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_flags_of_a_newer_processor_leave_tables_whole(isa):
    """Instructions for bytes, bf16 and matrices have tables of their own, in part."""
    whole = "static_assert(jaxfuse::contraction::kernels.f32.multiply && jaxfuse::contraction::kernels.pack_bf16);"
    subprocess.run([COMPILER, *FLAGS, "-march=sapphirerapids", *options(isa), f"-I{ROOT / 'xla_ext'}", "-fsyntax-only", "-x", "c++", "-"],
                   input=compiled_loops("contraction", isa) + whole, text=True, check=True)


@needs_x86
@pytest.mark.parametrize("isa, products", [
    ("avx2", {"vpmaddubsw", "vpmaddwd"}), ("avx2_vnni", {"vpdpbusd"}),
    ("avx512", {"vpmaddubsw", "vpmaddwd"}), ("avx512_vnni", {"vpdpbusd"})])
def test_products_of_bytes_are_these_instructions(isa, products, tmp_path):
    source = "namespace jaxfuse::contraction {{ Ints of(Ints s, Uints a, Uints b) {{ return dot4<{0}>(s, a, b); }} }}"
    for small in ("true", "false"):
        text = '#include "contraction_bytes_loops.h"\n' + source.format(small)
        run = subprocess.run([COMPILER, *FLAGS, "-O1", *options(isa), f"-I{ROOT / 'xla_ext'}", "-S", "-x", "c++", "-", "-o", "-"],
                             input=text, text=True, capture_output=True, check=True)
        found = set(re.findall(r"\b(vpmaddubsw|vpmaddwd|vpdpbusd)\b", run.stdout))
        assert found == (products if small == "true" else products - {"vpmaddubsw"})


@needs_compiler
def test_a_build_without_onednn_has_all_that_is_asked_of_it(tmp_path):
    """What onednn.h declares absent.cc defines. (`xla_ext/sanitize.sh absent` builds it all.)"""
    folder, target = ROOT / "xla_ext/onednn", tmp_path / "absent.o"
    header = re.sub(r"//.*", "", (folder / "onednn.h").read_text())
    declared = re.findall(r"^[\w:* ]+?\b(\w+)\([^{}]*?\);", header, re.M)
    generated(tmp_path)
    includes = [f"-I{folder}" for folder in (ROOT / "xla_ext", tmp_path, jax.ffi.include_dir())]
    subprocess.run([COMPILER, *FLAGS, *includes, '-DJAXFUSE_NO_ONEDNN="of a test"', "-c", str(folder / "absent.cc"), "-o", str(target)],
                   check=True)
    symbols = subprocess.run(["nm", "-C", str(target)], capture_output=True, text=True, check=True).stdout
    assert sorted(declared) == sorted(re.findall(r" T jaxfuse::onednn::(?:\w+::)?(\w+)\(", symbols)) and len(declared) > 10


@pytest.mark.costly
@needs_x86
@pytest.mark.parametrize("isa", BEYOND_PORTABLE)
def test_no_function_of_an_instruction_set_is_shared(isa, tmp_path):
    """A weak function would be one for all, perhaps the one with instructions that this CPU lacks. Without optimisation, which
    would inline some."""
    source, target, namespaces = tmp_path / "all.cc", tmp_path / "all.o", instruction_sets()[isa]
    source.write_text("".join(compiled_loops(namespace, isa) for namespace in namespaces))
    generated(tmp_path)
    flags = [*FLAGS, f"-I{ROOT / 'xla_ext'}", f"-I{tmp_path}", *options(isa)]
    subprocess.run([COMPILER, *flags, "-c", str(source), "-o", str(target)], check=True)
    symbols = subprocess.run(["nm", "-C", str(target)], capture_output=True, text=True, check=True).stdout
    assert symbols.count(f"{isa}_kernels") == len(namespaces) > 0
    assert not re.findall(r"^\w+ [WVuw] .*", symbols, re.M)
