"""What to write for a word or a file that is not there, as the end of a message."""

from collections.abc import Iterable
from pathlib import Path

from jaxfuse.runtime.names import nearest


def meant(word: str, known: Iterable[str]) -> str:
    """"; did you mean X?", or "" where nothing known is near."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""


def files(name: str) -> str:
    """The same for a file, among those of its folder."""
    path = Path(name)
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent}"
    beside = {file.name: file for file in path.parent.iterdir() if file.is_file()}
    near = nearest(path.name, beside)
    return f"; did you mean {beside[near]}?" if near else ""
