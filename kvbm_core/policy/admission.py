"""Which blocks a tier takes in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvbm_core.types import BlockKey


class Admission(Enum):
    """The answer to a block that wants to come in."""

    ADMIT = "admit"
    REJECT = "reject"
    LATER = "later"


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """What the tier looks like at the moment of the question. Pending blocks are on their way into it."""

    capacity_blocks: int
    free_blocks: int
    pending_blocks: int = 0


class AdmissionPolicy(Protocol):
    """Decides whether a block is worth its place, and the write. One thread only; never blocks."""

    def decide(self, key: BlockKey, size_bytes: int, state: AdmissionState) -> Admission:
        """ADMIT: store it. REJECT: do not. LATER: not now, but it may be offered again."""

    def hit(self, keys: Sequence[BlockKey]) -> None:
        """``keys`` were found in this tier or in one above it."""


class AdmitAll:
    """AdmissionPolicy: everything comes in."""

    def decide(self, key: BlockKey, size_bytes: int, state: AdmissionState) -> Admission:
        """ADMIT."""
        return Admission.ADMIT

    def hit(self, keys: Sequence[BlockKey]) -> None:
        """Makes no difference."""
