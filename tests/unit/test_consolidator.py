"""The consolidator: one stream of the engine's device events and ours, by hand and over ZMQ."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvbm_core.errors import ConfigError
from kvbm_core.events import publisher as publisher_module
from kvbm_core.events.consolidator import Consolidator, Ends
from kvbm_core.events.consumer import Picture
from kvbm_core.events.log import Cleared, EventLog, Names
from kvbm_core.events.merge import (
    Dedup,
    EngineCleared,
    EngineRemoved,
    EngineStored,
    Merge,
    Passthrough,
)
from kvbm_core.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event, decode_batch
from kvbm_core.events.zmq_sink import Place
from kvbm_core.observe.metrics import Metrics
from kvbm_core.types import BlockKey, SequenceHash, Tier, block_key

MEDIA = {Tier.HOST: "CPU_TIER1", Tier.DISK: "CPU_TIER2", Tier.REMOTE: "REMOTE"}
PATIENCE_S = 20.0


def on_device(*hashes: int, parent: int | None = None, size: int = 1) -> EngineStored:
    tokens = [h * 10 + i for h in hashes for i in range(size)]
    return EngineStored(list(hashes), size, parent, tokens, medium="GPU")


def in_host(*hashes: int, parent: int | None = None, medium: str = "CPU_TIER1", size: int = 1) -> BlockStored:
    tokens = [h * 10 + i for h in hashes for i in range(size)]
    return BlockStored(list(hashes), parent, tokens, size, None, medium, None, group_idx=0)


def out_of_host(*hashes: int, medium: str = "CPU_TIER1") -> BlockRemoved:
    return BlockRemoved(list(hashes), medium, 0)


def told(events: Iterable[Event]) -> list[tuple[str, tuple[object, ...], str | None]]:
    return [(type(e).__name__, tuple(getattr(e, "block_hashes", ())), e.medium) for e in events]


def dedup() -> Dedup:
    return Dedup(MEDIA, same_hashes=True)


def test_a_block_is_stored_while_it_is_anywhere() -> None:
    merge = dedup()
    assert told(merge.of_engine(on_device(1, 2))) == [("BlockStored", (1, 2), "GPU")]
    assert told(merge.of_us(in_host(1, 2))) == []
    assert told(merge.of_engine(EngineRemoved([1, 2], "GPU"))) == []
    assert told(merge.of_us(in_host(1, medium="CPU_TIER2"))) == []
    assert told(merge.of_us(out_of_host(1, 2))) == [("BlockRemoved", (2,), "GPU")]
    assert told(merge.of_us(out_of_host(1, medium="CPU_TIER2"))) == [("BlockRemoved", (1,), "GPU")]
    assert merge.residents == {} and not merge._known[0] and not merge._known[1]


def test_an_event_of_which_some_blocks_are_new_is_cut_into_those() -> None:
    merge = dedup()
    list(merge.of_us(in_host(2, parent=1)))
    events = list(merge.of_engine(on_device(1, 2, 3, 4, parent=9, size=1)))
    assert told(events) == [("BlockStored", (1,), "GPU"), ("BlockStored", (3, 4), "GPU")]
    first, second = events
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert (first.parent_block_hash, first.token_ids) == (9, [10])
    assert (second.parent_block_hash, second.token_ids) == (2, [30, 40])


def test_an_engine_that_clears_its_device_keeps_what_the_host_has() -> None:
    merge = dedup()
    list(merge.of_engine(on_device(1, 2, 3)))
    list(merge.of_us(in_host(2)))
    assert told(merge.of_engine(EngineCleared())) == [("BlockRemoved", (1, 3), "GPU")]
    assert told(merge.of_us(Cleared("CPU_TIER1", {0: [2]}))) == [("BlockRemoved", (2,), "GPU")]


def test_what_lies_in_a_shared_store_is_not_this_engines() -> None:
    merge = dedup()
    assert told(merge.of_us(in_host(1, medium="REMOTE"))) == []


def test_blocks_with_other_hashes_are_the_same_by_what_is_in_them() -> None:
    merge = Dedup(MEDIA, same_hashes=False)
    device = EngineStored([-5, -6], 2, None, [1, 2, 3, 4], lora_name=None)
    assert told(merge.of_engine(device)) == [("BlockStored", (-5, -6), "GPU")]
    ours = BlockStored([500, 600, 700], None, [1, 2, 3, 4, 5, 6], 2, None, "CPU_TIER1", None, group_idx=0)
    (event,) = merge.of_us(ours)
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [700] and event.token_ids == [5, 6]
    assert event.parent_block_hash == -6, "under the name by which the router knows it"
    assert told(merge.of_engine(EngineRemoved([-5, -6]))) == []
    assert told(merge.of_us(out_of_host(500, 600, 700))) == [("BlockRemoved", (-5, -6, 700), "GPU")]
    assert merge.residents == {} and not merge._known[0] and not merge._known[1]


@pytest.mark.parametrize("other", [{"lora_name": "b"}, {"cache_salt": "s"}, {"block_mm_infos": [{"x": 1}]}])
def test_the_same_tokens_under_another_adapter_salt_or_image_are_other_blocks(
    other: dict[str, object],
) -> None:
    merge = Dedup(MEDIA, same_hashes=False)
    list(merge.of_engine(EngineStored([1], 2, None, [1, 2])))
    event = EngineStored([2], 2, None, [1, 2], **other)  # type: ignore[arg-type]
    assert [kind for kind, *_ in told(merge.of_engine(event))] == ["BlockStored"]


def test_without_tokens_a_block_is_its_own() -> None:
    merge = Dedup(MEDIA, same_hashes=False)
    salted = BlockStored([500], None, [], 2, None, "CPU_TIER1", None, group_idx=0)
    assert told(merge.of_us(salted)) == [("BlockStored", (500,), "GPU")]
    assert told(merge.of_us(out_of_host(500))) == [("BlockRemoved", (500,), "GPU")]


@pytest.mark.parametrize("merge", [Passthrough(), Dedup(MEDIA, same_hashes=True)])
def test_an_event_that_leaves_blocks_out_is_handed_on_as_it_is(merge: Merge) -> None:
    """Of a window: vLLM tells the tokens of all, and the hashes of those that it keeps."""
    event = EngineStored([1, 3], 2, None, [10, 11, 20, 21, 30, 31], medium="GPU")
    (told_on,) = merge.of_engine(event)
    assert isinstance(told_on, BlockStored) and told_on.token_ids == event.token_ids
    list(merge.of_engine(EngineRemoved([1])))
    again = list(merge.of_engine(event))
    if isinstance(merge, Dedup):
        (one,) = again
        assert isinstance(one, BlockStored)
        assert (one.block_hashes, one.token_ids) == ([1], []), "nobody can tell which are whose"


def test_passthrough_says_what_was_said_and_an_engines_clear_is_of_its_device() -> None:
    merge = Passthrough()
    assert told(merge.of_engine(on_device(1, 2))) == [("BlockStored", (1, 2), "GPU")]
    assert told(merge.of_us(in_host(1))) == [("BlockStored", (1,), "CPU_TIER1")]
    assert told(merge.of_engine(EngineRemoved([2], "GPU"))) == [("BlockRemoved", (2,), "GPU")]
    assert told(merge.of_engine(EngineCleared())) == [("BlockRemoved", (1,), "GPU")]
    assert told(merge.of_us(Cleared("CPU_TIER1", {0: [1]}))) == [("BlockRemoved", (1,), "CPU_TIER1")]
    assert merge.residents == {}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("same_hashes", [True, False])
def test_against_sets(seed: int, same_hashes: bool) -> None:
    """By chance, on both sides: what is published as there is what is anywhere."""
    draw, merge = random.Random(seed), Dedup(MEDIA, same_hashes=same_hashes)
    device, own, published = set[int](), {"CPU_TIER1": set[int](), "CPU_TIER2": set[int]()}, set[int]()

    def hear(events: Iterable[Event]) -> None:
        for event in events:
            assert not isinstance(event, AllBlocksCleared) and event.medium == "GPU"
            hashes = set(event.block_hashes)
            if isinstance(event, BlockStored):
                assert not hashes & published
                published.update(hashes)  # type: ignore[arg-type]
            else:
                assert hashes <= published
                published.difference_update(hashes)  # type: ignore[arg-type]

    for _ in range(300):
        some, medium = draw.sample(range(1, 15), 3), draw.choice(list(own))
        what = draw.random()
        if what < 0.3:
            for h in some:  # each the first of a chain of its own
                hear(merge.of_engine(on_device(h)))
            device.update(some)
        elif what < 0.5:
            hear(merge.of_engine(EngineRemoved(some)))
            device.difference_update(some)
        elif what < 0.75:
            for h in some:
                hear(merge.of_us(in_host(h, medium=medium)))
            own[medium].update(some)
        elif what < 0.96:
            hear(merge.of_us(out_of_host(*some, medium=medium)))
            own[medium].difference_update(some)
        elif what < 0.98:
            hear(merge.of_us(Cleared(medium, {0: list(own[medium])})))
            own[medium].clear()
        else:
            hear(draw.choice([merge.engine_lost, lambda: merge.of_engine(EngineCleared())])())
            device.clear()
        assert published == device | own["CPU_TIER1"] | own["CPU_TIER2"]


# ---------------------------------------------------------------- over ZMQ


def key(number: int) -> BlockKey:
    return block_key(SequenceHash(number.to_bytes(32, "big")), 0)


class Engine:
    """Publishes as engines do, and as who speaks for one does."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*") -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(endpoint)
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.number = 0

    def say(self, *events: dict[str, object], rank: int | None = 0) -> None:
        payload = msgspec.msgpack.encode([1.0, list(events), rank])
        self._pub.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    def say_frames(self, *frames: bytes) -> None:
        self._pub.send_multipart(frames)

    def close(self) -> None:
        self._pub.close(linger=0)
        self._context.term()


