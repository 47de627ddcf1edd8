"""The folder where jaxfuse keeps what it measured or made on this machine, and files that are replaced in one step."""

import os
import sys
import tempfile
from pathlib import Path


def folder() -> Path:
    """What JAXFUSE_CACHE names, else jaxfuse's own in that of the platform's caches. It may not exist yet."""
    if named := os.environ.get("JAXFUSE_CACHE"):
        return Path(named)
    if sys.platform == "win32":
        caches = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local"
    elif sys.platform == "darwin":
        caches = Path.home() / "Library/Caches"
    else:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "jaxfuse"


def replace(path: Path, text: str) -> None:
    """Writes the file, its folder too; a reader sees the old text or the new, never a part. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
