"""The command lines' parser."""

import argparse
import re
from typing import NoReturn

from jaxfuse.runtime import near


class Parser(argparse.ArgumentParser):
    """Of a misspelt command, option or choice it says which was meant."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']+)'|unrecognized arguments: (\S+)", message)
        known = [name for name in self._known() if wrong and name not in wrong.groups()]
        super().error(message + (near.meant(wrong[1] or wrong[2], known) if wrong else ""))

    def _known(self) -> list[str]:
        """Every choice, the commands among them, and every option, of the commands too."""
        found = [*self._option_string_actions]
        for action in self._actions:
            found += action.choices or []
            for command in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
                found += command._known()
        return found
