"""Eviction policies of other people: one that fails is not asked any more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from reprlib import repr as shortened
from typing import Any

from kvbm_core.config.installed import BROKEN, said_by
from kvbm_core.policy.base import EvictionPolicy, Spare, TakesRuns
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.policy.recency import Slots, as_slots

log = logging.getLogger("kvbm")


def _both(name: str) -> Callable[..., None]:
    def ask(self: GuardedPolicy, *arguments: object) -> None:
        getattr(LruPolicy, name)(self, *arguments)
        self._ask(name, *arguments)

    return ask


class GuardedPolicy(LruPolicy):
    """EvictionPolicy: somebody else's, and books of our own, which say what is there, and what is pinned.

    Where it raises, or answers nonsense, one line says so, and it is not asked any more: the least recently
    used go. ``whose``: what the line calls it. TakesRuns if it is.
    """

    def __init__(self, policy: EvictionPolicy, whose: str) -> None:
        super().__init__()
        self.policy: EvictionPolicy | None = policy
        self._whose = whose
        if isinstance(policy, TakesRuns):
            self.tell = partial(self._ask, "tell")

    grow, check_integrity = _both("grow"), _both("check_integrity")
    insert, touch, demote, remove = _both("insert"), _both("touch"), _both("demote"), _both("remove")
    pin, unpin = _both("pin"), _both("unpin")

    def evict(self, count_blocks: int, spare: Spare | None = None) -> Slots | None:
        """See EvictionPolicy."""
        self._ask("evictable_blocks", wanted=self.evictable_blocks)
        chosen = self._ask("evict", count_blocks, spare)
        with suppress(Exception):  # whatever comes of asking for what may be no slots
            slots = as_slots(list(chosen))
            is_spared = spare is not None and spare(slots).any()
            if len(slots) == count_blocks and slots.min(initial=0) >= 0 and not is_spared:
                super().remove(slots)
                return slots
        victims = super().evict(count_blocks, spare)
        if chosen is not None or victims is not None:
            wanted = f"{count_blocks} slots that are there and not pinned"
            self._give_up("evict", f"answered {shortened(chosen)} where {wanted} were expected")
        return victims

    def _ask(self, name: str, *arguments: object, wanted: object = None) -> Any:
        """What the policy answers; None if it is not asked any more."""
        if self.policy is not None:
            try:
                found = getattr(self.policy, name)
                answer = found(*arguments) if callable(found) else found
                if wanted is None or answer == wanted:
                    return answer
                self._give_up(name, f"answered {shortened(answer)} where {wanted} was expected")
            except BROKEN as error:
                log.debug("kvbm: %s", self._whose, exc_info=error)
                self._give_up(name, f"raised {said_by(error)}")
        return None

    def _give_up(self, name: str, why: str) -> None:
        if self.policy is not None:
            self.policy = None
            line = "kvbm: %s: %s %s; it is not asked any more, and the least recently used go; run %s on it"
            log.error(line, self._whose, name, why, "kvbm_core.testing.policy_contract")
