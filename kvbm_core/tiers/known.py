"""What a store has said of names, and for how long that is believed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome

NameT = TypeVar("NameT", bound=Hashable)

ABSENT = frozenset({Outcome.MISS, Outcome.CORRUPT, Outcome.INCOMPATIBLE})
"""Answers that nothing of use is there. Any other one but OK tells nothing."""


@dataclass(frozen=True, slots=True)
class KnownOptions:
    """``present_s``, ``absent_s``: how long an answer is believed. ``trouble_s``: how long a name is not
    looked for again after a look-up without an answer. ``kept_s``: how long what is there is not stored
    again, unless it is missed. ``max_known``: so many names are remembered, those of the newest answers.
    """

    present_s: float = 60.0
    absent_s: float = 10.0
    trouble_s: float = 1.0
    kept_s: float = 4 * 3600.0
    max_known: int = 1_000_000


class _Answer(NamedTuple):
    """``until_s``: how long ``is_present`` is believed. ``kept_until_s``: how long it is not stored again."""

    is_present: bool
    until_s: float
    kept_until_s: float = float("-inf")


class Known(Generic[NameT]):
    """The newest answer about each name. One thread at a time."""

    def __init__(self, clock: Clock, options: KnownOptions) -> None:
        self._clock = clock
        self._options = options
        self._answers: dict[NameT, _Answer] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, name: NameT) -> bool:
        return name in self._answers

    def is_present(self, name: NameT) -> bool | None:
        """Whether it is there; None if nobody knows, or nobody knows any more."""
        known = self._answers.get(name)
        return None if known is None or known.until_s <= self._clock.now_s() else known.is_present

    def is_kept(self, name: NameT) -> bool:
        """Whether it has been there, and there is no need to store it again."""
        known = self._answers.get(name)
        return known is not None and known.kept_until_s > self._clock.now_s()

    def learn(self, outcomes: Mapping[NameT, Outcome]) -> None:
        """How look-ups, fetches and stores of these names ended."""
        now_s, options = self._clock.now_s(), self._options
        for name, outcome in outcomes.items():
            old = self._answers.pop(name, None)  # the newest answers are at the end
            if outcome is Outcome.OK:
                answer = _Answer(True, now_s + options.present_s, now_s + options.kept_s)
            elif outcome in ABSENT:
                answer = _Answer(False, now_s + options.absent_s)
            else:
                kept_until_s = float("-inf") if old is None else old.kept_until_s
                answer = _Answer(False, now_s + options.trouble_s, kept_until_s)
            self._answers[name] = answer
        while len(self._answers) > options.max_known:
            del self._answers[next(iter(self._answers))]

    def doubt(self, names: Iterable[NameT]) -> None:
        """Nobody knows whether these are still there, but for those seen just now."""
        for name in names:
            if self.is_present(name) is None:
                self._answers.pop(name, None)

    def clear(self) -> None:
        """Forgets everything."""
        self._answers.clear()
