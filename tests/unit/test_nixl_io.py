"""NixlIo beyond the contract: its memory, its queues, what never ends; and the setting that chooses it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm_core.clock import SystemClock
from kvbm_core.config.settings import KvbmSettings
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.storage.disk import nixl_io
from kvbm_core.storage.disk.aio_io import AioIo
from kvbm_core.storage.disk.allocate import DiskError
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.choose import chosen_file_io
from kvbm_core.storage.disk.io import FileIo, ThreadIo, Transfer
from kvbm_core.storage.disk.nixl_io import NixlIo
from kvbm_core.storage.disk.record import SECTOR_BYTES
from kvbm_core.storage.disk.record_io import Record, RecordIo
from kvbm_core.testing.file_io_contract import (
    LONG_S,
    finish,
    memory_of,
    random_bytes,
    whole,
    why_no_aio,
    why_no_nixl,
)
from kvbm_core.testing.store_contract import key_of
from kvbm_core.transfer.movers.disk_file import RankFile
from tests.faults.doubles import BUFFERED
from tests.unit.test_worker_disk import Ends, OneFile

NO_NIXL = why_no_nixl()
needs_nixl = pytest.mark.skipif(NO_NIXL is not None, reason=f"NOT RUN: disk I/O by NIXL: {NO_NIXL}")
UNIT = 4096
CONTENT = random_bytes(40 * UNIT)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A file of CONTENT."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    number = os.open(path, os.O_RDWR)
    yield number
    os.close(number)


@pytest.fixture
def io(fd: int) -> Iterator[NixlIo]:
    made = NixlIo(fd)
    yield made
    assert made.close(LONG_S) and made not in nixl_io._OPEN


# ---------------------------------------------------------------- memory


@needs_nixl
def test_memory_that_was_told_of_is_registered_once_by_spans(
    io: NixlIo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_io, "SPAN_BYTES", 4 * UNIT)
    memory = memory_of(14 * UNIT)
    slab = memory[: 12 * UNIT]
    first = slab.ctypes.data
    io.register(first, len(slab), 3 * UNIT)  # a span is one unit then, as two would be more than asked for
    assert not io._spans, "it may not be there yet"
    for slot, spans in ((0, [0]), (3, [0, 3]), (0, [0, 3])):
        part = slab[slot * 3 * UNIT : (slot + 1) * 3 * UNIT]
        io.submit([whole(part, 1, 5 * UNIT)], is_write=False)
        assert finish(io) == {1: 3 * UNIT} and part.tobytes() == CONTENT[5 * UNIT : 8 * UNIT]
        assert sorted(io._spans) == [first + span * 3 * UNIT for span in spans]
    # Across units, over the end, and beside it: none is inside one span.
    for start, count in ((2, 2), (11, 2), (12, 2)):
        part = memory[start * UNIT : (start + count) * UNIT]
        io.submit([whole(part, 1)], is_write=False)
        assert finish(io) == {1: count * UNIT} and part.tobytes() == CONTENT[: count * UNIT]
    assert len(io._spans) == 2


@needs_nixl
def test_memory_of_others_is_forgotten_with_the_request(io: NixlIo) -> None:
    memory = memory_of(2 * UNIT)
    transfers = [whole(part, n) for n, part in enumerate(memory.reshape(2, -1))]
    io.submit(transfers, is_write=False)
    assert finish(io) == {0: UNIT, 1: UNIT}
    with pytest.raises(Exception, match="NOT_FOUND"):  # NIXL's own words for memory that it does not know
        place, kind = (io._fd, 0), nixl_io._HOST_MEMORY
        nixl_io._request(io._agent, "POSIX", place, transfers[0].pieces, kind, is_write=False)


@needs_nixl
def test_nothing_lands_in_memory_after_a_request_has_failed(
    io: NixlIo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL tells of an error when all pieces have ended: only so can the request be done again, and its
    memory used.
    """
    memory, other = memory_of(1000 * UNIT), memory_of(UNIT)
    os.truncate(io._fd, 1001 * UNIT)
    with suppress(OSError):  # where it can be had, as requests take longest with it
        fcntl.fcntl(io._fd, fcntl.F_SETFL, os.O_RDWR | os.O_DIRECT)
    nowhere = (UNIT, UNIT)  # the first pages are nobody's
    transfer = Transfer(0, 0, [nowhere, *((memory.ctypes.data + n * UNIT, UNIT) for n in range(1000))])
    failed: list[int] = []

    def used_for_something_else(transfer: Transfer, is_write: bool) -> None:
        memory[:] = 7
        failed.append(transfer.tag)
        io._ended.append((transfer.tag, 0))

    monkeypatch.setattr(io, "_do_plainly", used_for_something_else)
    io.submit([transfer], is_write=False)
    assert finish(io) == {0: 0} and failed == [0]
    for _ in range(20):
        io.submit([whole(other)], is_write=False)
        assert finish(io) == {0: UNIT}
    assert (memory == 7).all()


