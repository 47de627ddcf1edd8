"""Names that are not known: what was meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelled most like this one; None where none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)
