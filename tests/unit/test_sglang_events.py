"""KV events under SGLang: the linker's, without SGLang, under the hashes that SGLang publishes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT RUN: SGLang's linker; torch is missing")

from kvbm_core.events import publisher as publisher_module  # noqa: E402
from kvbm_core.events.consumer import ZmqReader  # noqa: E402
from kvbm_core.events.wire import BlockStored, decode_batch  # noqa: E402
from kvbm_sglang import linker_assembly  # noqa: E402
from kvbm_sglang.events import published_hash  # noqa: E402
from kvbm_sglang.linker_assembly import Ranks  # noqa: E402
from tests.unit.sglang_pools import indices_of  # noqa: E402
from tests.unit.test_consolidator import Listener  # noqa: E402
from tests.unit.test_sglang_linker import Bench, LateWeights  # noqa: E402

PATIENCE_S = 20.0
KEYS = [f"{number:016x}{0:048x}" for number in range(1, 13)]  # which differ in what is published of them


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a reader that comes late hears something soon."""
    monkeypatch.setattr(publisher_module, "HEARTBEAT_S", 0.1)


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "what was waited for did not come"


def settings(folder: Path) -> dict[str, str]:
    return {
        "KVBM_EVENTS": "zmq",
        "KVBM_EVENTS_ENDPOINT": f"ipc://{folder}/a",
        "KVBM_EVENTS_REPLAY_ENDPOINT": f"ipc://{folder}/b",
    }


@pytest.mark.shows("KVBM_EVENTS=zmq", "KVBM_EVENTS_ENDPOINT", "KVBM_EVENTS_REPLAY_ENDPOINT")
def test_a_router_sees_host_and_disk_and_after_a_restart_what_is_asked_for(short_path: Path) -> None:
    given = settings(short_path)
    disk = {"DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": 20}
    some = {published_hash(key) for key in KEYS[:4]}
    reader = ZmqReader(given["KVBM_EVENTS_ENDPOINT"], given["KVBM_EVENTS_REPLAY_ENDPOINT"])

    def sees(expected: dict[tuple[str, int], set[int]]) -> bool:
        reader.poll(0.02)
        return reader.picture.is_current and reader.picture.places == expected

    try:
        bench = Bench(short_path, **given, **disk)
        assert bench.offload(*KEYS[:4])
        assert bench.tiers.wait_stored(10.0)
        wait_for(lambda: sees({("CPU_TIER1", 0): some, ("CPU_TIER2", 0): some}))
        bench.linker.close()
        bench = Bench(short_path, **given, **disk)
        wait_for(lambda: sees({}))
        bench.linker.lookup("a", KEYS[:3])
        wait_for(lambda: sees({("CPU_TIER2", 0): {published_hash(key) for key in KEYS[:3]}}))
        bench.weights.changed("a test")
        bench.linker.lookup("b", KEYS[:3])
        wait_for(lambda: sees({}))
        bench.linker.close()
    finally:
        reader.close()


def test_when_it_becomes_known_which_weights_these_are_old_names_are_void(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linker_assembly, "WEIGHTS_WAIT_S", 0.0)
    given = settings(short_path)
    weights = LateWeights()
    reader = ZmqReader(given["KVBM_EVENTS_ENDPOINT"], given["KVBM_EVENTS_REPLAY_ENDPOINT"])
    bench = Bench(short_path, weights=weights, DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS=20, **given)

    def sees(*keys: str) -> bool:
        reader.poll(0.02)
        there = reader.picture.places.get(("CPU_TIER1", 0), frozenset())
        return reader.picture.is_current and there == {published_hash(key) for key in keys}

    try:
        assert bench.offload(*KEYS[:2])
        wait_for(lambda: sees(*KEYS[:2]))
        may_go = threading.Event()
        engine_has_written: Any = partial(may_go.wait, PATIENCE_S)
        bench.linker.store(KEYS[2:4], indices_of(1, 2), engine_has_written)
        weights.gate.set()
        assert weights.wait(PATIENCE_S)
        assert bench.linker.lookup("after", KEYS[:2]) == [], "under these names they are not found"
        may_go.set()
        bench.wait_ended(1)
        assert bench.linker.take_ended_store()
        assert bench.offload(*KEYS[4:6])
        wait_for(lambda: sees(*KEYS[4:6]))
    finally:
        bench.close()
        reader.close()


def test_what_sglang_does_not_tell_is_not_told(short_path: Path) -> None:
    given = settings(short_path)
    bench = Bench(short_path, **given)
    listener = Listener(given["KVBM_EVENTS_ENDPOINT"])
    try:
        wait_for(lambda: bool(listener.hear() or listener.batches))
        assert bench.offload(*KEYS[:2])

        def events() -> list[BlockStored]:
            listener.hear()
            batches = [decode_batch(payload) for _, payload in listener.batches]
            told = [event for batch in batches if batch is not None for event in batch.events]
            return [event for event in told if isinstance(event, BlockStored)]

        wait_for(lambda: bool(events()))
        (event,) = events()
        assert event.token_ids == [] and event.block_hashes == [published_hash(key) for key in KEYS[:2]]
    finally:
        listener.close()
        bench.linker.close()


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        ({"tp_rank": 0, "tp_size": 2, "pp_rank": 0}, True),
        ({"tp_rank": 1, "tp_size": 2, "pp_rank": 0}, False),
        ({"tp_rank": 0, "tp_size": 1, "pp_rank": 1}, False),
    ],
)
def test_the_first_of_the_ranks_speaks(shard: dict[str, int], expected: bool) -> None:
    assert Ranks(shard, 2).is_first is expected


def test_pages_have_the_hashes_that_sglang_publishes() -> None:
    assert published_hash("f" * 64) == -1 and published_hash("0" * 15 + "1" + "f" * 48) == 1
    assert published_hash("8" + "0" * 63) == -(2**63) and published_hash("7" + "f" * 63) == 2**63 - 1
    assert -(2**63) <= published_hash("no hexadecimal number") < 2**63


@pytest.mark.shows("KVBM_EVENTS", "KVBM_EVENTS=zmq", "KVBM_EVENTS_MEDIUM", "KVBM_EVENTS_TOPIC")
def test_the_topic_and_the_name_of_the_host_tier(short_path: Path) -> None:
    given = {**settings(short_path), "KVBM_EVENTS_MEDIUM": "RAM", "KVBM_EVENTS_TOPIC": "kv"}
    places = {("RAM", 0): {published_hash(key) for key in KEYS[:3]}}
    ends = (given["KVBM_EVENTS_ENDPOINT"], given["KVBM_EVENTS_REPLAY_ENDPOINT"])
    reader, other = ZmqReader(*ends, "kv"), ZmqReader(*ends, "other")
    try:
        bench = Bench(short_path, **given)
        assert bench.offload(*KEYS[:3])

        def is_met() -> bool:
            for each in (reader, other):
                each.poll(0.02)
            return reader.picture.is_current and reader.picture.places == places

        wait_for(is_met)
        assert not other.picture.places
        bench.close()
    finally:
        reader.close()
        other.close()
