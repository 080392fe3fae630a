"""A row of the tables."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """``seen``: what went wrong before the mend. ``old`` stands exactly once in ``path``; with ``new`` in its
    place ``test`` (a node id; several, if they are divided by blanks) fails.
    """

    seen: str
    path: str
    old: str
    new: str
    test: str

    @property
    def tests(self) -> list[str]:
        """Node ids."""
        return self.test.split()

    def applied_to(self, text: str) -> str:
        """The file's text with the mend undone. ValueError unless ``old`` stands there once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.path}: {self.old!r} stands there {text.count(self.old)} times")
        return text.replace(self.old, self.new)


class NotShown(NamedTuple):
    """``what`` has no mutant; ``why``, and what stands in for it."""

    what: str
    why: str
