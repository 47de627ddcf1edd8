"""The Pythons of this machine that the package supports, and virtual environments of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = 11
ASKED = "import sys, venv; print(sys.version_info.minor * (sys.version_info.releaselevel == 'final'))"  # no package has wheels before


def found() -> dict[int, str]:
    """Minor version -> interpreter, the oldest first: of those on the PATH, this one and pyenv's."""
    on_path = [path for folder in os.get_exec_path() for path in sorted(Path(folder).glob("python3.*"))]
    of_pyenv = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python"))
    interpreters: dict[int, str] = {}
    named = [path for path in on_path if re.fullmatch(r"python3\.\d+", path.name) and os.access(path, os.X_OK)]
    for candidate in [*named, Path(sys.executable), *of_pyenv]:
        asked = subprocess.run([str(candidate), "-c", ASKED], capture_output=True, text=True)
        if asked.returncode == 0 and int(asked.stdout) >= OLDEST:
            interpreters.setdefault(int(asked.stdout), str(candidate))
    return dict(sorted(interpreters.items()))


def environment(interpreter: str, folder: Path, *packages: str) -> Path:
    """The interpreter of a virtual environment with these packages; one that is there is used again."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    if packages:
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages], check=True)
    return python
