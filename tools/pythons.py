"""The Pythons of this machine that the package supports, and virtual environments of them."""

import glob
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINORS = (11, 12, 13, 14)
ASKED = "import sys, venv; sys.exit(sys.version_info[:2] != (3, {minor}))"


def found() -> dict[int, str]:
    """Minor version -> interpreter, of those on the PATH and of pyenv's."""
    interpreters = {}
    for minor in MINORS:
        of_pyenv = sorted(glob.glob(str(Path.home() / f".pyenv/versions/3.{minor}.*/bin/python")))
        for candidate in filter(None, [shutil.which(f"python3.{minor}"), sys.executable, *of_pyenv]):
            if subprocess.run([candidate, "-c", ASKED.format(minor=minor)], capture_output=True).returncode == 0:
                interpreters[minor] = candidate
                break
    return interpreters


def environment(interpreter: str, folder: Path, *packages: str) -> Path:
    """The interpreter of a virtual environment with these packages; one that is there is used again."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    if packages:
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages], check=True)
    return python
