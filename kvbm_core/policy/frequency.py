"""KVBM's offload filter: a block is worth a write to disk once it has been used again."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_core.clock import Clock
from kvbm_core.types import BlockKey

ADMITTED_FROM = 2
DECAY_S = 600.0
MAX_ENTRIES = 1_000_000
MAX_COUNT = 1 << 20


class FrequencyFilter:
    """AdmissionPolicy: admits blocks whose count is at least ADMITTED_FROM.

    A block's count is 1 when it is offered first, doubles with each hit, and loses 1 with each DECAY_S that
    goes by; at 0 it is forgotten. A further offer is a use as well: the block had left the tier above and was
    computed again. At most ``max_entries`` are remembered: the one longest without an offer or a hit goes
    first. Numbers are those of the KVBM guides, whose filter counts hits, and whose code offers; a trace says
    to count both (docs/benchmarks.md, "trace").
    """

    def __init__(self, clock: Clock, *, max_entries: int = MAX_ENTRIES, decay_s: float = DECAY_S) -> None:
        self._clock = clock
        self._max_entries = max_entries
        self._decay_s = decay_s
        # (count, decay step in which it was that), the one longest without an offer or a hit first. Decay is
        # worked out when it is asked for: a sweep over a million entries would stop the engine.
        self._entries: dict[BlockKey, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def admit(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those that have been hit, or were offered before."""
        step = self._step()
        admitted = []
        for key in keys:
            count = self._count(key, step)
            count = min(MAX_COUNT, 2 * count) if count > 0 else 1
            self._set(key, count, step)
            if count >= ADMITTED_FROM:
                admitted.append(key)
        return admitted

    def hit(self, keys: Sequence[BlockKey]) -> None:
        """See AdmissionPolicy. A block that was never offered, or is forgotten, counts as offered."""
        step = self._step()
        for key in keys:
            self._set(key, min(MAX_COUNT, 2 * max(1, self._count(key, step))), step)

    def _step(self) -> int:
        return int(self._clock.now_s() // self._decay_s)

    def _count(self, key: BlockKey, step: int) -> int:
        entry = self._entries.get(key)
        return 0 if entry is None else entry[0] - (step - entry[1])

    def _set(self, key: BlockKey, count: int, step: int) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (count, step)
        if len(self._entries) > self._max_entries:
            del self._entries[next(iter(self._entries))]
