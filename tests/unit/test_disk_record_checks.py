"""What a read believes: a record is what its header says, or it is not loaded; and a slot that may still be
written is nobody else's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm_core.clock import ManualClock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.runtime.handshake import RankAnswer
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.block_io import BlockIo
from kvbm_core.storage.disk.record import (
    SECTOR_BYTES,
    RecordHeader,
    pack_record,
    record_bytes,
    slot_offset_bytes,
    unpack_record,
)
from kvbm_core.testing.leader_bench import BenchDisk
from kvbm_core.testing.store_contract import LONG_S, buffers, content_of, key_of
from kvbm_core.transfer.plan import JobResult
from tests.faults.doubles import BUFFERED, HeldIo, store_on
from tests.unit.disk_bench import OTHER, PROMPT, bench_of, on_disk

PAYLOAD_BYTES = 2 * SECTOR_BYTES
GEOMETRY = Geometry(4, PAYLOAD_BYTES, b"checks".ljust(16))
SLOT, KEY = 1, key_of(7)

CHANGES: dict[str, tuple[Callable[[RecordHeader], RecordHeader], Outcome]] = {
    "nothing": (lambda header: header, Outcome.OK),
    "slot": (lambda header: header._replace(slot=2), Outcome.MISS),
    "life": (lambda header: header._replace(life=bytes(16)), Outcome.MISS),
    "key": (lambda header: header._replace(key=key_of(8)), Outcome.MISS),
    "fingerprint": (lambda header: header._replace(fingerprint=bytes(16)), Outcome.INCOMPATIBLE),
    "payload bytes": (lambda header: header._replace(payload_bytes=SECTOR_BYTES), Outcome.INCOMPATIBLE),
    "digest": (lambda header: header._replace(digest=bytes(16)), Outcome.CORRUPT),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_record_is_what_its_header_says_in_all_fields(tmp_path: Path, what: str) -> None:
    """The header itself verifies: such a record was written so, by whatever wrote it."""
    change, expected = CHANGES[what]
    file = BlockFile(tmp_path / "x.blocks", GEOMETRY, BUFFERED)
    writer, reader = (BlockIo(file, SystemClock(), is_write=is_write) for is_write in (True, False))
    (source,) = buffers(1, PAYLOAD_BYTES)
    source[:] = content_of(KEY, PAYLOAD_BYTES)
    assert writer.transfer([(KEY, SLOT)], [source], deadline_s=LONG_S) == [Outcome.OK]
    at = slot_offset_bytes(SLOT, PAYLOAD_BYTES)
    with file.path.open("r+b") as raw:
        raw.seek(at)
        header = unpack_record(raw.read(SECTOR_BYTES))
        assert header is not None
        raw.seek(at)
        raw.write(pack_record(change(header)))
    (target,) = buffers(1, PAYLOAD_BYTES)
    assert reader.transfer([(KEY, SLOT)], [target], deadline_s=LONG_S) == [expected]
    found = reader.record_io.headers([SLOT], deadline_s=LONG_S)
    is_found = what in {"nothing", "key", "digest"}  # a search looks at headers alone, and asks for no key
    assert [each.header is not None for each in found] == [is_found]
    for block_io in (writer, reader):
        assert block_io.close(LONG_S)
    file.close()


def test_a_record_in_another_slot_than_its_own_is_not_loaded(tmp_path: Path) -> None:
    """As after a copy of a part of the file to another place in it."""
    file = BlockFile(tmp_path / "x.blocks", GEOMETRY, BUFFERED)
    writer, reader = (BlockIo(file, SystemClock(), is_write=is_write) for is_write in (True, False))
    assert writer.transfer([(KEY, 0)], buffers(1, PAYLOAD_BYTES), deadline_s=LONG_S) == [Outcome.OK]
    with file.path.open("r+b") as raw:
        raw.seek(slot_offset_bytes(0, PAYLOAD_BYTES))
        record = raw.read(record_bytes(PAYLOAD_BYTES))
        raw.seek(slot_offset_bytes(3, PAYLOAD_BYTES))
        raw.write(record)
    (target,) = buffers(1, PAYLOAD_BYTES)
    assert reader.transfer([(KEY, 0)], [target], deadline_s=LONG_S) == [Outcome.OK]
    assert reader.transfer([(KEY, 3)], [target], deadline_s=LONG_S) == [Outcome.MISS]
    assert [found.header is not None for found in reader.record_io.headers([0, 3], deadline_s=LONG_S)] == [
        True,
        False,
    ]
    for block_io in (writer, reader):
        assert block_io.close(LONG_S)
    file.close()


# ---------------------------------------------------------------- late writes


def test_the_slot_of_a_late_write_is_not_given_to_another_block(tmp_path: Path) -> None:
    """When the write lands after all, it would lie on top of the newer block."""
    clock, ios = ManualClock(), []
    is_held = [True]

    def make_io(fd: int) -> HeldIo:
        ios.append(HeldIo(fd, lambda _, is_write: is_write and is_held[0], clock))
        return ios[-1]

    keys = [key_of(number) for number in range(5)]
    payloads = buffers(5, PAYLOAD_BYTES)
    for key, payload in zip(keys, payloads, strict=True):
        payload[:] = content_of(key, PAYLOAD_BYTES)
    with store_on(tmp_path / "x.blocks", GEOMETRY, make_io, clock=clock) as store:
        assert store.wait_recovered(LONG_S)
        assert store.put_many(keys[:1], payloads[:1], deadline_s=1.0) == [Outcome.TIMED_OUT]
        is_held[0] = False
        clock.advance(LONG_S)  # the pause of a disk that does not answer
        assert store.put_many(keys[1:4], payloads[1:4], deadline_s=LONG_S) == [Outcome.OK] * 3
        assert store.put_many(keys[4:], payloads[4:], deadline_s=LONG_S) == [Outcome.OK]  # by eviction
        assert store.resident_blocks == 3, "the fourth slot is the late write's"
        for io in ios:
            io.let_go()
        here = [
            key
            for key, at in zip(keys, store.contains_many(keys, deadline_s=1.0), strict=True)
            if at is Outcome.OK
        ]
        targets = buffers(3, PAYLOAD_BYTES)
        assert store.get_many(here, targets, deadline_s=LONG_S) == [Outcome.OK] * 3
        assert [bytes(target) for target in targets] == [content_of(key, PAYLOAD_BYTES) for key in here]
        # Now that it has ended its slot is free.
        assert store.put_many(keys[:1], payloads[:1], deadline_s=LONG_S) == [Outcome.OK]
        assert store.resident_blocks == 4


def test_the_places_of_a_late_order_are_free_with_its_second_answer() -> None:
    """On the disk and in the host: the kernel may still read the one and write the other."""
    bench = bench_of(disk=BenchDisk(5))
    bench.store(PROMPT)
    (order,) = bench.stores()
    late = JobResult(order.job_id, Outcome.TIMED_OUT, 0, 0.0, 0.0, is_late=True)
    bench.handshake.inbox.append(RankAnswer(0, late))
    bench.leader.poll()
    assert bench.leader.is_pending(order.job_id) and bench.disk.slots.pending_blocks == 5
    bench.store(OTHER)
    assert bench.stores() == [], "there is no other place"
    bench.leader.check_integrity()
    bench.say(order.job_id, Outcome.TIMED_OUT)
    bench.leader.poll()
    assert not bench.leader.is_pending(order.job_id) and bench.disk.slots.pending_blocks == 0
    bench.store(list(range(500, 508)))
    assert bench.write_to_disk() > 0 and on_disk(bench, PROMPT) == 0
