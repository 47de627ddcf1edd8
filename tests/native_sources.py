"""The native module's sources as CMake compiles them."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys
import sysconfig

import jax

ROOT = pathlib.Path(__file__).parent.parent
INSTALLED_BY = "pip install '.[clang]' brings it"  # how a skip says where to have what only these tests need


def lists() -> str:
    return (ROOT / "xla_ext/CMakeLists.txt").read_text()


def loops() -> list[str]:
    """The namespaces whose loops are compiled for every instruction set."""
    return re.search(r"set\(LOOPS ([^)]*)\)", lists())[1].split()


def instruction_sets() -> dict[str, list[str]]:
    """Each that CMake compiles loops for: the namespaces that have some for it."""
    of_all, of_contraction = re.findall(r"foreach\(ISA ([^)]*)\)", lists())
    return dict.fromkeys(of_all.split(), loops()) | dict.fromkeys(of_contraction.split(), ["contraction"])


def options(isa: str) -> list[str]:
    """What CMake gives the files of one instruction set."""
    return re.search(rf"SOURCE \$\{{{isa}_SOURCES\}} APPEND PROPERTY\s+COMPILE_OPTIONS ([^)]*)\)", lists())[1].split()


def compiled_loops(namespace: str, isa: str) -> str:
    """The source that CMake makes of them for one."""
    text = (ROOT / "xla_ext/loops.cc.in").read_text()
    for name, value in dict(NAMESPACE=namespace, FILE=namespace.replace("::", "_"), ISA=isa).items():
        text = text.replace(f"@{name}@", value)
    return text


def headers() -> list[str]:
    """Options for the folders of JAX's, Python's, and of oneDNN's and pybind11's where they are installed."""
    folders = [jax.ffi.include_dir(), sysconfig.get_path("include")]
    for package, header in (("onednn-devel-cpu-gomp", "dnnl.hpp"), ("pybind11", "pybind11/pybind11.h")):
        try:
            files = importlib.metadata.files(package) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        folders += [str(f.locate().resolve()).removesuffix(header) for f in files if f.as_posix().endswith("/" + header)][:1]
    return [argument for folder in folders for argument in ("-isystem", folder)]


def generated(folder: pathlib.Path, more: str = "") -> subprocess.CompletedProcess:
    """Writes the C++ of the table of activations, with more rows, to `folder`."""
    for name in ("xla_ext/activations.py", "jaxfuse/ops/activations.py"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text((ROOT / name).read_text().replace('    "relu": Kind(', more + '    "relu": Kind('))
    return subprocess.run([sys.executable, str(folder / "xla_ext/activations.py"), str(folder)], capture_output=True, text=True)
