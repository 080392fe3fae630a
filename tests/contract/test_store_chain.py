"""A disk over a remote store keeps the contract of stores, and a remote store that misbehaves costs misses
alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm_core.clock import ManualClock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.policy.frequency import FrequencyFilter
from kvbm_core.storage.base import BlockStore
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.storage.stores import StoreSpec, open_store
from kvbm_core.testing.store_contract import LONG_S, NUM_BLOCKS, BlockStoreContract, key_of
from kvbm_core.testing.toy_store import CONTAINS, GET, PUT, ToyBlocks, ToyFaults, ToyStore
from kvbm_core.tiers.breaker import FAILURES_IN_A_ROW
from kvbm_core.types import BlockKey
from kvbm_sglang.store_chain import KNOWN, StoreChain


class ChainContract(BlockStoreContract):
    """The remote store has room for few blocks, so that the disk's room is that of both."""

    @contextmanager
    def stores(self) -> Iterator[BlockStore]:
        with tempfile.TemporaryDirectory(prefix="kvbm-chain-") as folder:
            disk = DiskStore(
                Path(folder, "store.blocks"), Geometry(NUM_BLOCKS, self.payload_bytes, bytes(16))
            )
            assert disk.wait_recovered(LONG_S)
            yield self.chain_over(disk, Path(folder))

    def chain_over(self, disk: DiskStore, folder: Path) -> StoreChain:
        remote = ToyStore(self.payload_bytes, blocks=ToyBlocks(4 * self.payload_bytes))
        return chain_of(disk, remote, self.payload_bytes)

    def settle(self, store: BlockStore) -> None:
        assert isinstance(store, StoreChain) and store.settle(LONG_S)

    def _still_has_all_its_room(self, store: BlockStore) -> None:
        self.settle(store)  # what comes from the remote store takes room on the disk
        super()._still_has_all_its_room(store)


def chain_of(disk: BlockStore, remote: BlockStore, payload_bytes: int, **more: float) -> StoreChain:
    return StoreChain(disk, remote, payload_bytes, AdmitAll(), Metrics(), **{"io_deadline_s": LONG_S, **more})


class TestChain(ChainContract):
    pass


class TestChainOddParts(ChainContract):
    payload_bytes = 5003
    part_bytes = 777


class TestChainOverFaults(ChainContract):
    """Whatever the remote store does, the contract is kept by the disk."""

    def chain_over(self, disk: DiskStore, folder: Path) -> StoreChain:
        faults = ToyFaults(1, latency_ms=0.05, loses=0.1, spoils=0.1, is_late=0.05)
        remote = ToyStore(self.payload_bytes, faults, ToyBlocks(4 * self.payload_bytes))
        return chain_of(disk, remote, self.payload_bytes)

    def settle(self, store: BlockStore) -> None:
        assert isinstance(store, StoreChain)
        remote = store._remote
        assert isinstance(remote, ToyStore)
        while not store.settle(0.01):
            remote.land()


# ---------------------------------------------------------------- what goes where


