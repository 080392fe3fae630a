"""Every BlockStore keeps the contract, whatever its file, its memory and its way of I/O."""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.base import BlockStore, Memory, parts_of
from kvbm_core.storage.disk import block_io
from kvbm_core.storage.disk.aio_io import AioIo
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.io import FileIo, ThreadIo
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing import together
from kvbm_core.testing.file_io_contract import why_no_aio
from kvbm_core.testing.store_contract import LONG_S, NUM_BLOCKS, BlockStoreContract, key_of
from kvbm_core.testing.toy_store import ToyBlocks, ToyFaults, ToyStore
from kvbm_core.types import BlockKey

NO_AIO = why_no_aio()
needs_aio = pytest.mark.skipif(NO_AIO is not None, reason=f"NOT RUN: asynchronous disk I/O: {NO_AIO}")


class DiskStoreContract(BlockStoreContract):
    """DiskStore by ``make_io``, whatever it would choose itself."""

    is_direct = False
    store_class = DiskStore
    reads_straight = True

    @abstractmethod
    def make_io(self, fd: int) -> FileIo:
        """The way of I/O."""

    def io_of_blocks(self, fd: int, *, is_direct: bool) -> FileIo:
        """In place of ``make_file_io``."""
        assert is_direct is self.is_direct
        return self.make_io(fd)

    @contextmanager
    def stores(self) -> Iterator[BlockStore]:
        with (
            tempfile.TemporaryDirectory(prefix="kvbm-store-") as folder,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(block_io, "make_file_io", self.io_of_blocks)
            geometry = Geometry(NUM_BLOCKS, self.payload_bytes, b"contract".ljust(16))
            options = FileOptions(is_direct=self.is_direct)
            path = Path(folder, "store.blocks")
            store = self.store_class(path, geometry, options, reads_straight=self.reads_straight)
            if store._file.is_direct is not self.is_direct:
                store.close()
                pytest.skip(f"NOT RUN: O_DIRECT in {tempfile.gettempdir()}: the file system has none")
            assert store.wait_recovered(LONG_S)
            yield store


class TestBuffered(DiskStoreContract):
    def make_io(self, fd: int) -> FileIo:
        return ThreadIo(fd)


class TestBufferedOddSize(TestBuffered):
    payload_bytes = 5003


class TestBufferedSkewed(TestBuffered):
    """Whole sectors in memory that is on no boundary."""

    skew_bytes = 24


class TestBufferedParts(TestBuffered):
    """Keys and values apart."""

    part_bytes = 4096


class TestBufferedUnevenParts(TestBufferedOddSize):
    part_bytes = 777


class TestDirect(TestBuffered):
    is_direct = True


class TestDirectTiny(TestDirect):
    payload_bytes = 7


class TestDirectBig(TestDirect):
    """One block is a request of its own."""

    payload_bytes = 1 << 20


@needs_aio
class TestAio(DiskStoreContract):
    is_direct = True

    def make_io(self, fd: int) -> FileIo:
        return AioIo(fd)


@needs_aio
class TestAioOddSize(TestAio):
    payload_bytes = 3 * 4096 + 17


@needs_aio
class TestAioSkewed(TestAio):
    skew_bytes = 512


@needs_aio
class TestAioManyParts(TestAio):
    """Layers apart: few records go into one request."""

    payload_bytes = 72 * 4096
    part_bytes = 4096


@needs_aio
class TestAioReadsByBounce(TestAio):
    reads_straight = False


@needs_aio
class TestAioSkewedParts(TestAioManyParts):
    skew_bytes = 64
    part_bytes = 3 * 4096


# ---------------------------------------------------------------- the contract itself


class OneBitOff(DiskStore):
    """Gives back other bytes than were put."""

    def get_many(
        self, keys: Sequence[BlockKey], targets: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        outcomes = super().get_many(keys, targets, deadline_s=deadline_s)
        for target in targets:
            parts_of(target)[-1][-1] ^= 1
        return outcomes


class LosesBlocks(DiskStore):
    """Says OK to what it does not keep."""

    def put_many(
        self, keys: Sequence[BlockKey], payloads: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        outcomes = super().put_many(keys, payloads, deadline_s=deadline_s)
        super().remove_many(keys[-1:], deadline_s=deadline_s)
        return outcomes


class RemovesNothing(DiskStore):
    def remove_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        return self.contains_many(keys, deadline_s=deadline_s)


class StaysOpen(DiskStore):
    def close(self) -> None:
        """Does nothing."""


class TakesAnyBuffer(DiskStore):
    def _check(self, keys: Sequence[BlockKey], buffers: Sequence[Memory]) -> None:
        """Nothing is checked."""


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (OneBitOff, "test_what_was_put_is_got_and_what_was_not_is_a_miss"),
        (OneBitOff, "test_many_threads_at_once_see_only_right_bytes"),
        (LosesBlocks, "test_more_blocks_than_fit_cost_old_ones_and_never_bytes"),
        (LosesBlocks, "test_putting_a_block_again_is_ok"),
        (RemovesNothing, "test_removed_blocks_are_gone_and_can_be_put_again"),
        (StaysOpen, "test_after_close_everything_is_rejected"),
        (StaysOpen, "test_close_gives_back_files_and_threads"),
        (TakesAnyBuffer, "test_memory_that_cannot_be_used_is_refused"),
    ],
)
def test_the_contract_catches_a_broken_store(
    broken: type[DiskStore], test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "LONG_S", 0.1)  # what is waited for does not come
    made: list[BlockStore] = []

    class Suite(TestBuffered):
        store_class = broken
        payload_bytes = 5003

        @contextmanager
        def stores(self) -> Iterator[BlockStore]:
            with super().stores() as store:
                made.append(store)
                yield store

    with pytest.raises((AssertionError, TypeError)):
        getattr(Suite(), test)()
    for store in made:
        assert isinstance(store, DiskStore)
        DiskStore.close(store)


def test_a_key_of_no_block_is_refused_and_costs_nothing() -> None:
    suite = TestBuffered()
    with suite.opened() as store:
        for wrong in map(BlockKey, (b"", bytes(31), bytes(33), bytes(41))):
            keys = [key_of(0), key_of(1), key_of(2)]
            for call in (store.put_many, store.get_many):
                with pytest.raises(ValueError, match="key"):
                    call([*keys, wrong], suite.new_buffers(4), deadline_s=LONG_S)
            assert suite.contained(store, keys) == suite.get(store, keys) == [Outcome.MISS] * 3
        suite._still_has_all_its_room(store)


class ToyContract(BlockStoreContract):
    """The store that tests put below other tiers."""

    @contextmanager
    def stores(self) -> Iterator[BlockStore]:
        yield ToyStore(self.payload_bytes, blocks=ToyBlocks(NUM_BLOCKS * self.payload_bytes))


class TestToy(ToyContract):
    pass


class TestToyParts(ToyContract):
    part_bytes = 777


class TestSlowToy(ToyContract):
    """Time passes in its calls."""

    @contextmanager
    def stores(self) -> Iterator[BlockStore]:
        blocks = ToyBlocks(NUM_BLOCKS * self.payload_bytes)
        yield ToyStore(self.payload_bytes, ToyFaults(latency_ms=0.05), blocks)
