"""Where the commands print."""

from typing import NoReturn

from rich.console import Console


class Terminal(Console):
    """One whose reader may stop early, as `| head` does: the command says so itself."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError
