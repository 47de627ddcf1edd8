"""Switches among the environment's variables."""

import os

OFF = ("0", "false", "off", "no")


def is_on(name: str, by_default: bool = False) -> bool:
    """Whether the variable says so; `by_default` where it is empty or not set."""
    said = os.environ.get(name, "").strip().lower()
    return said not in OFF if said else by_default
