"""What of jaxfuse works on this machine, and why the rest does not."""

import platform

import jax
import jaxlib
from rich.console import Console
from rich.table import Table

from jaxfuse import ffi


def doctor() -> str:
    """A table, as text: versions, what the native module was built with and runs on, and each of its FFI targets.

    Never raises for a broken installation: the table says what is broken.
    """
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in (*_versions(), *_native_module()):
        table.add_row(name, value)
    console = Console(width=110)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _versions() -> list[tuple[str, str]]:
    return [
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("jax", jax.__version__),
        ("jaxlib", jaxlib.__version__),
    ]


def _native_module() -> list[tuple[str, str]]:
    try:
        module = ffi.native()
        targets = [(target, ffi.unavailable(target) or "usable") for target in ffi.TARGETS]
    except RuntimeError as error:
        return [("native module", f"broken: {error}"), _CUDA]
    if module is None:
        return [("native module", "absent: everything runs by reference"), *targets, _CUDA]
    info = module.info()
    onednn = f"{info['onednn']}, uses {info['isa']}" if info["onednn"] else f"absent: {info['no_onednn']}"
    return [
        ("native module", f"{module.__file__}\n{info['compiler']}, XLA FFI {info['ffi_api']}"),
        ("oneDNN", onednn),
        ("our own kernels", f"use {info['simd']}"),
        ("threads", str(info["threads"])),
        *targets,
        _CUDA,
    ]


_CUDA = ("CUDA", "not built in this version")
