"""Whose the blocks of one tier are, and how many of them somebody may have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvbm_core.policy.recency import Slots

NOBODY = 0
"""The tenant of blocks of which nobody knows whose they are; it has no quota."""

Tenants = int | Sequence[int]
"""Whose some keys are: one tenant for all of them, or one for each."""


def tenants_of(tenants: Tenants, keys: Sequence[object], wanted: Sequence[object]) -> Tenants:
    """Of ``tenants``, who have ``keys``, those of ``wanted``, which are in the same order."""
    if isinstance(tenants, int) or len(wanted) == len(keys):
        return tenants
    of = dict(zip(keys, tenants, strict=True))
    return [of[key] for key in wanted]


@dataclass(eq=False)
class Quota:
    """``slots``: with blocks that can be matched, the least recently used first. ``num_pending``: on their
    way.
    """

    limit_blocks: int
    slots: OrderedDict[int, None] = field(default_factory=OrderedDict)
    num_pending: int = 0

    @property
    def used_blocks(self) -> int:
        """In slots, and on their way."""
        return len(self.slots) + self.num_pending


class TenantBooks:
    """A number per slot, always; and for tenants with a quota which slots they have, in the order of use.

    A slot that is free keeps the number of who had it last, or has that of the first tenant. Without quotas a
    batch of blocks costs one assignment, and nothing while all are of one tenant. One thread only.
    """

    def __init__(self) -> None:
        self._of = np.zeros(0, np.int32)
        self._all_of: int | None = NOBODY
        """The number of each slot, while they have the same; None from then on."""
        self._is_new = True
        self._quotas: dict[int, Quota] = {}

    @property
    def has_quotas(self) -> bool:
        """Whether anything beside ``note`` has to be called."""
        return bool(self._quotas)

    def grow(self, capacity_slots: int) -> None:
        """Slots below ``capacity_slots`` may be given from now on."""
        more = capacity_slots - len(self._of)
        if more > 0:
            self._of = np.concatenate([self._of, np.full(more, self._all_of or NOBODY, np.int32)])

    def note(self, slots: Slots, tenants: Tenants) -> None:
        """Their slots, of which ``reserved`` or ``found`` tells the rest."""
        if not len(slots):
            return
        if self._is_new and isinstance(tenants, int):
            self._of[:], self._all_of = tenants, tenants
        elif tenants != self._all_of:
            self._of[slots], self._all_of = tenants, None
        self._is_new = False

    def slots_of(self, tenants: Collection[int]) -> Slots:
        """Those that they had last. Cost grows with the slots."""
        return np.flatnonzero(np.isin(self._of, list(tenants))).astype(np.int32)

    def numbers(self, slots: Slots) -> list[int]:
        """Whose they are."""
        numbers: list[int] = self._of[slots].tolist()
        return numbers

    # ---------------------------------------------------------------- quotas

    def quota_of(self, tenant: int) -> Quota | None:
        """What it may have."""
        return self._quotas.get(tenant)

    def set_quota(self, tenants: Iterable[int], quota: Quota | None, resident: Slots, pending: Slots) -> None:
        """They share ``quota`` from now on, new or joined by others; None: they have none any more.
        ``resident`` (the least recently used first) and ``pending``: all slots in use that are theirs.
        """
        if quota is None:
            self.leave(tenants)
        else:
            self._quotas.update(dict.fromkeys(tenants, quota))
            quota.slots.update(dict.fromkeys(resident.tolist()))
            quota.num_pending += len(pending)

    def share(self, tenant: int, quota: Quota) -> None:
        """It has no blocks, and shares ``quota`` from now on."""
        self._quotas[tenant] = quota

    def leave(self, tenants: Iterable[int]) -> None:
        """They have no quota any more."""
        for tenant in tenants:
            self._quotas.pop(tenant, None)

    def quotas(self) -> list[tuple[list[int], Quota]]:
        """All of them, and who shares each."""
        shared: dict[Quota, list[int]] = {}
        for tenant, quota in self._quotas.items():
            shared.setdefault(quota, []).append(tenant)
        return [(tenants, quota) for quota, tenants in shared.items()]

    def reserved(self, slots: Slots) -> None:
        """They are being written."""
        for _, quota in self._limited(slots):
            quota.num_pending += 1

    def aborted(self, slots: Slots) -> None:
        """They are not, after all."""
        for _, quota in self._limited(slots):
            quota.num_pending -= 1

    def committed(self, slots: Slots) -> None:
        """They can be matched; the head first, which is the last to go."""
        for slot, quota in self._limited(slots[::-1]):
            quota.num_pending -= 1
            quota.slots[slot] = None

    def used(self, slots: Slots) -> None:
        """They were used again."""
        for slot, quota in self._limited(slots[::-1]):
            if slot in quota.slots:
                quota.slots.move_to_end(slot)

    def demoted(self, slots: Slots) -> None:
        """They go before the others."""
        for slot, quota in self._limited(slots):
            if slot in quota.slots:
                quota.slots.move_to_end(slot, last=False)

    def left(self, slots: Slots) -> None:
        """Their blocks are gone."""
        for slot, quota in self._limited(slots):
            quota.slots.pop(slot, None)

    def found(self, slots: Slots, tenant: int) -> None:
        """It has become known whose the blocks in these slots are, if that was not known."""
        unknown = slots[self._of[slots] == NOBODY]
        self.note(unknown, tenant)
        quota = self._quotas.get(tenant)
        if quota is not None:
            quota.slots.update(dict.fromkeys(unknown[::-1].tolist()))

    def _limited(self, slots: Slots) -> list[tuple[int, Quota]]:
        quota_of = self._quotas.get
        pairs = zip(slots.tolist(), self._of[slots].tolist(), strict=True)
        return [(slot, quota) for slot, tenant in pairs if (quota := quota_of(tenant)) is not None]
