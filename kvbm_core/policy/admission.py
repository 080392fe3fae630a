"""Which blocks a tier takes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvbm_core.types import BlockKey


class AdmissionPolicy(Protocol):
    """Decides whether blocks are worth their place, and the write. One thread only; never blocks."""

    def admit(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of ``keys`` that are to be stored; the others may be offered again."""

    def hit(self, keys: Sequence[BlockKey]) -> None:
        """``keys`` were found in this tier or in one above it."""


class AdmitAll:
    """AdmissionPolicy: everything comes in."""

    def admit(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """All."""
        return list(keys)

    def hit(self, keys: Sequence[BlockKey]) -> None:
        """Makes no difference."""
