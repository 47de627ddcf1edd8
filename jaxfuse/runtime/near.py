"""What was meant by a word that is not known."""

import difflib
from collections.abc import Iterable
from pathlib import Path


def meant(word: str, known: Iterable[str]) -> str:
    """"; did you mean X?", or "" where nothing known is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def files(name: str) -> str:
    """The same for a file, among those of its folder."""
    path = Path(name)
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent}"
    beside = {file.name: str(path.parent / file.name) for file in path.parent.iterdir() if file.is_file()}
    near = difflib.get_close_matches(path.name, list(beside), n=1)
    return f"; did you mean {beside[near[0]]}?" if near else ""
