"""What the leader tells workers to move, and what they answer: plain data, slots and never addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import msgspec

from kvbm_core.errors import Outcome
from kvbm_core.storage.extents import MAX_EXTENT_BLOCKS
from kvbm_core.types import BlockKey, Direction


class GroupMove(NamedTuple):
    """Blocks of one KV cache group: ``device_blocks[i]`` goes to ``slots[i]`` or comes from there."""

    group: int
    device_blocks: tuple[int, ...]
    slots: tuple[int, ...]


ANSWERS = frozenset({Outcome.OK, Outcome.MISS, Outcome.CORRUPT})
"""What one that works may say of a block."""


class OrderKind(str, Enum):
    """What a lower tier is to do."""

    STORE = "store"
    """Take blocks from host slots."""
    FETCH = "fetch"
    """Bring blocks into host slots."""
    FIND = "find"
    """Say which blocks are there; no byte moves."""
    FORGET = "forget"
    """Find nothing again of what is there now, also after a restart. Not answered."""
    ERASE = "erase"
    """As FORGET, of what is in these places. Not answered."""

    @property
    def is_answered(self) -> bool:
        """Whether an order of this kind has a result."""
        return self not in (OrderKind.FORGET, OrderKind.ERASE)

    def __str__(self) -> str:
        return self.value


NO_SLOT = -1
"""In place of a host slot: what comes for this key, which lies among others that are wanted, is not kept."""


FIRST_DIRECT_SLOT = 1 << 40
"""No host slots from here on: the block goes straight from place ``slot - FIRST_DIRECT_SLOT`` of a lower tier
to the device, and has this number in the books.
"""


class ExtentPart(NamedTuple):
    """The last blocks of an extent (storage/extents.py) of ``num_blocks``, without its first ``skipped``."""

    num_blocks: int
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class TierOrder:
    """Blocks between host slots and the lower tier called ``tier``: ``keys[i]`` is in host slot ``slots[i]``.

    ``places[i]``: its slot in a tier that has numbered slots; empty for a tier by key. FIND and ERASE have
    no slots.
    ``extents``: of which extents ``keys`` are, one after the other; empty: each block is stored alone. STORE
    has them whole, FIND has the last key of each; FETCH may have NO_SLOT.
    An order is a job of its own, or a part of a TransferPlan with the plan's number. ``source``: which peer
    is asked, in a tier that has several.
    """

    job_id: int
    tier: str
    kind: OrderKind
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    extents: tuple[ExtentPart, ...] = ()
    source: str = ""

    def check(self, num_slots: int, num_places: int | None = None) -> None:
        """ValueError for numbers out of range, unequal lengths or a target named twice. ``num_places`` None:
        of a tier by key.
        """
        num_keys = len(self.keys)
        if len(self.slots) != (0 if self.kind in (OrderKind.FIND, OrderKind.ERASE) else num_keys):
            raise ValueError(f"{num_keys} keys and {len(self.slots)} slots")
        if len(self.places) != (0 if num_places is None else num_keys):
            raise ValueError(f"{num_keys} keys and {len(self.places)} places in tier {self.tier}")
        slots: Sequence[int] = self.slots
        if self.extents:
            self._check_extents(num_places)
            if self.kind is OrderKind.FETCH:
                slots = [slot for slot in slots if slot != NO_SLOT]
        _check_range("slot", slots, num_slots)
        if num_places is not None:
            _check_range(f"place in tier {self.tier}", self.places, num_places)
        targets: Sequence[object] = slots
        if self.kind is OrderKind.STORE:
            targets = self.keys if num_places is None else self.places
        if len(set(targets)) != len(targets):
            raise ValueError(f"a target of job {self.job_id} is named twice")

    @property
    def is_direct(self) -> bool:
        """Whether its blocks go straight to the device."""
        return bool(self.slots) and self.slots[0] >= FIRST_DIRECT_SLOT

    def check_direct(self, num_places: int) -> None:
        """As ``check``, of an order whose blocks go straight to the device."""
        expected = tuple(FIRST_DIRECT_SLOT + place for place in self.places)
        if self.kind is not OrderKind.FETCH or self.slots != expected or len(self.keys) != len(expected):
            raise ValueError(f"{len(self.keys)} keys, and slots that are not those of their places")
        _check_range(f"place in tier {self.tier}", self.places, num_places)

    def _check_extents(self, num_places: int | None) -> None:
        if num_places is not None:
            raise ValueError(f"extents in tier {self.tier}, which has numbered slots")
        for num_blocks, skipped in self.extents:
            is_power = 0 < num_blocks <= MAX_EXTENT_BLOCKS and not num_blocks & (num_blocks - 1)
            if not is_power or not 0 <= skipped < num_blocks:
                raise ValueError(f"an extent of {num_blocks} blocks without its first {skipped}")
            if (self.kind is OrderKind.STORE and skipped) or (
                self.kind is OrderKind.FIND and skipped != num_blocks - 1
            ):
                raise ValueError(f"an extent without its first {skipped} blocks to {self.kind}")
        num_keys = sum(part.num_blocks - part.skipped for part in self.extents)
        if num_keys != len(self.keys):
            raise ValueError(f"{len(self.keys)} keys in extents of {num_keys}")


BLOCK_FILE, STORE = "block file", "store"
"""Kinds of lower tier that come with kvbm, see TierPlace."""


class TierPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lower tier on each rank: where it is, how many slots it has there (0: none that are numbered), and of
    which ``kind`` it is, which says how a rank opens it.
    """

    name: str
    location: str
    """A folder for block files, or the URL of a store."""
    num_slots: int = 0
    claim: str = ""
    """What the leader has written into the folder: a rank that does not find it there is on another machine.
    """
    model: str = ""
    """For people; what a store that bounds itself is bounded by."""
    head_shards: str = ""
    """What all ranks say that their blocks mean as head shards, which a tier by key keeps; empty: it keeps
    each rank's blocks as they are.
    """
    kind: str = STORE


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """One job between device blocks and host slots. ``reads``: what lower tiers have to bring into its slots
    first.

    ``compares``: an OFFLOAD that writes nothing: it is CORRUPT if slots hold other KV than the device blocks.
    """

    job_id: int
    direction: Direction
    moves: tuple[GroupMove, ...]
    reads: tuple[TierOrder, ...] = ()
    compares: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks to move, all groups together."""
        return sum(len(move.slots) for move in self.moves)

    def check(self, num_device_blocks: int, num_slots: int) -> None:
        """ValueError for numbers out of range, unequal lengths or a target named twice.

        Slots are common to all groups; device blocks are numbered per group.
        """
        slots: list[int] = []
        device_blocks: dict[int, list[int]] = {}
        for move in self.moves:
            if len(move.device_blocks) != len(move.slots):
                raise ValueError(f"{len(move.device_blocks)} device blocks for {len(move.slots)} slots")
            slots.extend(move.slots)
            device_blocks.setdefault(move.group, []).extend(move.device_blocks)
        _check_range("slot", slots, num_slots)
        for blocks in device_blocks.values():
            _check_range("device block", blocks, num_device_blocks)
        if self.compares:
            return  # it writes nothing
        targets = [slots] if self.direction is Direction.OFFLOAD else list(device_blocks.values())
        for numbers in targets:
            if len(set(numbers)) != len(numbers):
                raise ValueError(f"a target of job {self.job_id} is named twice")


def _check_range(what: str, numbers: Sequence[int], limit: int) -> None:
    if numbers and (min(numbers) < 0 or max(numbers) >= limit):
        raise ValueError(f"{what} {min(numbers)} or {max(numbers)} is not in 0..{limit - 1}")


class Fetched(NamedTuple):
    """What one lower tier brought up for a TransferPlan: bytes, and how long reading took. ``is_direct``: to
    the device, so that the bytes are among those of the plan's JobResult; else to the host.
    """

    tier: str
    num_bytes: int
    seconds: float
    is_direct: bool = False


class JobResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a job ended on one rank: ``seconds`` of work after ``queued_s`` of waiting; ``detail`` says why not
    OK.

    ``failed``: the blocks that failed, by host slot (of a FIND: by the key's place in the order), where
    others of the job did not; ``outcome`` is then that of the first of them. Empty: ``outcome`` is of all.
    ``num_bytes``: copied from or to the device; of a TierOrder, written or read. ``is_late``: given up while
    somebody may still touch its slots; a second result, which counts, comes when nobody does any more.
    ``fetched`` and ``copy_s`` are of a plan with reads, whose reads and copies overlap.
    """

    job_id: int
    outcome: Outcome
    num_bytes: int
    seconds: float
    queued_s: float
    detail: str = ""
    is_late: bool = False
    failed: tuple[tuple[int, Outcome], ...] = ()
    fetched: tuple[Fetched, ...] = ()
    copy_s: float = 0.0

    def failures(self, slots: Sequence[int]) -> Mapping[int, Outcome]:
        """Those of ``slots`` that failed, and how."""
        if self.outcome is Outcome.OK:
            return {}
        return dict(self.failed) if self.failed else dict.fromkeys(slots, self.outcome)

    def verdict(self, slots: Sequence[int]) -> Outcome:
        """What the end of a job on ``slots`` says of whoever was asked: OK if there was an answer for some of
        them, as a single block may fail anywhere; else the trouble.
        """
        troubles = [outcome for outcome in self.failures(slots).values() if outcome not in ANSWERS]
        return troubles[0] if troubles and len(troubles) == len(set(slots)) else Outcome.OK


def rejected(job_id: int, detail: str, outcome: Outcome = Outcome.REJECTED) -> JobResult:
    """Of a job that was not begun."""
    return JobResult(job_id, outcome, 0, 0.0, 0.0, detail)
