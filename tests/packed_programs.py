"""What frozen programs that are made have, by the name of a field of theirs."""

import pytest

from jaxfuse.frozen.packing import Packed


def counts(monkeypatch: pytest.MonkeyPatch, field: str) -> list[int]:
    """How many each program has that is made from now on."""
    found, init = [], Packed.__init__

    def counting(self, *args, **kwargs):
        init(self, *args, **kwargs)
        found.append(len(getattr(self, field)))

    monkeypatch.setattr(Packed, "__init__", counting)
    return found