@needs_nixl
def test_more_pieces_than_nixl_has_room_for_wait(io: NixlIo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_io, "PIECES_IN_FLIGHT", 4)
    memory = memory_of(40 * UNIT)
    transfers = [
        Transfer(n, n * 2 * UNIT, [(part.ctypes.data, UNIT), (part.ctypes.data + UNIT, UNIT)])
        for n, part in enumerate(memory.reshape(20, -1))
    ]
    io.submit(transfers, is_write=False)
    assert io.in_flight == 20 and io._waiting
    assert finish(io) == {n: 2 * UNIT for n in range(20)}
    assert memory.tobytes() == CONTENT and io._cost_in_flight == 0


# ---------------------------------------------------------------- errors, ends


@needs_nixl
def test_a_write_past_the_limit_of_files_says_so(io: NixlIo) -> None:
    memory, (soft, hard) = memory_of(2 * UNIT), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (41 * UNIT, hard))
    try:
        io.submit([whole(memory, 1, 40 * UNIT), whole(memory, 2, 50 * UNIT)], is_write=True)
        assert finish(io) == {1: UNIT, 2: -errno.EFBIG}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@needs_nixl
def test_what_does_not_end_is_kept_until_it_does() -> None:
    """A read of an empty pipe."""
    source, sink = os.pipe()
    io, memory = NixlIo(source), memory_of(UNIT)
    if io.queue != "uring":
        assert io.close(LONG_S)
        pytest.skip("NOT RUN: a request that never ends: needs io_uring")
    io.submit([whole(memory, 3)], is_write=False)
    assert io.collect(0) == [] and io.collect(0.01) == [] and io.in_flight == 1
    assert io.close(0.01) is False and io.close(0) is False and io in nixl_io._OPEN
    with pytest.raises(ValueError):
        io.submit([whole(memory, 4)], is_write=False)
    os.write(sink, CONTENT[:UNIT])
    assert io.close(LONG_S) and io.close(0) and io not in nixl_io._OPEN
    assert memory.tobytes() == CONTENT[:UNIT]
    for number in (source, sink):
        os.close(number)


# ---------------------------------------------------------------- what cannot be had


def test_an_unknown_plugin_is_a_mistake(fd: int) -> None:
    with pytest.raises(ValueError, match="UCX is none of POSIX, GDS, GDS_MT"):
        NixlIo(fd, "UCX")


