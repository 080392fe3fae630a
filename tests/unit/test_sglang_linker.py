"""The direct linker without SGLang: what its hooks do, on plain tensors, in the order in which SGLang calls
them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT RUN: SGLang's linker; torch is missing")

from kvbm_core.config import KvbmSettings  # noqa: E402
from kvbm_core.control.desk import Report  # noqa: E402
from kvbm_core.control.messages import Order, Result, Verb  # noqa: E402
from kvbm_core.errors import ConfigError, Outcome, StuckCopyError  # noqa: E402
from kvbm_core.identity.fields import Description  # noqa: E402
from kvbm_core.identity.roots import Stamp  # noqa: E402
from kvbm_core.identity.weights import WeightsIdentity  # noqa: E402
from kvbm_core.observe.labels import MissReason  # noqa: E402
from kvbm_core.observe.metrics import Metrics  # noqa: E402
from kvbm_core.observe.why import Account  # noqa: E402
from kvbm_core.runtime.assembly import metrics_of  # noqa: E402
from kvbm_core.runtime.local import LocalTiers  # noqa: E402
from kvbm_core.storage import memory_room  # noqa: E402
from kvbm_core.storage.disk.allocate import FileOptions, open_file  # noqa: E402
from kvbm_core.storage.disk.folder import TOP  # noqa: E402
from kvbm_core.storage.disk.io import Transfer  # noqa: E402
from kvbm_core.storage.disk.recovery import Recovery  # noqa: E402
from kvbm_core.storage.memory_room import MemoryRoom  # noqa: E402
from kvbm_core.testing import toy_store  # noqa: E402
from kvbm_core.testing.executor_bench import LONG_S  # noqa: E402
from kvbm_core.transfer.executors.memcpy import MemcpyExecutor  # noqa: E402
from kvbm_core.transfer.movers import disk as disk_mover  # noqa: E402
from kvbm_core.types import BlockKey  # noqa: E402
from kvbm_sglang import linker_assembly, linker_tiers, load_counter  # noqa: E402
from kvbm_sglang.device_pool import DevicePages  # noqa: E402
from kvbm_sglang.identity import page_keys  # noqa: E402
from kvbm_sglang.linker_assembly import Ranks, assemble, why_late  # noqa: E402
from kvbm_sglang.load_counter import LoadCounter  # noqa: E402
from kvbm_sglang.weights import EngineWeights, weight_sources, weights_identity  # noqa: E402
from tests import third_kind  # noqa: E402
from tests.began import begins_now  # noqa: E402
from tests.faults.doubles import FailingIo  # noqa: E402
from tests.outside import sqlite_store  # noqa: E402
from tests.unit.disk_mover_bench import GatedIo  # noqa: E402
from tests.unit.sglang_pools import (  # noqa: E402
    LAYERS,
    NUM_PAGES,
    PAGE_TOKENS,
    MHATokenToKVPool,
    MLATokenToKVPool,
    fill,
    holds,
    indices_of,
)

ENGINE = Description((("dtype", "float32"),), (), ())
KEYS = [f"{number:064x}" for number in range(12)]
KINDS: dict[str, Callable[[], Any]] = {
    "mha": MHATokenToKVPool,
    "hnd": lambda: MHATokenToKVPool(layout="hnd"),
    "mla": MLATokenToKVPool,
}


def at_once() -> None:
    """Device pages that may be touched now."""


class Bench:
    """One rank's linker, as SGLang drives it. Settings as in ``linker_extra_config``."""

    def __init__(
        self,
        folder: Path,
        pool: Any = None,
        *,
        model: str = "",
        engine: Description = ENGINE,
        weights: WeightsIdentity | None = None,
        num_disk: int | None = None,
        **settings: Any,
    ) -> None:
        self.pool = pool or MHATokenToKVPool()
        pages = DevicePages(self.pool, PAGE_TOKENS)
        given = {
            "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": 12,
            "DYN_KVBM_DISK_CACHE_DIR": str(folder),
            "DYN_KVBM_DISK_DISABLE_O_DIRECT": True,
            "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": True,
            **settings,
        }
        ranks = Ranks({"tp_rank": 0, "tp_size": 1}, 1)
        read = KvbmSettings.from_env(given)
        self.metrics = metrics_of(read)
        make = partial(assemble, engine=engine, ranks=ranks, num_layers=LAYERS)
        model = model or str(_weights(folder))
        self.weights = weights or _weights_began_now(model)
        self.linker = make(pages, read, self.metrics, model=model, weights=self.weights)
        slots, disk_slots = read.host_tier_slots(pages.page_bytes), read.disk_cache_override_num_blocks or 0
        disk_slots = disk_slots if num_disk is None else num_disk
        assert self.tiers.wait_ready(slots, disk_slots, timeout_s=LONG_S)

    @property
    def tiers(self) -> Any:
        """Below it."""
        assert self.linker._tiers is not None
        return self.linker._tiers

    def offload(self, *keys: str) -> bool:
        """From the first pages; whether SGLang is told that it ended well."""
        for page, key in enumerate(keys, 1):
            fill(self.pool, page, key)
        self.linker.store(keys, indices_of(*range(1, 1 + len(keys))), at_once)
        self.wait_ended(1)
        ended = self.linker.take_ended_store()
        assert self.tiers.wait_stored(LONG_S)
        return ended

    def wait_ended(self, count: int) -> None:
        """As SGLang's loop does by asking again and again."""
        with self.linker._changed:
            assert self.linker._changed.wait_for(lambda: self.linker.num_ended_stores() >= count, LONG_S)

    def load(self, rid: str, *keys: str) -> bool:
        """Into the last pages, the first key last."""
        self.linker.load(rid, keys, indices_of(*self.pages_for(*keys)))
        index = self.linker.start(at_once)
        self.linker.counter.set_consumer(index)
        self.linker.counter.wait_until(0)
        return self.linker.finish(index)

    def pages_for(self, *keys: str) -> list[int]:
        """Where ``load`` puts them."""
        return [NUM_PAGES - number for number in range(len(keys))]

    def came(self, *keys: str) -> bool:
        """Whether they are where ``load`` puts them."""
        return all(holds(self.pool, page, key) for page, key in zip(self.pages_for(*keys), keys, strict=True))

    def close(self) -> None:
        """Checks the books first."""
        self.tiers.check_integrity()
        self.linker.close()


