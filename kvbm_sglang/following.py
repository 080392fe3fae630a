"""The tiers of a rank whose blocks another rank stores: what it has, this one gets when both load it."""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence

from kvbm_core.errors import Outcome
from kvbm_core.runtime.local import Claim, OnEnd
from kvbm_core.runtime.sharing import Sharing, onboard_plan
from kvbm_core.tiers.chain import Held
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.executors.broadcast_group import Group
from kvbm_core.transfer.plan import JobResult
from kvbm_core.types import BlockKey, Tier


class FollowingTiers:
    """As LocalTiers, for an engine that takes the shortest hit of all ranks: this one says that it has all,
    as long as it can get anything. Safe to call from any thread; nothing waits.
    """

    is_asked = False

    def __init__(self, memory: DeviceMemory, group: Group) -> None:
        self._lock = threading.Lock()
        self._turns: dict[Claim, int] = {}
        self._ends: dict[int, tuple[Claim, OnEnd]] = {}
        self._sharing = Sharing(memory, group, self._ended)

    def contains(self, key: BlockKey) -> bool:
        """Whether anything can be had: which of it, the first rank says."""
        return not self._sharing.is_broken

    def match(self, owner: str, keys: Sequence[BlockKey]) -> int:
        """All of them."""
        return len(keys)

    def claim(self, owner: str, keys: Sequence[BlockKey]) -> Claim | None:
        """See LocalTiers; nothing is held here."""
        return Claim(Held(tuple(keys), ()), float("inf"))

    def drop(self, claim: Claim) -> None:
        """See LocalTiers."""

    def load(
        self,
        claim: Claim,
        device_blocks: Sequence[int],
        on_end: OnEnd,
        *,
        turn: int | None = None,
        is_lasting: bool = True,
    ) -> None:
        """See LocalTiers."""
        if turn is None:
            raise ValueError("a load that ranks share has a turn")
        with self._lock:
            self._turns[claim] = turn
            self._ends[turn] = claim, on_end
        self._sharing.executor.submit(onboard_plan(turn, tuple(device_blocks)))

    def skip(self, turn: int | None, num_blocks: int) -> None:
        """See LocalTiers; what comes is dropped."""
        if turn is not None:
            self._sharing.skip(turn, num_blocks)

    def cancel(self, claim: Claim) -> None:
        """See LocalTiers."""
        with self._lock:
            turn = self._turns.get(claim)
        if turn is not None:
            self._sharing.executor.cancel(turn)

    def store(
        self,
        keys: Sequence[BlockKey],
        device_blocks: Sequence[int],
        on_end: OnEnd,
        *,
        is_lasting: bool = True,
    ) -> None:
        """The first rank does it."""
        on_end(Outcome.OK)

    @property
    def tiers(self) -> frozenset[Tier]:
        """None: the first rank has them."""
        return frozenset()

    def reset(self, tiers: Container[Tier], timeout_s: float) -> bool:
        """The first rank does it."""
        return True

    def disown(self) -> None:
        """Nothing is read here."""

    def wait_stored(self, timeout_s: float) -> bool:
        """Nothing is on its way."""
        return True

    def close(self) -> None:
        """Ends loads; idempotent."""
        self._sharing.executor.close()

    def _ended(self, result: JobResult) -> None:
        with self._lock:
            claim, tell = self._ends.pop(result.job_id)
            del self._turns[claim]
        tell(result.outcome)