class Bench:
    """A chain of a small disk over a toy that it shares with later ones."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.suite = TestChain()
        self.folder, self.seed = folder, seed
        self.blocks = ToyBlocks()
        self.remote = ToyStore(self.suite.payload_bytes)
        self.metrics = Metrics()
        self.chains: list[StoreChain] = []

    def chain(
        self, *, num_slots: int = NUM_BLOCKS, is_filtered: bool = False, **options: float
    ) -> StoreChain:
        """With a new disk."""
        size = self.suite.payload_bytes
        path = self.folder / f"{len(self.chains)}.blocks"
        self.remote = ToyStore(size, ToyFaults(self.seed), self.blocks)
        disk = DiskStore(path, Geometry(num_slots, size, bytes(16)))
        self.metrics = Metrics()
        policy = FrequencyFilter(SystemClock()) if is_filtered else AdmitAll()
        options = {"io_deadline_s": LONG_S, **options}
        self.chains.append(StoreChain(disk, self.remote, size, policy, self.metrics, **options))
        return self.chains[-1]

    def metric(self, name: str) -> float:
        return self.metrics.snapshot()[name]

    def asked(self, *names: str) -> int:
        """Calls of the remote store."""
        return sum(name in names for name, _ in self.remote.calls)


@pytest.fixture
def bench(tmp_path: Path, seed: int) -> Iterator[Bench]:
    bench = Bench(tmp_path, seed)
    yield bench
    bench.remote.let_go()
    for chain in bench.chains:
        chain.close()


KEYS = [key_of(number) for number in range(100)]


def test_another_one_gets_what_the_first_one_put_and_has_it_on_its_disk(bench: Bench) -> None:
    get, keys = bench.suite.get, KEYS[:12]
    first = bench.chain()
    assert bench.suite.put(first, keys) == [Outcome.OK] * 12
    assert first.settle(LONG_S) and bench.metric("kvbm_offload_blocks_d2o") == 12
    second = bench.chain()
    asked = [*keys[:5], KEYS[50], *keys[5:]]
    wanted = [Outcome.OK if key in keys else Outcome.MISS for key in asked]
    found = second.find(asked, deadline_s=LONG_S)
    assert found.outcomes == wanted and found.remote == {i for i, key in enumerate(asked) if key in keys}
    assert get(second, asked) == wanted
    assert bench.metric("kvbm_onboard_blocks_o2d") == 12
    assert second.settle(LONG_S)
    calls = bench.asked(GET)
    assert second.find(keys, deadline_s=LONG_S) == ([Outcome.OK] * 12, set())
    assert get(second, keys) == [Outcome.OK] * 12
    assert bench.asked(GET) == calls, "what came from the remote store is not on the disk"
    assert not bench.metric('kvbm_read_again_bytes_total{tier="remote"}'), "another one wrote it"
    assert second.settle(LONG_S) and bench.asked(PUT) == 0, "what came from there is put there again"


def test_more_than_there_are_buffers_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm_sglang.store_chain.MAX_BUFFERS", 16)
    first = bench.chain(num_slots=100)
    assert bench.suite.put(first, KEYS) == [Outcome.OK] * 100
    assert first.settle(LONG_S) and bench.metric("kvbm_offload_blocks_d2o") == 100
    assert bench.suite.get(bench.chain(num_slots=10), KEYS) == [Outcome.OK] * 100


def test_what_is_on_the_disk_is_shared_when_it_is_found_there(bench: Bench) -> None:
    chain = bench.chain(is_filtered=True)
    bench.suite.put(chain, KEYS[:6])
    assert chain.settle(LONG_S) and not bench.blocks.blocks, "the filter lets pass what is used again"
    for _ in range(2):
        assert bench.suite.get(chain, KEYS[:3]) == [Outcome.OK] * 3
        assert chain.settle(LONG_S) and len(bench.blocks.blocks) == 3 and bench.asked(PUT) == 1


def test_what_is_used_on_the_disk_for_hours_is_put_once_and_again_only_if_it_is_missed(bench: Bench) -> None:
    clock, first = ManualClock(), bench.chain()
    chain = StoreChain(
        first._disk,
        bench.remote,
        bench.suite.payload_bytes,
        AdmitAll(),
        bench.metrics,
        io_deadline_s=LONG_S,
        clock=clock,
    )
    bench.chains.append(chain)

    def use() -> list[tuple[str, int]]:
        """What a use, a minute later, asks the remote store for: calls and blocks."""
        clock.advance(61.0)
        bench.remote.calls.clear()
        assert bench.suite.get(chain, KEYS[:6]) == [Outcome.OK] * 6
        with chain._changed:
            assert chain._changed.wait_for(lambda: not chain._looking, LONG_S)
        assert chain.settle(LONG_S)
        return [(name, len(keys)) for name, keys in bench.remote.calls]

    bench.suite.put(chain, KEYS[:6])
    assert chain.settle(LONG_S) and len(bench.blocks.blocks) == 6
    for _ in range(3):
        assert use() == [(CONTAINS, 1)]
    bench.blocks.blocks.clear()  # its server was restarted
    assert use() == [(CONTAINS, 1)]
    assert use() == [(PUT, 6)] and len(bench.blocks.blocks) == 6
    assert use() == [(CONTAINS, 1)]
    clock.advance(KNOWN.kept_s)
    assert use() == [(PUT, 6)]


def test_a_block_that_the_disk_has_damaged_comes_from_the_remote_store(bench: Bench) -> None:
    chain = bench.chain()
    bench.suite.put(chain, KEYS[:8])
    assert chain.settle(LONG_S)
    path = bench.folder / "0.blocks"
    content = bytearray(path.read_bytes())
    with path.open("r+b") as file:
        file.seek(len(content) // 2)
        file.write(bytes(len(content) - len(content) // 2))
    fetched = chain.fetch(KEYS[:8], bench.suite.new_buffers(8), deadline_s=LONG_S)
    assert fetched.outcomes == [Outcome.OK] * 8 and fetched.remote
    assert chain.settle(LONG_S)
    assert bench.suite.get(chain, KEYS[:8]) == [Outcome.OK] * 8


# ---------------------------------------------------------------- the head first


def behind(chain: StoreChain, *head: BlockKey) -> Any:
    """The chain, called for blocks that follow each other behind ``head``."""
    return SimpleNamespace(
        put_many=partial(chain.put_many, head=head), get_many=partial(fetched, chain, head=head)
    )


def fetched(chain: StoreChain, *arguments: Any, **more: Any) -> list[Outcome]:
    return chain.fetch(*arguments, **more).outcomes


def test_a_tail_goes_to_the_remote_store_behind_its_head_alone(bench: Bench) -> None:
    put, chain = bench.suite.put, bench.chain()
    for start, shared in ((4, 0), (0, 4), (4, 8)):
        head = KEYS[start - 1 : start] if start else []
        assert put(behind(chain, *head), KEYS[start : start + 4]) == [Outcome.OK] * 4, "the disk has all"
        assert chain.settle(LONG_S) and len(bench.blocks.blocks) == shared
    assert bench.asked(CONTAINS) == 1, "what is known is not asked"
    put(chain, KEYS[20:24])  # nobody says what they are
    assert chain.settle(LONG_S) and len(bench.blocks.blocks) == 12


def test_a_head_that_an_earlier_process_has_stored_is_found(bench: Bench) -> None:
    put = bench.suite.put
    put(behind(bench.chain()), KEYS[:4])
    assert bench.chains[0].settle(LONG_S)
    chain = bench.chain()
    for start in (4, 6):
        put(behind(chain, KEYS[3]), KEYS[start : start + 2])
    assert chain.settle(LONG_S) and len(bench.blocks.blocks) == 8 and bench.asked(CONTAINS) == 1


def test_a_head_on_its_way_is_as_good_as_there(bench: Bench) -> None:
    put, chain = bench.suite.put, bench.chain()
    bench.remote.hold(PUT)
    put(behind(chain), KEYS[:2])
    put(behind(chain, KEYS[1]), KEYS[2:4])
    bench.remote.let_go()
    assert chain.settle(LONG_S) and len(bench.blocks.blocks) == 4 and not bench.asked(CONTAINS)
    assert not chain._storing


def test_what_is_found_on_the_disk_is_shared_with_its_head_or_not_at_all(bench: Bench) -> None:
    get, chain = bench.suite.get, bench.chain(is_filtered=True)
    bench.suite.put(behind(chain), KEYS[:6])
    for _ in range(2):
        assert get(behind(chain, KEYS[2]), KEYS[3:6]) == [Outcome.OK] * 3
        assert chain.settle(LONG_S) and not bench.blocks.blocks, "used often, and of no use alone"
    assert get(behind(chain), KEYS[:6]) == [Outcome.OK] * 6
    assert chain.settle(LONG_S) and len(bench.blocks.blocks) == 6


# ---------------------------------------------------------------- a remote store that misbehaves


Call = Callable[[Bench, StoreChain], list[Outcome]]
SHORT_S, UNANSWERED_S = 1.0, 0.2


def get(bench: Bench, chain: StoreChain) -> list[Outcome]:
    return bench.suite.get(chain, KEYS[:3], UNANSWERED_S)


def put(bench: Bench, chain: StoreChain) -> list[Outcome]:
    return bench.suite.put(chain, KEYS[50:70], SHORT_S)  # more than puts have buffers for


def find(bench: Bench, chain: StoreChain) -> list[Outcome]:
    return chain.contains_many(KEYS[:3], deadline_s=UNANSWERED_S)


def hanging(bench: Bench, monkeypatch: pytest.MonkeyPatch, io_deadline_s: float) -> StoreChain:
    """A chain with KEYS[10:13] on its disk, and KEYS[:3] in a remote store that answers nobody."""
    monkeypatch.setattr("kvbm_sglang.store_chain.MAX_BUFFERS", 16)
    bench.suite.put(bench.chain(), KEYS[:3])
    assert bench.chains[0].settle(LONG_S)
    chain = bench.chain(io_deadline_s=io_deadline_s, num_slots=100)
    bench.suite.put(chain, KEYS[10:13])
    assert chain.settle(LONG_S)
    bench.remote.hold(GET, PUT, CONTAINS)
    return chain


@pytest.mark.parametrize("call", [get, put, find])
def test_one_that_hangs_holds_up_nobody_beyond_the_deadline(
    bench: Bench, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it has much more time itself."""
    chain, clock = hanging(bench, monkeypatch, 2 * LONG_S), SystemClock()
    started_s = clock.now_s()
    assert call(bench, chain) == ([Outcome.OK] * 20 if call is put else [Outcome.MISS] * 3)
    assert clock.now_s() - started_s < LONG_S
    assert bench.suite.get(chain, KEYS[10:13]) == [Outcome.OK] * 3, "the disk serves"