def test_where_there_is_no_nixl_one_line_says_how_to_get_it(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(DiskError) as caught:
        chosen_file_io(fd, is_direct=False, kind="nixl-posix")
    text = str(caught.value.strerror)
    assert text.startswith("kvbm: KVBM_DISK_IO=nixl-posix: NIXL cannot be imported (") and "\n" not in text
    assert text.endswith("; pip install 'nixl>=1.5', or set KVBM_DISK_IO=auto")


@pytest.mark.shows("KVBM_DISK_IO=nixl-gds", "KVBM_DISK_IO=nixl-gds-mt")
@needs_nixl
@pytest.mark.parametrize(("kind", "plugin"), [("nixl-gds", "GDS"), ("nixl-gds-mt", "GDS_MT")])
def test_where_there_is_no_gpu_one_line_says_what_gds_needs(fd: int, kind: str, plugin: str) -> None:
    try:
        io = chosen_file_io(fd, is_direct=False, kind=kind)
    except DiskError as error:
        need = f"NIXL cannot load its {plugin} plugin: it needs an NVIDIA GPU, its driver and libcufile"
        assert error.strerror == f"kvbm: KVBM_DISK_IO={kind}: {need}, or set KVBM_DISK_IO=auto"
        assert error.errno == errno.ENOTSUP
    else:
        assert io.close(LONG_S)
        pytest.skip(f"NOT RUN: {plugin} that is missing: this machine has it")


def refusing(refused: set[str]) -> type[Any]:
    """NIXL's agent on a machine that has not all queues."""
    import nixl

    class Agent(nixl.nixl_agent):
        def create_backend(self, backend: str, params: dict[str, str]) -> None:
            if refused & params.keys():
                raise nixl._bindings.nixlBackendError("no such queue")
            super().create_backend(backend, params)

    return Agent


@needs_nixl
def test_aio_does_it_where_io_uring_is_forbidden(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nixl.nixl_agent", refusing({"use_uring"}))
    io = NixlIo(fd)
    assert io.queue == "aio" and io.close(LONG_S)
    monkeypatch.setattr("nixl.nixl_agent", refusing({"use_uring", "use_aio"}))
    with pytest.raises(OSError, match="neither io_uring nor Linux AIO"):
        NixlIo(fd)


# ---------------------------------------------------------------- the setting


@pytest.mark.shows(
    "KVBM_DISK_IO", "KVBM_DISK_IO=auto", "KVBM_DISK_IO=aio", "KVBM_DISK_IO=threads", "KVBM_DISK_IO=nixl-posix"
)
def test_each_value_of_the_setting_is_one_that_can_be_chosen(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBM_DISK_IO", "fast")
    with pytest.raises(ConfigError) as caught:
        KvbmSettings.from_env()
    kinds = str(caught.value).partition("write one of ")[2].split(", ")
    types: dict[str, type[FileIo]] = {
        "threads": ThreadIo,
        "auto": ThreadIo,
        "aio": AioIo,
        "nixl-posix": NixlIo,
    }
    assert types.keys() <= set(kinds) and len(kinds) == 6
    missing = {"aio": why_no_aio(), "nixl-posix": NO_NIXL}
    for kind in kinds:
        monkeypatch.setenv("KVBM_DISK_IO", kind)
        assert KvbmSettings.from_env().disk_io == kind
        try:
            io = chosen_file_io(fd, is_direct=False, kind=kind)
        except DiskError:
            assert missing.get(kind) or kind.startswith("nixl-gds")
        else:
            assert type(io) is types.get(kind, NixlIo) and io.close(LONG_S)


@needs_nixl
def test_records_are_read_and_written(tmp_path: Path) -> None:
    file = BlockFile(tmp_path / "x.blocks", Geometry(8, 2 * SECTOR_BYTES, bytes(16)))
    io = NixlIo(file.fd)
    record_io, memory = RecordIo(file, io, clock=SystemClock()), memory_of(len(CONTENT))
    size = 2 * SECTOR_BYTES
    memory[: 5 * size] = list(CONTENT[: 5 * size])
    slots = (1, 2, 3, 6, 0)
    records = [Record(key_of(slot), slot, memory.ctypes.data + n * size) for n, slot in enumerate(slots)]
    assert record_io.write(records, deadline_s=LONG_S) == [Outcome.OK] * 5
    memory[:] = 0
    assert record_io.read(
        [*records, Record(key_of(4), 4, memory.ctypes.data + 5 * size)], deadline_s=LONG_S
    ) == [
        *[Outcome.OK] * 5,
        Outcome.CORRUPT,
    ]
    assert memory[: 5 * size].tobytes() == CONTENT[: 5 * size]
    found = record_io.headers(range(8), deadline_s=LONG_S)
    assert [each.header is not None for each in found] == [slot in slots for slot in range(8)]
    assert len(io._spans) == 1, "the records' headers"
    assert record_io.close(LONG_S)
    file.close()


@needs_nixl
def test_a_workers_disk_by_nixl_is_found_again(tmp_path: Path) -> None:
    options, found = replace(BUFFERED, io_deadline_s=LONG_S, io="nixl-posix"), list[int]()
    for disk_slot in (3, 1):
        before = set(nixl_io._OPEN)
        one = OneFile(tmp_path, options)
        ios = [io for io in nixl_io._OPEN - before if io in (one.file._ios or ())]
        assert [len(io._regions) for io in ios] == [2, 2], "slab and headers"
        _, records = one.ends.wait_found()
        found += [record.slot for record in records]
        one.store(disk_slot)
        (result,) = one.ends.wait_results()
        assert result.outcome is Outcome.OK
        one.close()
        assert before == nixl_io._OPEN
    assert found == [3]


def test_a_kind_that_cannot_be_had_is_told_to_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    ends = Ends()
    disk = RankFile("disk", replace(BUFFERED, io="nixl-gds"), ends)
    with caplog.at_level(logging.ERROR, "kvbm"):
        assert not disk.open(tmp_path / "rank.blocks", 4, SECTOR_BYTES, "layout")
    (reason,) = ends.reasons
    assert reason.startswith("kvbm: KVBM_DISK_IO=nixl-gds: ") and "\n" not in reason
    assert caplog.messages == [reason]
    BlockFile(tmp_path / "rank.blocks", Geometry(4, SECTOR_BYTES, bytes(16)), BUFFERED).close()


# ---------------------------------------------------------------- GPUDirect Storage


class GdsDouble:
    """NIXL's agent with its GDS plugin, as its source reads, in host memory; there is neither GPU nor cuFile.

    It has 16 batches of 128 entries, and fails what needs one more. Of a request's entries the one that fails
    is told at once, while others are under way: these land when the test says so.
    """

    name = "double"

    def __init__(self) -> None:
        self.num_refused = 0
        self.fails_at: int | None = None
        self._in_flight: dict[int, int] = {}
        self._landing: list[list[tuple[int, int, int, int]]] = []

    def create_backend(self, plugin: str, bounds: dict[str, str]) -> None:
        assert plugin == "GDS" and bounds["batch_pool_size"] == "16"

    def register_memory(self, rows: object, kind: str, backends: list[str]) -> object:
        return rows

    def deregister_memory(self, rows: object, backends: list[str]) -> None:
        """Nothing to forget."""

    def get_xfer_descs(self, rows: Any, kind: str) -> list[list[int]]:
        return [[int(number) for number in row] for row in rows]

    def initialize_xfer(self, operation: str, memory: Any, parts: Any, *_: object) -> list[Any]:
        assert operation == "READ"
        return [(to, nbytes, at, fd) for (to, nbytes, _), (at, _, fd) in zip(memory, parts, strict=True)]

    def transfer(self, entries: list[Any]) -> str:
        num_batches = -(-len(entries) // 128)
        if sum(self._in_flight.values()) + num_batches > 16:
            self.num_refused += 1
            return "ERR"
        self._in_flight[id(entries)] = num_batches
        return "PROC"

    def check_xfer_state(self, entries: list[Any]) -> str:
        del self._in_flight[id(entries)]
        if self.fails_at is not None:
            self._landing.append(entries[: self.fails_at])
            self.fails_at = None
            return "ERR"
        self._read(entries)
        return "DONE"

    def release_xfer_handle(self, entries: list[Any]) -> None:
        """Nothing to give back."""

    def land(self) -> None:
        """What a request that failed has left under way."""
        for entries in self._landing:
            self._read(entries)

    def _read(self, entries: list[tuple[int, int, int, int]]) -> None:
        for to, nbytes, at, fd in entries:
            ctypes.memmove(to, os.pread(fd, nbytes, at), nbytes)


@pytest.fixture
def gds(monkeypatch: pytest.MonkeyPatch) -> GdsDouble:
    agent = GdsDouble()
    module = SimpleNamespace(nixl_agent=lambda *_: agent, nixl_agent_config=lambda **_: None)
    monkeypatch.setitem(sys.modules, "nixl", module)
    return agent


def test_gds_has_no_more_requests_at_once_than_batches(fd: int, gds: GdsDouble) -> None:
    io = NixlIo(fd, "GDS")
    memory = memory_of(40 * UNIT).reshape(40, -1)
    io.submit([whole(part, n, n % 8 * UNIT) for n, part in enumerate(memory)], is_write=False)
    assert finish(io) == dict.fromkeys(range(40), UNIT)
    assert not gds.num_refused and io._plain is None
    assert all(part.tobytes() == CONTENT[n % 8 * UNIT :][:UNIT] for n, part in enumerate(memory))
    assert io.close(LONG_S)


def test_memory_that_gds_may_still_write_after_a_request_has_failed_is_given_back_to_nobody(
    fd: int, gds: GdsDouble
) -> None:
    """And what is asked for later does not come by a plugin that may confuse it with what it owes."""
    io = NixlIo(fd, "GDS")
    memory = memory_of(4 * UNIT).reshape(4, -1)
    pieces = [(part.ctypes.data, UNIT) for part in memory[:3]]
    gds.fails_at = 2
    io.submit([Transfer(1, 0, pieces)], is_write=False)
    assert io.collect(0.05) == [] and io.in_flight == 1
    io.submit([whole(memory[3], 2, 5 * UNIT)], is_write=False)
    assert io.collect(LONG_S) == [(2, UNIT)] and memory[3].tobytes() == CONTENT[5 * UNIT :][:UNIT]
    gds.land()
    assert memory[0].tobytes() == CONTENT[:UNIT], "it did write later"
    assert io._plain is not None
    threads = list(io._plain._threads)
    assert not io.close(0.05) and io in nixl_io._OPEN
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive(), "it waits for what will never be asked"
    nixl_io._OPEN.discard(io)


def test_one_entry_that_gds_fails_with_has_ended(fd: int, gds: GdsDouble) -> None:
    io = NixlIo(fd, "GDS", gpu=0)
    (part,) = memory_of(UNIT).reshape(1, -1)
    gds.fails_at = 0
    io.submit([whole(part, 1)], is_write=False)
    assert io.collect(LONG_S) == [(1, -errno.EIO)] and io.close(LONG_S)
