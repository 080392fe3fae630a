"""Taking turns, so that whatever else the machine does meets everybody."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Item = TypeVar("Item")


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds that ``work`` took, and what it returned."""
    started_s = time.perf_counter()
    result = work()
    return time.perf_counter() - started_s, result


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """``items``, begun with another one each round."""
    start = number % len(items)
    return [*items[start:], *items[:start]]
