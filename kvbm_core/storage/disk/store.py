"""The disk as a BlockStore: blocks by key, for whoever has no leader (a library, an engine's storage back
end).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from kvbm_core.blocks.lease import Lease
from kvbm_core.blocks.slot_tier import BlockTier, Reservation
from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.policy.named import make_policy
from kvbm_core.storage.base import Memory, check_blocks, check_targets
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.block_io import BlockIo
from kvbm_core.storage.disk.recovery import Found, Recovery, batches_of
from kvbm_core.storage.disk.slot_log import SlotLog, withdraw_log
from kvbm_core.storage.late import LATE, ranges_of
from kvbm_core.types import BlockKey, Tier

STOP_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 1.0
"""At the end a disk has so long for what is under way, and each direction so long after that."""
OWNER = "disk store"


class DiskStore:
    """BlockStore in one block file. Safe to call from any thread; a read does not wait for a write.

    What an earlier process left in the file is found again in the background (``wait_recovered``). Memory
    that is whole sectors on a sector's boundary, in each of its pieces, is read and written without a copy. A
    read that is TIMED_OUT may still be written into the caller's memory of that kind later: ``holds`` says
    so, and the memory is kept until then. For callers who cannot wait for that, ``reads_straight`` False lets
    all reads pass through memory of the store's own. ``shares``: other processes on this machine may read
    along, each with a DiskReader on the same path. ``books``, without a block, are those of its slots; who
    listens to them hears what can be got, from any thread.

    DiskError, one line, if the file cannot be had, or the way of I/O that ``options`` names.
    """

    def __init__(
        self,
        path: Path,
        geometry: Geometry,
        options: FileOptions | None = None,
        *,
        clock: Clock | None = None,
        reads_straight: bool = True,
        shares: bool = False,
        books: BlockTier | None = None,
    ) -> None:
        self._clock = clock = clock or SystemClock()
        self._file = BlockFile(path, geometry, options)
        self._log = self._begin_log(shares)
        self._books = threading.Lock()
        self._tier = books or BlockTier(Tier.DISK, make_policy(), clock)
        self._writer, self._reader = self._open_both_ways(reads_straight)
        self._closed = False
        self._was_cleared = False
        self._late: list[Reservation] = []  # of writes that were given up and may still land in their slots
        self._recovery = Recovery(self._file, self._take_in, clock)

    @property
    def resident_blocks(self) -> int:
        """Blocks that can be got."""
        with self._books:
            return self._tier.resident_blocks

    @property
    def evicted_blocks_total(self) -> int:
        """Blocks that made room for others."""
        return self._tier.evicted_blocks_total

    def wait_recovered(self, timeout_s: float) -> bool:
        """Waits until all of the file has been looked at; False if time ran out."""
        return self._recovery.wait(timeout_s)

    def holds(self, target: Memory) -> bool:
        """Whether a late read may still write into it."""
        with self._reader.lock:
            self._reader.record_io.reap()
        return LATE.holds(ranges_of(target))

    def contains_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore; no I/O."""
        with self._books:
            if self._closed:
                return [Outcome.REJECTED] * len(keys)
            return [Outcome.OK if self._tier.contains(key) else Outcome.MISS for key in keys]

    def put_many(
        self, keys: Sequence[BlockKey], payloads: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore. Makes room by evicting; a block that is here already is not written again."""
        self._check(keys, payloads)
        deadline_at_s = self._clock.now_s() + deadline_s
        if not self._writer.lock.acquire(timeout=max(0.0, deadline_s)):
            return [Outcome.BUSY] * len(keys)
        try:
            with self._books:
                if self._closed:
                    return [Outcome.REJECTED] * len(keys)
                self._take_back_slots()
                given = frozenset(keys)
                reserved = self._tier.reserve(
                    keys, lambda new_keys: given
                )  # none makes room for another of its call
            payload_of = dict(zip(keys, payloads, strict=True))
            blocks = list(zip(reserved.keys, reserved.slots, strict=True))
            left_s = deadline_at_s - self._clock.now_s()
            outcomes = self._writer.transfer(
                blocks, [payload_of[key] for key in reserved.keys], deadline_s=left_s
            )
            with self._books:
                self._settle(reserved, outcomes)
                outcome_of = dict(zip(reserved.keys, outcomes, strict=True))
                self._tier.touch([key for key in keys if key not in outcome_of])
                answers = [outcome_of.get(key) or self._present(key) for key in keys]
            if self._log is not None:
                written = zip(blocks, outcomes, strict=True)
                self._log.append([block for block, outcome in written if outcome is Outcome.OK])
            return answers
        finally:
            self._writer.lock.release()

    def get_many(
        self, keys: Sequence[BlockKey], targets: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore. A block that does not verify is forgotten."""
        self._check(keys, targets)
        check_targets(targets)
        deadline_at_s = self._clock.now_s() + deadline_s
        if not self._reader.lock.acquire(timeout=max(0.0, deadline_s)):
            return [Outcome.BUSY] * len(keys)
        try:
            with self._books:
                if self._closed:
                    return [Outcome.REJECTED] * len(keys)
                here = [i for i, key in enumerate(keys) if self._tier.contains(key)]
                left_s = deadline_at_s - self._clock.now_s()
                lease = self._lease(list(dict.fromkeys(keys[i] for i in here)), left_s)
            outcomes = [Outcome.MISS] * len(keys)
            if lease is not None:
                slot_of = dict(zip(lease.keys, lease.slots, strict=True))
                blocks = [(keys[i], slot_of[keys[i]]) for i in here]
                read = self._reader.transfer(blocks, [targets[i] for i in here], deadline_s=left_s)
                for i, outcome in zip(here, read, strict=True):
                    outcomes[i] = outcome
                with self._books:
                    self._tier.release(lease)
                    self._tier.touch(lease.keys)
                    bad = (Outcome.MISS, Outcome.CORRUPT, Outcome.INCOMPATIBLE)
                    self._tier.forget([keys[i] for i in here if outcomes[i] in bad])
            return outcomes
        finally:
            self._reader.lock.release()

    def remove_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore. No I/O: a record stays until its slot is used again; a restart finds it (but see
        clear).
        """
        outcomes = self.contains_many(keys, deadline_s=deadline_s)
        with self._books:
            self._tier.forget(
                [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK]
            )
        return outcomes

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """These are in use, the first ones first, though nobody reads them."""
        with self._books:
            self._tier.touch(keys)

    def clear(self) -> None:
        """Forgets everything, for good. OSError if the disk does not take that."""
        with self._writer.lock, self._books:
            if self._log is not None:
                withdraw_log(self._file.path)
            self._was_cleared = True
            self._tier.reset()
            try:
                self._file.begin_new_life()
            finally:
                if self._log is not None:
                    self._log.begin()

    def scan(self) -> Iterator[BlockKey]:
        """See BlockStore."""
        with self._books:
            keys = self._tier.keys()
        return iter(keys)

    def close(self) -> None:
        """See BlockStore. It takes some seconds at most: what the disk does not end keeps file and memory."""
        is_over = self._recovery.close()
        for one in (self._writer, self._reader):
            one.record_io.stop(STOP_TIMEOUT_S)
        with self._writer.lock, self._reader.lock, self._books:
            if not self._closed:
                self._closed = True
                if self._log is not None:
                    self._log.close()
                    self._log = None
                ended = [one.close(CLOSE_TIMEOUT_S) for one in (self._writer, self._reader)]
                if is_over and all(ended):
                    self._file.close()

    # ---------------------------------------------------------------- inside

    def _take_in(self, end: int, found: list[Found]) -> None:
        with self._books:
            batches = [] if self._was_cleared else batches_of(found)
            slot_of = dict(
                chain.from_iterable(batches)
            )  # of two with one key the more recent, as the tier has it
            new = self._tier.new_of(list(slot_of)) if self._log is not None else ()
            self._tier.restore(end, batches)
            if (
                self._log is not None
            ):  # still with the books: no put may take one of these slots before it is told
                self._log.append([(key, slot_of[key]) for key in new])

    def _begin_log(self, shares: bool) -> SlotLog | None:
        try:
            if shares:
                return SlotLog(self._file)
            withdraw_log(self._file.path)  # of an earlier store that shared: this one does not keep it up
            return None
        except BaseException:
            self._file.close()
            raise

    def _open_both_ways(self, reads_straight: bool) -> tuple[BlockIo, BlockIo]:
        writer: BlockIo | None = None
        try:
            writer = BlockIo(self._file, self._clock, is_write=True, first_sequence=time.time_ns())
            return writer, BlockIo(self._file, self._clock, is_write=False, is_straight=reads_straight)
        except BaseException:
            if writer is not None:
                writer.close(CLOSE_TIMEOUT_S)
            if self._log is not None:
                self._log.close()
            self._file.close()
            raise

    def _check(self, keys: Sequence[BlockKey], buffers: Sequence[Memory]) -> None:
        check_blocks(keys, buffers, self._file.geometry.payload_bytes)

    def _present(self, key: BlockKey) -> Outcome:
        return Outcome.OK if self._tier.contains(key) else Outcome.NO_SPACE

    def _lease(self, keys: Sequence[BlockKey], deadline_s: float) -> Lease | None:
        return self._tier.lease(OWNER, keys, 2 * max(0.0, deadline_s) + 1) if keys else None

    def _settle(self, reserved: Reservation, outcomes: list[Outcome]) -> None:
        """Each record for itself: what was written is here, what may yet be written keeps its slot, the rest
        is not.
        """
        by_end: dict[Outcome, list[int]] = {}
        for i, outcome in enumerate(outcomes):
            by_end.setdefault(outcome, []).append(i)
        for outcome, chosen in by_end.items():
            keys, slots = tuple(reserved.keys[i] for i in chosen), tuple(reserved.slots[i] for i in chosen)
            part = Reservation(keys, slots, reserved.generation)
            if outcome is Outcome.OK:
                self._tier.commit(part)
            elif outcome is Outcome.TIMED_OUT:
                self._late.append(part)
            else:
                self._tier.abort(part)

    def _take_back_slots(self) -> None:
        """Those of late writes, once all these have ended: until then one may land on top of a newer
        block.
        """
        self._writer.record_io.reap()
        if not self._writer.record_io.late_requests:
            while self._late:
                self._tier.abort(self._late.pop())
