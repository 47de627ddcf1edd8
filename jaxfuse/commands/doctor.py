"""What of jaxfuse works on this machine, and why the rest does not."""

import platform

import jax
import jaxlib
from rich.console import Console
from rich.table import Table

from jaxfuse.runtime import cuda, ffi, memory, threads, versions
from jaxfuse.runtime.cudnn import backend
from jaxfuse.tuning import measured, tuned
from jaxfuse.tuning.rules import TABLE

AGAIN = "install again: python -m pip install --force-reinstall --no-deps jaxfuse, or python -m pip install -e . in a clone"


def doctor(rules: bool = False) -> str:
    """A verdict, and a table, as text: versions, what the native module was built with and runs on, page faults of a call.
    `rules`: by which policy "measured" goes on this machine, too.

    Never raises for a broken installation: the table says what is broken.
    """
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in (*_versions(), *_native_module(), *_cuda_library(), _page_faults(), *_rules(rules)):
        table.add_row(name, value)
    console = Console(width=110, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(_verdict(), soft_wrap=True)
        console.print(table)
        console.print("What to do next:", *(f"  {step}" for step in _next()), sep="\n", soft_wrap=True)
    return capture.get()


def _next() -> list[str]:
    """What mends what is missing, or how to see that all works."""
    try:
        built, missing = ffi.native() is not None, _unusable()
    except RuntimeError:
        return [AGAIN]
    if built and _unknown_level():
        return ["unset JAXFUSE_SIMD, or set it to one of those"]
    if not built:
        return ["install a wheel for this Python, or, with a C++17 compiler, python -m pip install -e . in a clone"]
    steps = []
    if missing:
        steps.append(f"so that all of it is of one version, {AGAIN}")
    if ffi.no_onednn():
        steps.append("oneDNN comes with the wheels for Linux on x86-64; elsewhere our own loops run with policy=\"always\", or after "
                     "python -m jaxfuse bench --tune, and convolutions of channels first stay XLA's")
    if tuned.isa() not in versions.INSTRUCTION_SETS and not tuned.read().rules:
        steps.append("measure when a kernel wins on this machine: python -m jaxfuse bench --tune")
    if not memory.is_retained():
        steps.append("keep freed memory in the process: jaxfuse.retain_memory() as the first line, or python -m jaxfuse run script.py")
    return [*steps, "check it: python -m jaxfuse demo --quick; then your own: python -m jaxfuse explain file.py:function"]


def _verdict() -> str:
    """One sentence: what works here, or what keeps it from working."""
    try:
        module = ffi.native()
        missing = _unusable()
    except RuntimeError as error:
        return f"BROKEN: {error}"
    if module is None:
        return "NOT BUILT: there is no native module here, so every function runs as XLA compiles it."
    if wrong := _unknown_level():
        return f"BROKEN: {wrong}"
    if missing:
        return f"IN PART: {len(missing)} of {len(ffi.TARGETS)} CPU kernels are missing; the table says why."
    if ffi.no_onednn():
        return "IN PART: there is no oneDNN here, so convolutions of channels first are XLA's; the table says why."
    info = module.info()
    number = threads.limit()[0]
    return f"WORKS: all {len(ffi.TARGETS)} CPU kernels, with {info['simd']}, on {number} thread{'s' * (number > 1)}."


def _unknown_level() -> str:
    """Why no kernel would run: the environment names an instruction set that there is not. "" where it names none, or one that is."""
    module = ffi.native()
    level = module.info()["simd"] if module else ""
    return "" if level in ("", *[ours for ours, _ in versions.INSTRUCTION_SETS]) else level  # then it says what is wrong


def _unusable() -> dict[str, str]:
    """Targets of the native module that are missing, each with why."""
    return {target: reason for target in ffi.TARGETS if (reason := ffi.unavailable(target))}


def _page_faults() -> tuple[str, str]:
    """What a call pays for memory that the C library gives back to the system."""
    faults = memory.page_faults_per_call()
    said = f"{faults} page faults a call (an addition of 32 MB)"
    if memory.is_retained():
        return "memory", f"retained; {said}"
    advice = "jaxfuse.retain_memory() before the first computation, or python -m jaxfuse run script.py, saves them"
    return "memory", f"{said}; {advice}" if faults > memory.FEW_FAULTS else said


def _versions() -> list[tuple[str, str]]:
    return [
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("jax", jax.__version__),
        ("jaxlib", jaxlib.__version__),
    ]


def _native_module() -> list[tuple[str, str]]:
    try:
        module = ffi.native()
        missing = _unusable()
    except RuntimeError as error:
        return [("native module", f"broken: {error}")]
    if module is None:
        return [("native module", "absent: everything runs by reference")]
    info = module.info()
    onednn = f"{info['onednn']}, uses {info['isa']}" if info["onednn"] else f"absent: {info['no_onednn']}"
    return [
        ("native module", f"{module.__file__}\n{info['compiler']}, XLA FFI {info['ffi_api']}"),
        ("oneDNN", onednn),
        ("our own kernels", _unknown_level() or f"use {info['simd']}; {versions.tested_with(tuned.isa())}"),
        ("threads", "{}, by {}".format(*threads.limit())),
        ("CPU kernels", f"{len(ffi.TARGETS) - len(missing)} of {len(ffi.TARGETS)} usable"),
        *missing.items(),
    ]


def _cuda_library() -> list[tuple[str, str]]:
    try:
        if cuda.library() is None:
            return [("CUDA library", f"absent: {cuda.why_absent()}")]
    except RuntimeError as error:
        return [("CUDA library", f"broken: {error}")]
    info = {key: value for key, value in cuda.info().items() if key != "activations"}
    built = f"{cuda.path()}\nnvcc {info.pop('nvcc')} for sm_{info.pop('architectures')}, XLA FFI {info.pop('ffi_api')}"
    rows = [("CUDA library", built), _cuda_devices(), _cudnn(), *info.items()]
    return [*rows, ("CUDA kernels", ", ".join(sorted(cuda.targets())))]


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


def _rules(listed: bool) -> list[tuple[str, str]]:
    """Which rules are in force, since when; and, `listed`, from which size on each op is fused by the instruction sets here."""
    try:
        found = tuned.read()
    except RuntimeError:  # the native module is broken, as its row says
        return []
    origin = f"measured on this machine, {found.date}: {tuned.path()}" if found.rules else "built in"
    if found.ignored:
        origin = f"built in; {tuned.path()} is ignored: {found.ignored}"
    if not listed:
        return [('policy "measured"', f"{origin}; python -m jaxfuse doctor --rules has the sizes")]
    rows = []
    for op, table in TABLE.items():
        rules = [rule for rule in (*found.rules.get(op, ()), *measured.rules(op)) if rule.holds_with(tuned.isa())]
        rows.append((f"  {op}", "\n".join(f"{rule.sites}: {rule.wins_from(table.unit)}; {rule.machine}" for rule in rules)))
    return [('policy "measured"', f"{origin}; the fused kernel is used from this size on:"), *rows]
