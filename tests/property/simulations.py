"""Simulations from one seed after the other, until together they have done what they are there for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random
from typing import TypeVar

SimT = TypeVar("SimT")

MOST = 5
"""Times as many simulations as asked for, if what is rare has not happened in these."""


def play(
    first: int,
    count: int,
    life: Callable[[Random], SimT],
    seen: Callable[[SimT], Mapping[str, float]],
    least: Mapping[str, float],
) -> Counter[str]:
    """Plays lives ``first``, ``first + 1``, ...: ``count`` of them, and more while the sums of what was
    ``seen`` are below ``least``. The sums.
    """
    sums: Counter[str] = Counter()
    for number in range(first, first + MOST * count):
        if number >= first + count and not _lacking(sums, least):
            break
        try:
            sums.update(seen(life(Random(number))))
        except Exception as error:
            raise AssertionError(f"simulation {number}: {error}") from error
    assert not _lacking(sums, least), f"the simulations hardly ever did this: {_lacking(sums, least)}"
    return sums


def _lacking(sums: Counter[str], least: Mapping[str, float]) -> dict[str, float]:
    return {what: sums[what] for what, enough in least.items() if sums[what] < enough}
