"""Two ranks of SGLang's linker with the same latents: one stores them, both load, and what goes wrong on one
of them goes wrong on both. SGLang is a double: it takes what all ranks agree on, as the real one does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT RUN: SGLang's linker; torch is missing")

from kvbm_core.config import KvbmSettings  # noqa: E402
from kvbm_core.observe.metrics import Metrics  # noqa: E402
from kvbm_core.runtime.assembly import metrics_of  # noqa: E402
from kvbm_core.runtime.local import LocalTiers  # noqa: E402
from kvbm_core.runtime.sharing import turn_of  # noqa: E402
from kvbm_core.testing.executor_bench import LONG_S  # noqa: E402
from kvbm_core.testing.file_io_contract import why_no_nixl  # noqa: E402
from kvbm_core.tiers.slotted import SlottedTier  # noqa: E402
from kvbm_core.transfer.executors.broadcast_group import Group, GroupError  # noqa: E402
from kvbm_sglang.device_pool import DevicePages  # noqa: E402
from kvbm_sglang.following import FollowingTiers  # noqa: E402
from kvbm_sglang.linker_assembly import Alike, Ranks, assemble  # noqa: E402
from kvbm_sglang.linker_tiers import LinkerTiers  # noqa: E402
from tests.unit.sglang_pools import (  # noqa: E402
    LAYERS,
    NUM_PAGES,
    PAGE_TOKENS,
    MLATokenToKVPool,
    fill,
    holds,
    indices_of,
    tensors_of,
)
from tests.unit.test_sglang_linker import ENGINE, KEYS, _weights, _weights_began_now, at_once  # noqa: E402

MODE = {"DYN_KVBM_NCCL_MLA_MODE": True}
DISK = {"DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": 20}
NO_NIXL = why_no_nixl()
OWN_COPIES = "each rank stores and loads its own copy"


class Exchange:
    """torch's all_gather_object among threads."""

    def __init__(self, size: int) -> None:
        self._found: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=LONG_S)

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def exchange(mine: Any) -> list[Any]:
            self._found[rank] = mine
            self._barrier.wait()
            found = list(self._found)
            self._barrier.wait()
            return found

        return exchange


class Duo:
    """An engine of ``len(settings)`` ranks, each with its settings."""

    def __init__(self, folder: Path, *settings: dict[str, Any], num_disk: int = 0) -> None:
        self._folder = folder
        self._settings = settings
        self.pools = [MLATokenToKVPool() for _ in settings]
        self.metrics: list[Metrics] = []
        exchange = Exchange(len(settings))
        self._model = str(_weights(folder))
        self._weights = [_weights_began_now(self._model) for _ in settings]
        with ThreadPoolExecutor(len(settings)) as pool:
            made = [pool.submit(self._rank, rank, exchange) for rank in range(len(settings))]
            self.ranks: list[LinkerTiers] = [one.result(LONG_S) for one in made]
        for tiers in self.stores:
            assert tiers.wait_ready(1, *([num_disk] if num_disk else []), timeout_s=LONG_S)

    def _rank(self, rank: int, exchange: Exchange) -> LinkerTiers:
        given = {
            "DYN_KVBM_CPU_CACHE_GB": 0.00002,
            "DYN_KVBM_DISK_CACHE_DIR": str(self._folder),
            "DYN_KVBM_DISK_DISABLE_O_DIRECT": True,
            "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": True,
            **self._settings[rank],
        }
        settings, size = KvbmSettings.from_env(given), len(self._settings)
        alike = Alike(rank, size, exchange.of(rank))
        metrics = metrics_of(settings)
        self.metrics.append(metrics)
        return assemble(
            DevicePages(self.pools[rank], PAGE_TOKENS),
            settings,
            metrics,
            model=self._model,
            engine=ENGINE,
            weights=self._weights[rank],
            ranks=Ranks({"tp_rank": rank, "tp_size": size}, size, alike=alike),
            num_layers=LAYERS,
        )

    @property
    def stores(self) -> list[LocalTiers]:
        """Of the ranks that store."""
        return [rank._tiers for rank in self.ranks if isinstance(rank._tiers, LocalTiers)]

    def offload(self, *keys: str) -> bool:
        """What every rank has computed, from the first pages."""
        for pool, rank in zip(self.pools, self.ranks, strict=True):
            for page, key in enumerate(keys, 1):
                fill(pool, page, key)
            rank.store(keys, indices_of(*range(1, 1 + len(keys))), at_once)
        for rank in self.ranks:
            with rank._changed:
                assert rank._changed.wait_for(lambda rank=rank: rank.num_ended_stores() == 1, LONG_S)
        ended = [rank.take_ended_store() for rank in self.ranks]
        assert all(tiers.wait_stored(LONG_S) for tiers in self.stores)
        for pool in self.pools:
            for tensor in tensors_of(pool):
                tensor.zero_()
        return all(ended)

    def lookup(self, rid: str, *keys: str) -> int:
        """The longest prefix that all have."""
        found = [rank.lookup(rid, keys) for rank in self.ranks]
        return max(set.intersection(*map(set, found)), default=0)

    def start(self, rid: str, *keys: str, wait: dict[int, Callable[[], None]] | None = None) -> list[int]:
        """Begins a load on all ranks."""
        pages = range(NUM_PAGES, NUM_PAGES - len(keys), -1)
        indices = []
        for number, rank in enumerate(self.ranks):
            rank.load(rid, keys, indices_of(*pages))
            indices.append(rank.start((wait or {}).get(number, at_once)))
        return indices

    def load(self, rid: str, *keys: str, wait: dict[int, Callable[[], None]] | None = None) -> list[bool]:
        """Of each rank, whether it says that the load has ended well. SGLang takes the worst."""
        indices = self.start(rid, *keys, wait=wait)
        return [rank.finish(index) for rank, index in zip(self.ranks, indices, strict=True)]

    def came(self, *keys: str) -> bool:
        return all(
            holds(pool, NUM_PAGES - number, key) for pool in self.pools for number, key in enumerate(keys)
        )

    def check_integrity(self) -> None:
        for tiers in self.stores:
            tiers.check_integrity()

    def close(self) -> None:
        self.check_integrity()
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            list(pool.map(lambda rank: rank.close(), self.ranks))


