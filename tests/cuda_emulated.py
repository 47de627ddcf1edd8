"""The CUDA kernels and their handlers compiled for the CPU (`tests/cuda/emulation.h`), as FFI targets: the code under test
is the code that runs on a GPU."""

import ctypes
import functools
import pathlib
import shutil
import subprocess
import sys

import jax

from jaxfuse.runtime import cuda

HERE = pathlib.Path(__file__).parent
SOURCES = ("module.cc", "batch_norm.cc", "batch_norm.cu", "column_sums.cu", "norm.cc", "norm.cu",
           "cudnn_api.cc", "cudnn_graph.cc")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Werror=switch", "-Wno-unknown-pragmas",
         "-U_FORTIFY_SOURCE",  # whose longjmp takes another stack for a mistake
         '-DJAXFUSE_NVCC="none"', '-DJAXFUSE_CUDA_ARCHITECTURES="the CPU"')


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def includes(generated: pathlib.Path) -> list[str]:
    """`generated` is a folder that the C++ of tables is written to."""
    subprocess.run([sys.executable, str(HERE.parent / "xla_ext" / "activations.py"), str(generated)], check=True)
    folders = (HERE / "cuda", HERE.parent / "cuda", HERE.parent / "xla_ext", generated)
    return [*(f"-I{folder}" for folder in folders), "-isystem", jax.ffi.include_dir()]


def build(folder: pathlib.Path) -> pathlib.Path:
    """The library, built in `folder`: each file by a compiler of its own, at the same time."""
    sources = [*(HERE.parent / "cuda" / name for name in SOURCES), HERE.parent / "xla_ext" / "activation_attr.cc"]
    objects = [folder / f"{source.name}.o" for source in sources]
    flags = [*FLAGS, *includes(folder)]
    runs = [subprocess.Popen([compiler(), *flags, "-x", "c++", "-c", str(source), "-o", str(target)])
            for source, target in zip(sources, objects)]
    assert [run.wait() for run in runs] == [0] * len(runs)
    library = folder / "emulated.so"
    subprocess.run([compiler(), "-shared", "-o", str(library), *map(str, objects)], check=True)
    fake = [str(HERE / "cuda" / "fake_cudnn.c"), "-o", str(folder / "libcudnn.so.9")]
    subprocess.run([compiler(), "-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcudnn.so.9", *fake], check=True)
    return library


@functools.cache
def register(library: pathlib.Path) -> frozenset[str]:
    """Registers its targets with XLA's CPU client, as emulated_<target>, and returns their names."""
    names = []
    ctypes.CDLL(str(library.with_name("libcudnn.so.9")))  # which is then the one that the handler finds
    for name, handler in cuda.handlers(ctypes.CDLL(str(library))):
        jax.ffi.register_ffi_target("emulated_" + name, handler, platform="cpu")
        names.append(name)
    return frozenset(names)


def call(target, out_types, *operands, **attrs):
    """As `cuda.call`."""
    return cuda.call_registered(target, out_types, *operands, prefix="emulated_", **attrs)
