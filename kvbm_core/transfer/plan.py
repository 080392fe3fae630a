"""What the leader tells workers to move, and what they answer: plain data, slots and never addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvbm_core.errors import Outcome
from kvbm_core.types import BlockKey, Direction


class GroupMove(NamedTuple):
    """Blocks of one KV cache group: ``device_blocks[i]`` goes to ``slots[i]`` or comes from there."""

    group: int
    device_blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """Blocks between host slots and the disk's: ``keys[i]`` is in ``slots[i]`` and in ``disk_slots[i]``.

    OFFLOAD writes them to the disk, ONBOARD reads them from there. One job, as TransferPlan.
    """

    job_id: int
    direction: Direction
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    disk_slots: tuple[int, ...]

    def check(self, num_slots: int, num_disk_slots: int) -> None:
        """ValueError for numbers out of range, unequal lengths or a target named twice."""
        if not len(self.keys) == len(self.slots) == len(self.disk_slots):
            raise ValueError(
                f"{len(self.keys)} keys, {len(self.slots)} slots and {len(self.disk_slots)} on the disk"
            )
        _check_range("slot", self.slots, num_slots)
        _check_range("disk slot", self.disk_slots, num_disk_slots)
        targets = self.disk_slots if self.direction is Direction.OFFLOAD else self.slots
        if len(set(targets)) != len(targets):
            raise ValueError(f"a target of job {self.job_id} is named twice")


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """One job: everything moves or the job has failed. ``reads``: what has to come up into its slots first.

    ``compares``: an OFFLOAD that writes nothing: it is CORRUPT if slots hold other KV than the device blocks.
    """

    job_id: int
    direction: Direction
    moves: tuple[GroupMove, ...]
    reads: DiskPlan | None = None
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


class FromDisk(NamedTuple):
    """Of a job with reads: bytes that came up from the disk, and how long reading and copying each took; they
    overlap.
    """

    num_bytes: int
    read_s: float
    copy_s: float


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended: ``seconds`` of work after ``queued_s`` of waiting; ``detail`` says why not OK.

    ``num_bytes``: copied from or to the device; of a DiskPlan, written or read. ``is_late``: given up while
    the disk may still write into its slots; they are not to be used until it is released.
    """

    job_id: int
    outcome: Outcome
    num_bytes: int
    seconds: float
    queued_s: float
    detail: str = ""
    is_late: bool = False
    from_disk: FromDisk | None = None