@pytest.fixture
def duo_of(tmp_path: Path) -> Iterator[Callable[..., Duo]]:
    """Engines, closed at the end."""
    made: list[Duo] = []

    def make(*settings: dict[str, Any], num_disk: int = 0) -> Duo:
        made.append(Duo(tmp_path, *settings, num_disk=num_disk))
        return made[-1]

    yield make
    for duo in made:
        duo.close()


def test_one_rank_stores_and_both_load(duo_of: Callable[..., Duo]) -> None:
    duo = duo_of(MODE, MODE)
    assert [type(rank._tiers) for rank in duo.ranks] == [LocalTiers, FollowingTiers]
    (tiers,) = duo.stores
    page_bytes = DevicePages(duo.pools[0], PAGE_TOKENS).page_bytes
    assert tiers.wait_ready(20_000 // page_bytes, timeout_s=LONG_S), "all of the memory is one rank's"
    assert duo.lookup("r", *KEYS[:3]) == 0 and duo.offload(*KEYS[:3])
    assert tiers.resident_blocks == (3,)
    assert duo.lookup("r", *KEYS[:5]) == 3
    assert duo.load("r", *KEYS[:3]) == [True, True] and duo.came(*KEYS[:3])
    counted = [metrics.snapshot() for metrics in duo.metrics]
    tokens = sorted(found["kvbm_matched_tokens"] for found in counted)
    sent = sorted(found.get('kvbm_bytes_total{direction="onboard"}', 0) for found in counted)
    assert (tokens, sent) == ([0, 3 * PAGE_TOKENS], [0, 3 * page_bytes]), "each byte is counted once"
    duo.check_integrity()


def test_without_the_setting_each_rank_stores_its_own(duo_of: Callable[..., Duo]) -> None:
    duo = duo_of({}, {})
    assert duo.offload(*KEYS[:3]) and [tiers.resident_blocks for tiers in duo.stores] == [(3,), (3,)]
    assert duo.lookup("r", *KEYS[:3]) == 3
    assert duo.load("r", *KEYS[:3]) == [True, True] and duo.came(*KEYS[:3])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_of_any_number_find_it_again_on_the_disk(size: int, duo_of: Callable[..., Duo]) -> None:
    first = duo_of(MODE | DISK, MODE | DISK, num_disk=20)
    assert first.offload(*KEYS[:4])
    first.close()
    second = duo_of(*[MODE | DISK] * size, num_disk=20)
    assert len(second.stores) == 1 and second.lookup("r", *KEYS) == 4
    assert second.load("r", *KEYS[:4]) == [True] * size and second.came(*KEYS[:4])


@pytest.mark.skipif(NO_NIXL is not None, reason=f"NOT RUN: disk to device by NIXL: {NO_NIXL}")
def test_what_comes_straight_from_the_disk_is_sent_too(duo_of: Callable[..., Duo]) -> None:
    direct = {"KVBM_DISK_TO_DEVICE": "nixl-posix", "DYN_KVBM_CPU_CACHE_GB": None}
    duo = duo_of(*[MODE | DISK | direct] * 2, num_disk=20)
    (tiers,) = duo.stores
    assert duo.offload(*KEYS[:4])
    disk = tiers._lower("disk")
    assert isinstance(disk, SlottedTier)
    with tiers._lock:
        assert tiers._lock.wait_for(lambda: disk.is_direct, LONG_S)
        tiers._chain.host.reset()
    assert duo.lookup("r", *KEYS[:5]) == 4
    assert duo.load("r", *KEYS[:4]) == [True, True] and duo.came(*KEYS[:4])
    assert tiers.resident_blocks == (0, 4), "no host slot was filled"


def check_own_copies(duo: Duo, caplog: pytest.LogCaptureFixture, words: str) -> None:
    assert duo.offload(*KEYS[:3]) and [tiers.resident_blocks for tiers in duo.stores] == [(3,), (3,)]
    assert duo.load("r", *KEYS[:3]) == [True, True] and duo.came(*KEYS[:3])
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1 and OWN_COPIES in lines[0] and words in lines[0]


def test_a_rank_where_it_is_not_set(duo_of: Callable[..., Duo], caplog: pytest.LogCaptureFixture) -> None:
    check_own_copies(duo_of(MODE, {}), caplog, "it is not set on ranks [1] of 2")


def test_a_rank_that_cannot_join(
    duo_of: Callable[..., Duo], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = Group.connect

    def connect_first(group: Group, device: object) -> None:
        if group.rank:
            raise GroupError("this torch has no NCCL")
        group._timeout_s = 0.5  # how long it waits for the other one
        connect(group, device)

    monkeypatch.setattr(Group, "connect", connect_first)
    duo = duo_of(MODE, MODE)
    assert [type(rank._tiers) for rank in duo.ranks] == [LocalTiers, LocalTiers]
    check_own_copies(duo, caplog, "rank 1: this torch has no NCCL")


def raises() -> None:
    raise RuntimeError("CUDA error")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_load_that_one_rank_cannot_begin_fails_and_the_next_one_works(
    failing: int, duo_of: Callable[..., Duo]
) -> None:
    duo = duo_of(MODE, MODE)
    duo.offload(*KEYS[:3])
    assert duo.lookup("r", *KEYS[:2]) == 2
    ended = duo.load("r", *KEYS[:2], wait={failing: raises})
    assert not ended[failing] and (failing or not ended[1]), "what the first rank has not, nobody has"
    assert not any(tensor.any() for tensor in tensors_of(duo.pools[1])) or not failing
    assert duo.lookup("next", *KEYS[:3]) == 3
    assert duo.load("next", *KEYS[:3]) == [True, True] and duo.came(*KEYS[:3])


def test_what_the_first_rank_does_not_hold_any_more_fails_everywhere(duo_of: Callable[..., Duo]) -> None:
    duo = duo_of(MODE, MODE)
    duo.offload(*KEYS[:2])
    assert duo.load("r", *KEYS[4:6]) == [False, False]
    assert duo.load("next", *KEYS[:2]) == [True, True] and duo.came(*KEYS[:2])


def test_what_is_forgotten_before_it_is_loaded_fails_everywhere(duo_of: Callable[..., Duo]) -> None:
    duo = duo_of(MODE, MODE)
    duo.offload(*KEYS[:2])
    (tiers,) = duo.stores

    def forget() -> None:
        with tiers._lock:
            tiers._chain.host.reset()

    assert duo.load("r", *KEYS[:2], wait={0: forget}) == [False, False]
    duo.offload(*KEYS[4:6])
    assert duo.load("next", *KEYS[4:6]) == [True, True] and duo.came(*KEYS[4:6])


def test_loads_that_are_given_up_keep_the_ranks_in_step(duo_of: Callable[..., Duo]) -> None:
    """As for a flush of the cache, at a moment when only one of the ranks has begun."""
    duo = duo_of(MODE, MODE)
    duo.offload(*KEYS[:3])
    go_on = threading.Event()
    duo.start("r", *KEYS[:2], wait={1: lambda: go_on.wait(LONG_S) or None})
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda rank: rank.quiesce(), duo.ranks))
    go_on.set()
    assert duo.load("next", *KEYS[:3]) == [True, True] and duo.came(*KEYS[:3])


@pytest.mark.parametrize("gone", [0, 1])
def test_when_a_rank_is_gone_the_others_find_nothing_and_do_not_hang(
    gone: int, duo_of: Callable[..., Duo]
) -> None:
    duo = duo_of(MODE, MODE)
    duo.offload(*KEYS[:3])
    duo.ranks[gone].close()
    other = duo.ranks[1 - gone]
    other.load("r", KEYS[:2], indices_of(1, 2))
    assert not other.finish(other.start(at_once))
    assert other.lookup("next", KEYS[2:3]) == [], "which the first rank still has"


def test_a_load_has_a_name_of_its_own() -> None:
    names = {turn_of(number, rid) for number in range(100) for rid in ("a", "b")}
    assert len(names) == 200 and all(1 << 62 <= name < 1 << 63 for name in names)
