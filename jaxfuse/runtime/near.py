"""What was meant by a word, a file or a folder that is not there."""

import difflib
from collections.abc import Iterable
from pathlib import Path


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelled most like this one; None where none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def meant(word: str, known: Iterable[str]) -> str:
    """"; did you mean X?", for the end of a message, or "" where nothing known is near."""
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


def no_folder(path: Path) -> str:
    """What is wrong where a file is to be written and its folder is not there, and what to do; "" where it is."""
    folder = path.parent
    if folder.is_dir():
        return ""
    beside = {each.name: each for each in folder.parent.iterdir() if each.is_dir()} if folder.parent.is_dir() else {}
    near = nearest(folder.name, beside)
    remedy = f"did you mean {beside[near]}?" if near else "make it first, or give another path"
    return f"there is no folder {folder} for {path.name}; {remedy}"
