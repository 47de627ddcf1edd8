"""What of jaxfuse works on this machine, and why the rest does not."""

import platform

import jax
import jaxlib
from rich.console import Console
from rich.table import Table

from jaxfuse import cuda, ffi, threads, tuned
from jaxfuse.cudnn import backend
from jaxfuse.rules import TABLE


def doctor() -> str:
    """A table, as text: versions, what the native module was built with and runs on, each of its FFI targets, and the rules
    by which policy "measured" goes.

    Never raises for a broken installation: the table says what is broken.
    """
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in (*_versions(), *_native_module(), *_cuda_library(), *_rules()):
        table.add_row(name, value)
    console = Console(width=110, markup=False)
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
        return [("native module", f"broken: {error}")]
    if module is None:
        return [("native module", "absent: everything runs by reference"), *targets]
    info = module.info()
    onednn = f"{info['onednn']}, uses {info['isa']}" if info["onednn"] else f"absent: {info['no_onednn']}"
    return [
        ("native module", f"{module.__file__}\n{info['compiler']}, XLA FFI {info['ffi_api']}"),
        ("oneDNN", onednn),
        ("our own kernels", f"use {info['simd']}"),
        ("threads", "{}, by {}".format(*threads.limit())),
        *targets,
    ]


def _cuda_library() -> list[tuple[str, str]]:
    try:
        if cuda.library() is None:
            return [("CUDA library", f"absent: {cuda.why_absent()}")]
    except RuntimeError as error:
        return [("CUDA library", f"broken: {error}")]
    info = cuda.info()
    built = f"{cuda.path()}\nnvcc {info.pop('nvcc')} for sm_{info.pop('architectures')}, XLA FFI {info.pop('ffi_api')}"
    rows = [("CUDA library", built), _cuda_devices(), _cudnn(), *info.items()]
    return rows + [(f"{target} on CUDA", "built") for target in sorted(cuda.targets())]


def _cuda_devices() -> tuple[str, str]:
    try:
        return "CUDA devices", ", ".join(device.device_kind for device in jax.devices("cuda"))
    except RuntimeError as error:  # no driver, no GPU, or a JAX without its CUDA plugin
        return "CUDA devices", f"none that JAX can use, so the library is not used here. JAX says: {str(error).splitlines()[0]}"


def _cudnn() -> tuple[str, str]:
    try:
        return "cuDNN", f"{backend.version()}, for plans of its graph API"
    except backend.CudnnError as error:
        return "cuDNN", f"absent: {error}"


def _rules() -> list[tuple[str, str]]:
    """Which rules are in force, since when, and from which size on each op is fused."""
    try:
        found = tuned.read()
    except RuntimeError:  # the native module is broken, as its row says
        return []
    origin = f"measured on this machine, {found.date}: {tuned.path()}" if found.rules else "built in"
    if found.ignored:
        origin = f"built in; {tuned.path()} is ignored: {found.ignored}"
    rows = []
    for op, table in TABLE.items():
        rules = (*found.rules.get(op, ()), *table.rules)
        rows.append((f"  {op}", "\n".join(f"{rule.sites}: {rule.wins_from(table.unit)}; {rule.machine}" for rule in rules)))
    return [('policy "measured"', f"{origin}; the fused kernel is used from this size on:"), *rows]