@pytest.mark.parametrize("call", [get, find])
def test_one_that_hangs_is_left_alone(
    bench: Bench, call: Call, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chain = hanging(bench, monkeypatch, 0.05)
    ends_at_s = SystemClock().now_s() + LONG_S
    while not chain._breaker.is_open:
        call(bench, chain)
        assert SystemClock().now_s() < ends_at_s
    line = "kvbm: the shared store (KVBM_REMOTE_URL) does not answer: it is left alone for a while, and then"
    assert [message.startswith(line) for message in caplog.messages] == [True]
    calls = len(bench.remote.calls)
    assert call(bench, chain) == [Outcome.MISS] * 3
    assert len(bench.remote.calls) == calls


def has_failed(chain: StoreChain, times: int) -> bool:
    return max(chain._breaker._rows) == times


@pytest.mark.parametrize(("call", "held"), [(get, GET), (find, CONTAINS)])
def test_one_that_takes_everything_and_gives_nothing_is_left_alone(
    bench: Bench, call: Call, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = hanging(bench, monkeypatch, 0.05)
    bench.remote.let_go()
    bench.remote.hold(held)
    for number in range(FAILURES_IN_A_ROW):
        assert not chain._breaker.is_open
        key = KEYS[30 + number]
        assert bench.suite.put(chain, [key]) == [Outcome.OK]
        with chain._changed:
            assert chain._changed.wait_for(partial(chain._known.is_kept, key), LONG_S)
        call(bench, chain)
        with chain._changed:  # the caller's time is over a little before the answer comes
            assert chain._changed.wait_for(partial(has_failed, chain, number + 1), LONG_S)
    assert chain._breaker.is_open


def test_buffers_that_it_may_still_touch_are_not_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, clock = hanging(bench, monkeypatch, 0.05), SystemClock()
    started_s = clock.now_s()
    for start in (20, 40):
        outcomes = bench.suite.put(chain, KEYS[start : start + 20], 2 * LONG_S)
        assert outcomes == [Outcome.OK] * 20
    assert clock.now_s() - started_s < LONG_S
    bench.remote.let_go()
    assert chain.settle(LONG_S) and not chain._num_late
    assert bench.suite.put(chain, KEYS[60:70]) == [Outcome.OK] * 10
    assert chain.settle(LONG_S) and len(bench.blocks.blocks) > 13


def test_one_that_fails_is_left_alone_and_says_so_itself(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    chain = bench.chain()
    bench.remote.faults = ToyFaults(fails=1.0)
    for number in range(FAILURES_IN_A_ROW):
        assert chain.contains_many(KEYS[number : number + 1], deadline_s=LONG_S) == [Outcome.MISS]
    calls = len(bench.remote.calls)
    assert bench.suite.put(chain, KEYS[:4]) == bench.suite.get(chain, KEYS[:4]) == [Outcome.OK] * 4
    assert bench.suite.get(chain, KEYS[10:14]) == [Outcome.MISS] * 4
    assert len(bench.remote.calls) == calls and not caplog.messages


def test_one_that_writes_late_writes_to_nobody(bench: Bench) -> None:
    bench.suite.put(bench.chain(), KEYS[:8])
    assert bench.chains[0].settle(LONG_S)
    chain = bench.chain()
    bench.remote.faults = ToyFaults(is_late=1.0)
    targets = bench.suite.new_buffers(8)
    assert chain.get_many(KEYS[:8], targets, deadline_s=LONG_S) == [Outcome.MISS] * 8
    assert not chain.settle(0.0), "buffers that it may still write are given to others"
    bench.remote.land()
    assert chain.settle(LONG_S)
    assert not any(map(any, targets)), "it wrote to the caller"


def test_a_shared_directory(bench: Bench, tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    size = bench.suite.payload_bytes
    for number in range(2):
        remote = open_store(StoreSpec(f"file://{share}", size, "meaning", "0of1", "model"))
        disk = DiskStore(tmp_path / f"{number}.blocks", Geometry(NUM_BLOCKS, size, bytes(16)))
        chain = chain_of(disk, remote, size)
        if not number:
            assert bench.suite.put(chain, KEYS[:12]) == [Outcome.OK] * 12
            assert chain.settle(LONG_S)
        assert bench.suite.get(chain, KEYS[:12]) == [Outcome.OK] * 12
        chain.close()