class Listener:
    """Keeps what a stream publishes."""

    def __init__(self, endpoint: str) -> None:
        self.batches: list[tuple[int, bytes]] = []
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe("")
        self._sub.connect(endpoint)

    def hear(self) -> None:
        """Takes what has arrived."""
        while self._sub.poll(20):
            _, number, payload = self._sub.recv_multipart()
            self.batches.append((int.from_bytes(number, "big"), payload))

    def close(self) -> None:
        self._sub.close(linger=0)
        self._context.term()


class Bench:
    """A consolidator between an engine and a reader of its stream."""

    def __init__(self, merge: Merge) -> None:
        self.engine = Engine()
        self.log = EventLog(MEDIA, lambda h: int.from_bytes(h[-8:], "big"))
        ends = Ends(self.engine.endpoint, Place("tcp://127.0.0.1:*"))
        self.consolidator = Consolidator(self.log, merge, ends, Metrics())
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe("")
        self._sub.connect(self.consolidator.sink.endpoint)
        self.picture = Picture()
        self.picture.is_current = True  # it hears the stream from the start
        self._wait_connected()

    def _wait_connected(self) -> None:
        wait_for(lambda: self._sub.poll(50) > 0)  # a beat: what follows arrives
        while self.consolidator._last_number is None:
            self.engine.say()
            time.sleep(0.01)
        self.hear()

    def hear(self) -> None:
        while self._sub.poll(20):
            _, number, payload = self._sub.recv_multipart()
            value = int.from_bytes(number, "big")
            if self.picture._last is None:
                self.picture._last = value - 1
            assert decode_batch(payload) is not None
            self.picture.take(value, payload)

    def has(self, *hashes: int) -> bool:
        self.hear()
        found = set[object]().union(*self.picture.places.values())
        return found == set(hashes)

    def store(self, *numbers: int) -> None:
        keys = [key(number) for number in numbers]
        self.log.stored(Tier.HOST, keys)
        for number, one in zip(numbers, keys, strict=True):
            self.log.name(Names([one], [one], None, 1, [10 * number]))

    def close(self) -> None:
        self.consolidator.close()
        self.consolidator.close()
        self._sub.close(linger=0)
        self._context.term()
        self.engine.close()


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "what was waited for did not come"


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a reader that comes late hears something soon."""
    monkeypatch.setattr(publisher_module, "HEARTBEAT_S", 0.1)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(dedup())
    yield made
    made.close()


def stored(*hashes: int) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": None,
        "token_ids": [10 * h for h in hashes],
        "block_size": 1,
    }


def removed(*hashes: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes)}


def test_both_sides_are_heard_and_one_stream_is_published(bench: Bench) -> None:
    bench.engine.say(stored(1, 2))
    wait_for(lambda: bench.has(1, 2))
    bench.store(2, 3)
    wait_for(lambda: bench.has(1, 2, 3))
    bench.engine.say(removed(1, 2))
    wait_for(lambda: bench.has(2, 3))
    bench.log.removed(Tier.HOST, [key(2)])
    wait_for(lambda: bench.has(3))


def test_what_the_engine_said_and_nobody_heard_makes_its_device_unknown(bench: Bench) -> None:
    bench.engine.say(stored(1))
    bench.store(2)
    wait_for(lambda: bench.has(1, 2))
    bench.engine.number += 1
    bench.engine.say(stored(5))
    wait_for(lambda: bench.has(2, 5))


def test_an_engine_that_begins_anew_has_an_empty_device(bench: Bench) -> None:
    bench.engine.say(stored(1))
    wait_for(lambda: bench.has(1))
    bench.engine.number = 0
    bench.engine.say(stored(7))
    wait_for(lambda: bench.has(7))


def test_garbage_from_the_engine_is_refused_and_the_rest_goes_on(bench: Bench) -> None:
    bench.store(2)
    wait_for(lambda: bench.has(2))
    bench.engine.say_frames(b"only one")
    bench.engine.say_frames(b"", b"short", b"")
    bench.engine.say({"type": "Unheard"})
    bench.engine.say(stored(4))
    wait_for(lambda: bench.has(2, 4))


@pytest.mark.parametrize("endpoint", ["tcp://*:0", "tcp://0.0.0.0:*", "tcp://192.0.2.1:5557"])
def test_it_publishes_where_this_machine_alone_can_read(endpoint: str) -> None:
    log = EventLog(MEDIA, lambda h: 0)
    with pytest.raises(ConfigError, match="KVBM_CURVE_KEY_FILE"):
        Consolidator(log, dedup(), Ends("tcp://127.0.0.1:1", Place(endpoint)), Metrics()).close()


def test_closing_says_that_nothing_is_there() -> None:
    bench = Bench(dedup())
    bench.store(2)
    wait_for(lambda: bench.has(2))
    sink: Any = bench.consolidator.sink
    sent = list(sink._kept)
    sink.send = lambda number, payload: sent.append((number, payload))
    bench.close()
    last = decode_batch(sent[-1][1])
    assert last is not None and isinstance(last.events[0], AllBlocksCleared)
