"""How long calls take, measured in turns."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def in_turns(calls: Sequence[Callable[[], Any]], rounds: int, seconds: float) -> list[float]:
    """Seconds of each in its fastest turn of about `seconds`. Turns of one call lie apart: what disturbs the machine does not meet
    them all."""
    for call in calls:
        jax.block_until_ready(call())  # compiles
    counts = [max(1, round(seconds / _seconds(call, 2))) for call in calls]
    turns = [[_seconds(call, count) for call, count in zip(calls, counts)] for _ in range(rounds)]
    return [min(times) for times in zip(*turns)]


def _seconds(call: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        jax.block_until_ready(call())
    return (time.perf_counter() - start) / count
