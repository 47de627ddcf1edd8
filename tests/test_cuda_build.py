"""What nvcc makes of the CUDA kernels, for one GPU: no spilled registers, 16-byte accesses, no local memory.
All GPUs of the wheel, in some minutes: python tests/test_cuda_build.py 80 90 100 120"""

import concurrent.futures
import functools
import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = ("batch_norm", "column_sums", "norm")


@functools.cache
def tool(package: str, name: str) -> str | None:
    """From PyPI's package if it is installed, else from the system."""
    try:
        files = importlib.metadata.files(package) or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    found = next((str(file.locate().resolve()) for file in files if file.as_posix().endswith(f"/bin/{name}")), None)
    return found or shutil.which(name)


def compiled(arch: str, source: str) -> tuple[dict[str, tuple[int, int]], str]:
    """({kernel: (registers, bytes of stack and spills)}, SASS or "")."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(ROOT / "xla_ext/activations.py"), folder], check=True)
        cubin = f"{folder}/{source}.cubin"
        run = subprocess.run(
            [tool("nvidia-cuda-nvcc", "nvcc"), "-cubin", f"-arch=sm_{arch}", "-std=c++17", "-O3", "-fmad=false", "-Xptxas", "-v",
             "-I", str(ROOT / "xla_ext"), "-I", folder, str(ROOT / "cuda" / f"{source}.cu"), "-o", cubin],
            capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        sass = ""
        if disassembler := tool("nvidia-cuda-nvdisasm", "nvdisasm"):
            sass = subprocess.run([disassembler, "-c", cubin], capture_output=True, text=True, check=True).stdout
    entry = r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers"
    found = re.findall(entry, run.stderr, re.DOTALL)
    return {name: (int(registers), int(stack) + int(spilled)) for name, stack, spilled, registers in found}, sass


def check(arch: str) -> str:
    """Raises AssertionError with what is wrong; returns a line of figures."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(functools.partial(compiled, arch), SOURCES))
    kernels = {name: figures for table, _ in results for name, figures in table.items()}
    assert len(kernels) > 50, kernels.keys()
    assert {name: figures for name, figures in kernels.items() if figures[0] > 128 or figures[1]} == {}
    code = {name: body for _, sass in results for name, body in re.findall(r"\.text\.(\w+):\n(.*?)(?=\n\.text\.|\Z)", sass, re.DOTALL)}
    aligned = [name for name in code if re.search("(bf16E|f16E|If)Lb1E", name)]
    assert [name for name, body in code.items() if re.search(r"\b(LDL|STL)\b", body)] == []
    assert [name for name in aligned if "LDG.E.128" not in code[name] or "stats" not in name and "STG.E.128" not in code[name]] == []
    registers = max(n for n, _ in kernels.values())
    return f"sm_{arch}: {len(kernels)} kernels, at most {registers} registers, SASS of {len(aligned)} vector paths"


@pytest.mark.costly
@pytest.mark.skipif(tool("nvidia-cuda-nvcc", "nvcc") is None, reason="no nvcc: python -m pip install -e '.[cuda-build]' brings one")
def test_kernels_compile_without_spills():
    figures = check("90")
    if tool("nvidia-cuda-nvdisasm", "nvdisasm"):
        assert "SASS of 48 vector paths" in figures, figures


if __name__ == "__main__":
    for arch in sys.argv[1:]:
        print(check(arch), flush=True)