def _weights(folder: Path) -> Path:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "a.safetensors").write_bytes(b"weights")
    return model


def _weights_began_now(model: str) -> WeightsIdentity:
    with begins_now("kvbm_sglang.weights"):
        return weights_identity(None, model)


@pytest.fixture
def bench_of(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Benches, closed at the end."""
    made: list[Bench] = []

    def make(pool: Any = None, **settings: Any) -> Bench:
        made.append(Bench(tmp_path, pool, **settings))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.mark.parametrize("kind", KINDS)
def test_pages_come_back_to_other_places(kind: str, bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(KINDS[kind]())
    assert bench.linker.lookup("r", KEYS[:3]) == []
    assert bench.offload(*KEYS[:3])
    assert bench.linker.lookup("r", KEYS[:5]) == [1, 2, 3]
    assert bench.load("r", *KEYS[:3]) and bench.came(*KEYS[:3])
    assert bench.linker.lookup("r", KEYS[1:3]) == [1, 2]  # the tree has the first one itself
    assert bench.linker.lookup("r", []) == []


def test_the_page_counts_each_request_once(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.offload(*KEYS[:3])
    for _ in range(3):  # as a request that waits is
        assert bench.linker.lookup("new", KEYS[6:10]) == []
        assert bench.linker.lookup("r", KEYS[:4]) == [1, 2, 3]
    assert bench.load("r", *KEYS[:3])
    counted = bench.metrics.snapshot()
    assert counted["kvbm_matched_tokens"] == 3 * PAGE_TOKENS
    assert bench.metrics.hit_window() == (3, 0, 0, 8)
    assert counted["kvbm_host_cache_hit_rate"] == 3 / 8


def test_they_are_found_again_after_a_restart(bench_of: Callable[..., Bench]) -> None:
    first = bench_of(DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=20)
    assert first.offload(*KEYS[:4])
    first.linker.close()
    second = bench_of(MHATokenToKVPool(num_pages=NUM_PAGES), DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=20)
    assert second.linker.lookup("r", KEYS) == [1, 2, 3, 4]
    assert second.load("r", *KEYS[:4]) and second.came(*KEYS[:4])


@pytest.fixture(name="other_stores")
def other_stores_fixture(tmp_path: Path) -> Iterator[None]:
    """Lower tiers that do not come with kvbm."""
    toy_store.register()
    toy_store.forget_all()
    third_kind.register()
    with sqlite_store(tmp_path / "site"):
        yield


@pytest.mark.usefixtures("other_stores")
@pytest.mark.parametrize("url", ["toy://linker?seed=1", "shelf://linker", "sqlite://{}/objects.db"])
def test_what_a_remote_tier_has_is_its_hit_once(
    url: str, tmp_path: Path, bench_of: Callable[..., Bench]
) -> None:
    settings = {"KVBM_REMOTE_URL": url.format(tmp_path), "KVBM_REMOTE_CACHE_GB": 0}
    settings["DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS"] = 40
    assert bench_of(**settings).offload(*KEYS[:3])
    bench = bench_of(**settings)
    ends_at_s = time.monotonic() + LONG_S
    while bench.linker.lookup("r", KEYS[:3]) != [1, 2, 3]:  # as a request that waits is asked for
        assert time.monotonic() < ends_at_s
        with bench.tiers._lock:
            assert bench.tiers._lock.wait_for(lambda: not len(bench.tiers._jobs), LONG_S)
    assert bench.load("r", *KEYS[:3]) and bench.came(*KEYS[:3])
    assert bench.metrics.hit_window() == (0, 0, 3, 3)
    bench.linker.lookup("again", KEYS[:3])
    assert bench.load("again", *KEYS[:3])
    assert bench.metrics.hit_window() == (3, 0, 3, 6)


@pytest.mark.shows("KVBM_START_WAIT_S")
def test_the_start_waits_for_what_is_on_the_disk(
    bench_of: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=12, num_disk=12)
    assert bench.offload(*KEYS[:4])
    bench.close()
    is_waited_for, wait_ready, scan = threading.Event(), LocalTiers.wait_ready, Recovery._look_through

    def note(tiers: LocalTiers, *slots: int, timeout_s: float) -> bool:
        if timeout_s == 7.0:  # not this test's own
            is_waited_for.set()
        return wait_ready(tiers, *slots, timeout_s=timeout_s)

    def scan_late(recovery: Recovery) -> None:
        is_waited_for.wait(1.0)
        scan(recovery)

    monkeypatch.setattr(LocalTiers, "wait_ready", note)
    monkeypatch.setattr(Recovery, "_look_through", scan_late)
    bench = bench_of(DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=12, num_disk=0, KVBM_START_WAIT_S=7)
    assert is_waited_for.is_set() and bench.linker.lookup("r", KEYS[:4]) == [1, 2, 3, 4]


def test_with_a_disk_alone_pages_pass_through_a_little_memory(bench_of: Callable[..., Bench]) -> None:
    sizes = {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": None, "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": 6}
    first = bench_of(**sizes)
    assert first.offload(*KEYS[:4])
    counted = first.metrics.snapshot()
    assert (counted["kvbm_offload_blocks_d2d"], counted["kvbm_offload_blocks_d2h"]) == (4, 0)
    first.linker.close()
    second = bench_of(**sizes)
    assert second.linker.lookup("r", KEYS) == [1, 2, 3, 4]
    assert second.load("r", *KEYS[:4]) and second.came(*KEYS[:4])


def test_another_layout_in_the_same_folder_finds_nothing(bench_of: Callable[..., Bench]) -> None:
    first = bench_of(DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=20)
    assert first.offload(*KEYS[:4])
    first.linker.close()
    second = bench_of(MHATokenToKVPool(layout="hnd"), DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=20)
    assert second.linker.lookup("r", KEYS) == []


def test_a_shorter_hit_of_another_rank_is_taken(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.offload(*KEYS[:4])
    assert bench.linker.lookup("r", KEYS[:4]) == [1, 2, 3, 4]
    assert bench.load("r", *KEYS[:2]) and bench.came(*KEYS[:2])


def test_loads_of_one_batch_end_together(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.offload(*KEYS[:4])
    bench.linker.load("a", KEYS[:2], indices_of(5, 6))
    bench.linker.load("b", KEYS[2:4], indices_of(7, 8))
    index = bench.linker.start(at_once)
    assert index >= 0 and bench.linker.start(at_once) == -1
    assert bench.linker.finish(index)
    assert [holds(bench.pool, page, key) for page, key in zip((5, 6, 7, 8), KEYS, strict=False)] == [True] * 4


def test_what_cannot_be_loaded_says_so_and_is_queued_all_the_same(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.offload(*KEYS[:2])
    bench.linker.load("a", KEYS[:3], indices_of(5, 6, 7))  # the third is nowhere
    bench.linker.load("b", KEYS[:1], indices_of(8))
    index = bench.linker.start(at_once)
    assert index >= 0
    bench.linker.counter.set_consumer(index)
    bench.linker.counter.wait_until(LAYERS - 1)
    assert not bench.linker.finish(index)
    assert bench.load("b", *KEYS[:1])
    assert not bench.linker.finish(index) and not bench.linker.finish(-1)


def test_indices_that_are_no_pages_fail_and_hold_nothing(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=2)
    bench.offload(*KEYS[:2])
    bench.linker.load("a", KEYS[:2], indices_of(5, 6) + 1)
    assert not bench.linker.finish(bench.linker.start(at_once))
    bench.linker.store(KEYS[2:4], indices_of(5), at_once)
    bench.wait_ended(1)
    assert not bench.linker.take_ended_store()
    assert bench.offload(*KEYS[4:6])  # all slots can be had


def test_a_disk_that_fails_is_no_garbage(
    bench_of: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench_of(DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=20)
    first.offload(*KEYS[:4])
    first.linker.close()
    monkeypatch.setattr(
        disk_mover,
        "make_file_io",
        lambda fd, *, is_direct: FailingIo(fd, lambda transfer, is_write: not is_write, -5),
    )
    bench = bench_of(DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=20)
    assert bench.linker.lookup("r", KEYS[:4]) == [1, 2, 3, 4]
    assert not bench.load("r", *KEYS[:4])
    assert bench.linker.lookup("r", KEYS[:4]) == []  # fails once: the next time it is computed
    assert bench.offload(*KEYS[:4]) and bench.load("r", *KEYS[:4]) and bench.came(*KEYS[:4])


def test_a_load_that_was_cancelled_holds_nothing(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=2)
    bench.offload(*KEYS[:2])
    bench.linker.load("a", KEYS[:2], indices_of(5, 6))
    assert bench.linker.cancel("a") and not bench.linker.cancel("a")
    assert bench.linker.start(at_once) == -1
    assert bench.offload(*KEYS[2:4])


def test_stores_end_in_order(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    gate = threading.Event()
    bench.linker.store(KEYS[:1], indices_of(1), partial(gate.wait, LONG_S))
    bench.linker.fail_store()
    bench.linker.store(KEYS[1:2], indices_of(2), at_once)
    assert bench.linker.num_ended_stores() == 0
    gate.set()
    bench.wait_ended(3)
    assert [bench.linker.take_ended_store() for _ in range(3)] == [True, False, True]


def test_stores_that_wait_are_bounded(
    bench_of: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linker_tiers, "MAX_WAITING_STORES", 2)
    bench = bench_of()
    gate = threading.Event()
    for page in (1, 2, 3):
        bench.linker.store([KEYS[page]], indices_of(page), partial(gate.wait, LONG_S))
    gate.set()
    bench.wait_ended(3)
    assert [bench.linker.take_ended_store() for _ in range(3)] == [True, True, False]
    assert bench.metrics.snapshot()['kvbm_dropped_blocks_total{reason="queue_full"}'] == 1


def test_pages_are_read_only_when_they_have_been_written(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.linker.store(KEYS[:1], indices_of(1), lambda: fill(bench.pool, 1, KEYS[0]))
    bench.wait_ended(1)
    assert bench.load("r", KEYS[0]) and bench.came(KEYS[0])


def test_quiesce_waits_and_forgets_what_was_asked_but_no_block(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.offload(*KEYS[:2])
    begun, gate = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        gate.wait(LONG_S)

    bench.linker.store(KEYS[2:3], indices_of(3), wait)
    bench.linker.load("a", KEYS[:1], indices_of(5))
    assert begun.wait(LONG_S)
    threading.Timer(0.0, gate.set).start()
    assert bench.linker.quiesce()
    assert bench.linker.num_ended_stores() == 0 and not bench.linker.cancel("a")
    assert bench.linker.lookup("r", KEYS) == [1, 2, 3]


def test_quiesce_ends_without_what_does_not_and_does_not_keep_it(
    bench_of: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linker_tiers, "QUIESCE_TIMEOUT_S", 0.01)
    bench = bench_of()
    gate = threading.Event()
    fill(bench.pool, 1, KEYS[0])
    bench.linker.store(KEYS[:1], indices_of(1), partial(gate.wait, LONG_S))
    assert not bench.linker.quiesce()
    fill(bench.pool, 1, KEYS[5])  # the page is somebody else's now
    gate.set()
    with bench.linker._changed:
        assert bench.linker._changed.wait_for(lambda: not bench.linker._num_storing, LONG_S)
    assert bench.linker.lookup("r", KEYS[:1]) == []
    assert bench.offload(KEYS[0])  # later ones are kept


def test_a_store_that_copies_while_quiesce_gives_up_is_not_kept(
    bench_of: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linker_tiers, "QUIESCE_TIMEOUT_S", 0.01)
    bench = bench_of()
    is_copying, go_on = threading.Event(), threading.Event()
    copy = MemcpyExecutor._copy

    def slow_copy(self: MemcpyExecutor, *arguments: Any) -> None:
        is_copying.set()
        assert go_on.wait(LONG_S)
        copy(self, *arguments)

    monkeypatch.setattr(MemcpyExecutor, "_copy", slow_copy)
    fill(bench.pool, 1, KEYS[0])
    bench.linker.store(KEYS[:1], indices_of(1), at_once)
    assert is_copying.wait(LONG_S) and not bench.linker.quiesce()
    fill(bench.pool, 1, KEYS[5])  # the page is somebody else's now
    go_on.set()
    with bench.linker._changed:
        assert bench.linker._changed.wait_for(lambda: not bench.linker._num_storing, LONG_S)
    assert bench.linker.lookup("r", KEYS[:1]) == []
    assert bench.offload(KEYS[0])  # later ones are kept


def test_new_weights_find_nothing_of_the_old_ones(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.offload(*KEYS[:2])
    bench.linker.quiesce()
    bench.weights.changed("a test")
    assert bench.linker.lookup("r", KEYS) == []
    assert bench.offload(*KEYS[:2]) and bench.load("r", *KEYS[:2])


def test_after_a_flush_pages_of_the_same_weights_are_found_and_no_others(tmp_path: Path) -> None:
    model, folder = torch.nn.Linear(2, 2), str(_weights(tmp_path))
    with begins_now("kvbm_sglang.weights"):
        weights = EngineWeights(weight_sources(None, folder), [model])
    bench = Bench(tmp_path, model=folder, weights=weights, DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=12)
    assert bench.offload(*KEYS[:2]) and bench.tiers.resident_blocks[1] == 2
    for flush, found in ((1, [1, 2]), (2, [])):
        model.weight.data += flush - 1
        weights.flushed(flush)
        bench.linker.quiesce()
        assert bench.linker.lookup(f"{flush}", KEYS[:2]) == found
    assert bench.offload(*KEYS[:2]) and bench.load("r", *KEYS[:2]), "in host memory"
    assert bench.tiers.resident_blocks[1] == 2
    bench.close()


class LateWeights(WeightsIdentity):
    """Known when the test says so."""

    def __init__(self, text: str = "weights") -> None:
        super().__init__({}, 0)
        self.text = text
        self.gate = threading.Event()

    def _find_out(self) -> Stamp:
        assert self.gate.wait(LONG_S)
        return Stamp(self.text, is_lasting=True)


def test_the_disk_joins_when_it_is_known_which_weights_these_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linker_assembly, "WEIGHTS_WAIT_S", 0.0)
    settings = {"DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": 12}
    weights = LateWeights()
    bench = Bench(tmp_path, weights=weights, **settings)
    assert bench.offload(*KEYS[:2])
    assert bench.load("before", *KEYS[:2]) and bench.came(*KEYS[:2])
    assert bench.tiers.resident_blocks == (2, 0), "names that another process may give to other pages"
    assert bench.linker.lookup("between", KEYS[:2]) == [1, 2]
    weights.gate.set()
    assert weights.wait(LONG_S)
    assert bench.load("between", *KEYS[:2]) and bench.came(*KEYS[:2]), "SGLang would answer a 503"
    assert bench.tiers.wait_stored(LONG_S) and bench.tiers.resident_blocks == (2, 0)
    assert bench.linker.lookup("after", KEYS[:2]) == []
    assert bench.offload(*KEYS[2:4]) and bench.tiers.resident_blocks[1] == 2
    bench.close()
    for text, found in (("others", []), ("weights", [1, 2])):
        weights = LateWeights(text)
        weights.gate.set()
        monkeypatch.setattr(linker_assembly, "WEIGHTS_WAIT_S", LONG_S)
        bench = Bench(tmp_path, weights=weights, **settings)
        assert bench.linker.lookup("r", KEYS[2:4]) == found
        bench.close()


def test_what_was_found_with_the_weights_before_is_not_loaded(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.offload(KEYS[0])
    assert bench.linker.lookup("r", KEYS[:1]) == [1]
    bench.weights.changed("a test")
    assert not bench.load("r", KEYS[0])
    bench.close()


@pytest.mark.parametrize("what", ["unknown", "process_only"])
def test_settings_that_mean_nothing_elsewhere_keep_the_disk_off(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ENGINE._replace(**{what: ("a_setting",)})
    settings = {"DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": 12}
    bench = Bench(tmp_path, engine=engine, num_disk=0, **settings)
    assert bench.offload(KEYS[0]) and bench.load("r", KEYS[0]) and bench.came(KEYS[0])
    assert not (tmp_path / TOP).exists()
    bench.close()
    (line,) = [record.getMessage() for record in caplog.records if "a_setting" in record.getMessage()]
    assert "nothing is kept on disk" in line


def folders_in(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / TOP).iterdir())


def test_models_find_their_pages_in_whatever_order_they_start(tmp_path: Path) -> None:
    settings = {"DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": 12}
    models = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        models.append(str(_weights(tmp_path / name)))

    def life(order: list[int], *, is_new: bool) -> None:
        benches = {number: Bench(tmp_path, model=models[number], **settings) for number in order}
        for number, bench in benches.items():
            key = KEYS[number]
            assert bench.offload(key) if is_new else bench.load("r", key) and bench.came(key)
            bench.close()

    life([0, 1], is_new=True)
    folders = folders_in(tmp_path)
    life([1, 0], is_new=False)
    life([0], is_new=False)
    life([1], is_new=False)
    assert folders_in(tmp_path) == folders and len(folders) == 2


def test_a_model_that_is_trained_on_leaves_no_files_behind(tmp_path: Path) -> None:
    settings = {"DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": 12}
    model = _weights(tmp_path)
    for step in range(3):
        (model / "a.safetensors").write_bytes(b"weights of step %d" % step)
        bench = Bench(tmp_path, model=str(model), **settings)
        assert not bench.load("r", KEYS[0]), "of other weights"
        assert bench.offload(KEYS[0])
        bench.close()
    (folder,) = folders_in(tmp_path)
    assert len(list(folder.glob("*.blocks"))) == 1
    bench = Bench(tmp_path, model=str(model), **settings)
    assert bench.load("r", KEYS[0]) and bench.came(KEYS[0])
    bench.close()


def test_a_disk_that_another_process_has_joins_later(tmp_path: Path) -> None:
    """The engine before was killed and still gives its memory back: its file is locked, its folder is not."""
    settings = {"DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": 12}
    first = Bench(tmp_path, **settings)
    first.offload(KEYS[0])
    first.close()
    (path,) = folders_in(tmp_path)[0].glob("*.blocks")
    holder = open_file(path, FileOptions(is_direct=False))
    pages, model = DevicePages(MHATokenToKVPool(), PAGE_TOKENS), str(_weights(tmp_path))
    given = {
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": 12,
        "DYN_KVBM_DISK_CACHE_DIR": str(tmp_path),
        "DYN_KVBM_DISK_DISABLE_O_DIRECT": True,
        "KVBM_START_WAIT_S": 0,
        **settings,
    }
    linker = assemble(
        pages,
        KvbmSettings.from_env(given),
        Metrics(),
        model=model,
        engine=ENGINE,
        weights=_weights_began_now(model),
        ranks=Ranks({"tp_rank": 0, "tp_size": 1}, 1),
        num_layers=LAYERS,
    )
    assert linker._tiers is not None
    assert linker._tiers.wait_ready(12, 0, timeout_s=LONG_S) and linker.lookup("r", KEYS[:1]) == []
    holder.close()
    assert linker._tiers.wait_ready(12, 12, timeout_s=LONG_S)
    assert len(linker.lookup("r", KEYS[:1])) == 1
    linker.close()


def test_what_caches_nothing_answers_what_other_ranks_answer() -> None:
    metrics = Metrics()
    linker = assemble(
        None,
        KvbmSettings.from_env({}),
        metrics,
        model="",
        engine=ENGINE,
        weights=weights_identity(None, ""),
        ranks=Ranks({}, 1),
        num_layers=LAYERS,
    )
    assert linker.lookup("r", KEYS) == []
    linker.store(KEYS[:1], indices_of(1), at_once)
    assert linker.num_ended_stores() == 1 and not linker.take_ended_store()
    linker.load("r", KEYS[:1], indices_of(1))
    index = linker.start(at_once)
    assert index >= 0 and not linker.finish(index)
    linker.close()


def test_a_host_tier_that_cannot_be_had_leaves_the_engine_alone(tmp_path: Path) -> None:
    pages, metrics = DevicePages(MHATokenToKVPool(), PAGE_TOKENS), Metrics()
    settings = KvbmSettings.from_env({"DYN_KVBM_CPU_CACHE_GB": 1e6})
    linker = assemble(
        pages,
        settings,
        metrics,
        model=str(tmp_path),
        engine=ENGINE,
        weights=weights_identity(None, str(tmp_path)),
        ranks=Ranks({}, 1),
        num_layers=LAYERS,
    )
    assert linker.lookup("r", KEYS) == [] and metrics.snapshot()['kvbm_failures_total{kind="other"}'] == 1
    linker.close()
    tiny = KvbmSettings.from_env({"DYN_KVBM_CPU_CACHE_GB": 1e-7})
    with pytest.raises(ConfigError, match="holds no block"):
        assemble(
            pages,
            tiny,
            metrics,
            model=str(tmp_path),
            engine=ENGINE,
            weights=weights_identity(None, str(tmp_path)),
            ranks=Ranks({}, 1),
            num_layers=LAYERS,
        )


@pytest.mark.parametrize("num_here", [2, 8])
def test_the_memory_of_all_ranks_together_has_to_be_there(
    tmp_path: Path, num_here: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight ranks of 100 GB started on 500 GB, as each of them found room."""
    pages, metrics = DevicePages(MHATokenToKVPool(), PAGE_TOKENS), Metrics()
    each_bytes = 12 * pages.page_bytes
    room = MemoryRoom(3 * each_bytes, 3 * each_bytes, "a test")
    monkeypatch.setattr(linker_assembly, "available_memory", lambda: room)
    monkeypatch.setattr(memory_room, "taken_by_siblings_bytes", lambda: 2 * each_bytes)
    settings = KvbmSettings.from_env({"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": 12})
    ranks = Ranks({"tp_rank": 0, "tp_size": num_here}, num_here, num_here)
    linker = assemble(
        pages,
        settings,
        metrics,
        model=str(tmp_path),
        engine=ENGINE,
        weights=weights_identity(None, str(tmp_path)),
        ranks=ranks,
        num_layers=LAYERS,
    )
    fits = num_here == 2
    assert (linker._tiers is not None) is fits
    assert fits or ("of host memory but" in caplog.text and "; nothing is cached" in caplog.text)
    linker.close()


def test_the_counter_gives_up_in_time_and_then_says_no() -> None:
    counter, given_up = LoadCounter(LAYERS, timeout_s=0.01), list[int]()

    def give_up(index: int) -> None:
        given_up.append(index)
        counter.end_load(index, has_landed=False)

    counter.give_up = give_up
    index = counter.begin(2)
    counter.end_load(index, has_landed=True)
    counter.set_consumer(index)
    counter.wait_until(0)
    assert given_up == [index] and not counter.finish(index)
    counter.end_load(index, has_landed=True)  # too late
    assert not counter.finish(index)
    counter.wait_until(0)
    assert given_up == [index]


def test_the_counter_does_not_go_on_with_pages_that_are_being_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy that hangs, as on a broken GPU: neither a forward pass nor a free list may have these pages."""
    monkeypatch.setattr(load_counter, "COPY_TIMEOUT_S", 0.01)
    counter = LoadCounter(LAYERS, timeout_s=0.01)
    index = counter.begin(1)
    counter.set_consumer(index)
    for go_on in (partial(counter.wait_until, 0), partial(counter.finish, index)):
        with pytest.raises(StuckCopyError, match="must not be used"):
            go_on()


@pytest.fixture
def stalling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stalling]:
    """Disks that answer no read while they stall."""
    disk = Stalling()
    monkeypatch.setattr(disk_mover, "make_file_io", disk.make_io)
    yield disk
    disk.goes_on.set()


class Stalling:
    """A disk whose reads end when ``goes_on`` is set."""

    def __init__(self) -> None:
        self.goes_on, self.is_reading = threading.Event(), threading.Event()

    def make_io(self, fd: int, *, is_direct: bool) -> GatedIo:
        """As make_file_io."""

        def is_read(transfer: Transfer, is_write: bool) -> bool:
            if not is_write:
                self.is_reading.set()
            return not is_write

        return GatedIo(fd, is_read, None, self.goes_on)


@pytest.mark.parametrize("stop", ["quiesce", "finish", "wait_until"])
def test_a_load_that_was_given_up_never_writes_its_pages(
    stop: str, bench_of: Callable[..., Bench], stalling: Stalling
) -> None:
    """The disk stalls, the load is given up, its pages go to somebody else, the disk goes on."""
    bench = bench_of(DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=12)
    assert bench.offload(*KEYS[:2])
    bench.tiers._chain.host.reset()  # it is on the disk alone
    linker, pages = bench.linker, bench.pages_for(*KEYS[:2])
    linker.counter._timeout_s = 0.01  # SGLang waits no longer for a batch
    linker.load("a", KEYS[:2], indices_of(*pages))
    index = linker.start(at_once)
    linker.counter.set_consumer(index)
    assert stalling.is_reading.wait(LONG_S)
    if stop == "quiesce":
        assert linker.quiesce()
    elif stop == "wait_until":
        linker.counter.wait_until(0)
    assert not linker.finish(index)
    for page in pages:
        fill(bench.pool, page, KEYS[7])
    linker.counter._timeout_s = LONG_S
    assert not bench.load("b", *KEYS[:1])  # the read that is late has its slot still
    stalling.goes_on.set()
    with bench.tiers._lock:
        assert bench.tiers._lock.wait_for(lambda: not len(bench.tiers._jobs), LONG_S)
    assert bench.load("c", *KEYS[:1])  # what is on the disk was not forgotten
    assert holds(bench.pool, pages[0], KEYS[0]) and holds(bench.pool, pages[1], KEYS[7])


@pytest.mark.parametrize("stop", ["finish", "quiesce"])
def test_a_load_that_was_given_up_writes_nothing_when_its_read_ends_well(
    stop: str, bench_of: Callable[..., Bench], stalling: Stalling
) -> None:
    """The disk goes on before its own deadline is over."""
    bench = bench_of(DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=12, KVBM_DISK_DEADLINE_S=10 * LONG_S)
    assert bench.offload(KEYS[0])
    bench.tiers._chain.host.reset()  # it is on the disk alone
    linker, (page,) = bench.linker, bench.pages_for(KEYS[0])
    linker.counter._timeout_s = 0.01
    linker.load("a", KEYS[:1], indices_of(page))
    index = linker.start(at_once)
    linker.counter.set_consumer(index)
    assert stalling.is_reading.wait(LONG_S)
    if stop == "quiesce":
        assert linker.quiesce()
    assert not linker.finish(index)
    fill(bench.pool, page, KEYS[7])
    stalling.goes_on.set()
    with bench.tiers._lock:
        assert bench.tiers._lock.wait_for(lambda: not len(bench.tiers._jobs), LONG_S)
    assert holds(bench.pool, page, KEYS[7])


@pytest.mark.shows("KVBM_DISK_DEADLINE_S")
def test_a_read_of_the_disk_is_given_up_after_its_deadline(
    bench_of: Callable[..., Bench], stalling: Stalling
) -> None:
    bench = bench_of(DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=12, KVBM_DISK_DEADLINE_S=0.05)
    assert bench.offload(*KEYS[:2])
    bench.tiers._chain.host.reset()  # it is on the disk alone
    # Long after the deadline, and long before that of the default.
    recovers = threading.Timer(8.0, stalling.goes_on.set)
    recovers.start()
    try:
        assert not bench.load("a", KEYS[0])
    finally:
        recovers.cancel()
        stalling.goes_on.set()
    with bench.tiers._lock:
        assert bench.tiers._lock.wait_for(lambda: not len(bench.tiers._jobs), LONG_S)
    assert bench.load("b", KEYS[0]) and bench.came(KEYS[0])


def test_a_load_that_waits_for_the_device_is_given_up_at_once(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.offload(*KEYS[:2])
    begun, gate = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert gate.wait(LONG_S)

    pages = bench.pages_for(*KEYS[:2])
    bench.linker.load("a", KEYS[:2], indices_of(*pages))
    index = bench.linker.start(wait)
    assert begun.wait(LONG_S) and bench.linker.quiesce() and not bench.linker.finish(index)
    for page in pages:
        fill(bench.pool, page, KEYS[7])
    gate.set()
    assert bench.offload(KEYS[3]) and bench.load("b", KEYS[3])
    assert holds(bench.pool, pages[1], KEYS[7])


def test_quiesce_says_so_when_a_load_does_not_end(
    bench_of: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linker_tiers, "QUIESCE_TIMEOUT_S", 0.01)
    bench = bench_of()
    bench.offload(KEYS[0])
    is_copying, go_on = threading.Event(), threading.Event()
    copy = MemcpyExecutor._copy

    def slow_copy(self: MemcpyExecutor, *arguments: Any) -> None:
        is_copying.set()
        assert go_on.wait(LONG_S)
        copy(self, *arguments)

    monkeypatch.setattr(MemcpyExecutor, "_copy", slow_copy)
    bench.linker.load("a", KEYS[:1], indices_of(5))
    bench.linker.start(at_once)
    assert is_copying.wait(LONG_S)
    with pytest.raises(StuckCopyError, match="must not be used"):
        bench.linker.quiesce()
    go_on.set()
    with bench.linker._changed:
        assert bench.linker._changed.wait_for(lambda: not bench.linker._loading, LONG_S)


def test_a_batch_without_loads_waits_for_nothing() -> None:
    counter = LoadCounter(LAYERS, timeout_s=LONG_S)
    index = counter.begin(1)
    counter.set_consumer(-1)
    counter.wait_until(0)  # would take the time out
    counter.end_load(index, has_landed=True)
    assert counter.finish(index)
    counter.reset()
    assert counter.consumer_index == -1


@pytest.mark.parametrize(
    ("policy", "is_late"), [("fcfs", True), ("lof", True), ("lpm", False), ("hrrn", False)]
)
def test_a_store_that_comes_too_late_by_the_policy_is_told(policy: str, is_late: bool) -> None:
    shared = KvbmSettings.from_env({"remote_url": "redis://host", "cpu_cache_gb": 1})
    line = why_late(shared, policy)
    assert (f"--schedule-policy {policy} " in line) == is_late == bool(line) and "\n" not in line
    assert not why_late(KvbmSettings.from_env({"cpu_cache_gb": 1}), policy)


def test_an_operator_resets_and_drains(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    control = bench.linker.control
    assert bench.offload(*KEYS[:3])
    assert bench.linker.lookup("r", KEYS[:3]) == [1, 2, 3]
    end = control.submit(Order(verb=Verb.RESET))
    while not bench.tiers._num_resetting:
        time.sleep(0.001)
    assert not end.done() and bench.linker.lookup("s", KEYS[:3]) == []
    assert bench.load("r", *KEYS[:3]) and bench.came(*KEYS[:3])  # what was promised comes
    assert end.result(LONG_S) == Report(Result.DONE, "forgotten: host")
    assert bench.linker.lookup("t", KEYS[:3]) == []
    assert bench.offload(*KEYS[:3])
    assert control.submit(Order(verb=Verb.DRAIN)).result(LONG_S).result is Result.DONE
    assert bench.tiers._chain.holds_back()
    assert bench.linker.lookup("u", KEYS[:3]) == []
    assert not bench.offload(*KEYS[3:5])  # and it has ended, as SGLang counts on
    assert control.submit(Order(verb=Verb.RESUME)).result(LONG_S).result is Result.DONE
    assert not bench.tiers._chain.holds_back()
    assert bench.linker.lookup("v", KEYS[:5]) == [1, 2, 3] and bench.load("v", *KEYS[:3])
    assert bench.linker.namespace


# ---------------------------------------------------------------- why a request missed


def why(bench: Bench, rid: str, *keys: str) -> Account:
    """What is told of a request after its first lookup."""
    bench.linker.lookup(rid, keys)
    (found,) = bench.metrics.why.find(rid)
    return found


def test_a_miss_has_its_reason_and_is_counted_once(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=3)
    assert why(bench, "new", *KEYS[:3]).reason is MissReason.NEVER_SEEN
    assert why(bench, "same", *KEYS[:3]).reason is MissReason.NOT_KEPT
    bench.offload(*KEYS[:3])
    found = why(bench, "part", *KEYS[:5])
    assert (found.reason, found.missed_tokens, found.host_tokens) == (
        MissReason.NEVER_SEEN,
        2 * PAGE_TOKENS,
        3 * PAGE_TOKENS,
    )
    found = why(bench, "whole", *KEYS[:3])
    assert found.reason is None and found.missed_tokens == 0 and found.prompt_tokens == 3 * PAGE_TOKENS
    bench.linker.lookup("other", KEYS[6:9])  # holds nothing
    bench.tiers.wait_ready(1, timeout_s=LONG_S)
    for rid in ("part", "whole"):
        bench.tiers._let_go(rid)
    bench.offload(*KEYS[6:9])
    found = why(bench, "gone", *KEYS[:3])
    assert found.reason is MissReason.EVICTED and "after its last use" in found.text
    bench.linker.lookup("gone", KEYS[:3])  # as a request that waits is
    counted = bench.metrics.snapshot()
    assert counted['kvbm_missed_requests_total{reason="evicted"}'] == 1
    assert counted['kvbm_missed_tokens_total{reason="evicted"}'] == 3 * PAGE_TOKENS


def test_what_came_from_where_is_told_when_it_is_loaded(bench_of: Callable[..., Bench]) -> None:
    first = bench_of(DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=20)
    first.offload(*KEYS[:4])
    first.linker.close()
    bench = bench_of(DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=20)
    found = why(bench, "r", *KEYS[:4])
    assert bench.load("r", *KEYS[:4])
    assert found.reason is None and (found.host_tokens, found.disk_tokens) == (0, 4 * PAGE_TOKENS)


def test_a_page_that_the_filter_kept_from_the_disk(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(
        DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=3,
        DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=20,
        DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER=False,
    )
    bench.offload(*KEYS[:3])
    bench.offload(*KEYS[6:9])
    found = why(bench, "r", *KEYS[:3])
    assert found.reason is MissReason.FILTERED and "filter" in found.text


def test_a_load_that_failed_and_what_is_lost_by_it(
    bench_of: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench_of(DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=20)
    first.offload(*KEYS[:4])
    first.linker.close()
    monkeypatch.setattr(
        disk_mover,
        "make_file_io",
        lambda fd, *, is_direct: FailingIo(fd, lambda transfer, is_write: not is_write, -5),
    )
    bench = bench_of(DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=20)
    found = why(bench, "r", *KEYS[:4])
    assert not bench.load("r", *KEYS[:4])
    assert found.reason is MissReason.FAILED and found.missed_tokens == 4 * PAGE_TOKENS
    assert why(bench, "again", *KEYS[:4]).reason is MissReason.FAILED


def test_new_weights_and_a_drained_engine_are_told(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.offload(*KEYS[:3])
    assert why(bench, "whole", *KEYS[:3]).reason is None
    bench.linker.quiesce()
    bench.weights.changed("a test")
    assert why(bench, "renamed", *KEYS[:3]).reason is MissReason.OTHER_WEIGHTS
    bench.linker.control.is_draining = True
    found = why(bench, "drained", *KEYS[:3])
    assert found.reason is MissReason.NOT_READY and found.missed_tokens == 3 * PAGE_TOKENS


def test_a_page_on_its_way_to_the_host(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    with bench.tiers._lock:
        named = _named(bench, *KEYS[:2])
        reservation = bench.tiers._chain.reserve(named, lambda new: frozenset(named))
    try:
        assert why(bench, "r", *KEYS[:2]).reason is MissReason.IN_FLIGHT
    finally:
        with bench.tiers._lock:
            bench.tiers._chain.stored(reservation, Outcome.REJECTED)


def _named(bench: Bench, *keys: str) -> list[BlockKey]:
    assert bench.linker._roots is not None
    return page_keys(bench.linker._roots.now().hash, list(keys))
