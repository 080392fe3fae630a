"""From the log to a router's picture: numbers, batches, gaps, restarts, dumps, over ZMQ too."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import ManualClock
from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError
from kvbm_core.events import dumps as dumps_module
from kvbm_core.events import publisher as publisher_module
from kvbm_core.events import wire
from kvbm_core.events.consumer import Picture, ZmqReader
from kvbm_core.events.dumps import Dumps
from kvbm_core.events.log import EventLog, Names, Snapshot
from kvbm_core.events.publisher import EventPublisher, Stream
from kvbm_core.events.wire import DumpRequest, decode_batch, decode_page, generation_of
from kvbm_core.events.zmq_sink import END_OF_REPLAY, Place, ZmqSink, endpoint_of_rank
from kvbm_core.fleet.keys import CurveKeys, new_keys
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.testing.heard import Heard
from kvbm_core.tiers.jobs import JobTable
from kvbm_core.tiers.lower import Surroundings
from kvbm_core.tiers.slotted import SlottedTier
from kvbm_core.types import SequenceHash, Tier, block_key
from tests.threads import threads_since
from tests.unit.event_truth import BLOCK_TOKENS, Truth, hash_of, make_log

ANY_PORT = "tcp://127.0.0.1:*"
PATIENCE_S = 20.0


class Wire:
    """A sink that keeps what is sent, for a test to hand on, lose or repeat."""

    serves = False

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []

    def open(self, dumps: Dumps) -> None:
        """See Sink."""

    def send(self, number: int, payload: bytes) -> None:
        self.sent.append((number, payload))

    def serve(self, timeout_s: float) -> None:
        """See Sink."""

    def close(self) -> None:
        """See Sink."""


class ByHand:
    """A publisher without its thread: everything happens when the test says so."""

    def __init__(self, log: EventLog) -> None:
        self.wire = Wire()
        self.clock = ManualClock()
        self.metrics = Metrics()
        self.publisher = EventPublisher(log, [self.wire], 3, self.metrics, self.clock)
        self.publisher._closing.set()
        self.publisher._thread.join()
        self.wire.sent.clear()

    def take(self) -> list[tuple[int, bytes]]:
        self.publisher.publish()
        sent, self.wire.sent = self.wire.sent, []
        return sent


def catch_up(picture: Picture, dumps: Dumps, clock: ManualClock) -> None:
    """Asks until nothing is wanted."""
    for _ in range(1000):
        if not picture.wants_dump:
            return
        page = dumps.answer(picture.request())
        assert page is not None
        if not picture.take_page(page):
            clock.advance(0.1)
    raise AssertionError("the picture is never complete")


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "what was waited for did not come"


def store(log: EventLog, *numbers: int) -> None:
    chain = Truth.chain(0)
    keys = [chain[number] for number in numbers]
    log.stored(Tier.HOST, keys)
    log.name(Names(keys, keys, None, 1, list(numbers)))


def test_batches_have_64_hashes_and_numbers_without_gaps() -> None:
    log = make_log()
    hand = ByHand(log)
    for number in range(0, 1000):
        keys = [Truth.chain(number)[0]]
        log.stored(Tier.HOST, keys)
        log.name(Names(keys, keys, None, 1, [number]))
    sent = hand.take()
    batches = [decode_batch(payload) for _, payload in sent]
    sizes = [sum(len(event.block_hashes) for event in batch.events) for batch in batches if batch is not None]
    assert sum(sizes) == 1000 and max(sizes) <= 64 and len(sizes) == 16
    numbers = [number for number, _ in sent]
    assert numbers == list(range(numbers[0], numbers[0] + 16))
    assert all(batch is not None and batch.data_parallel_rank == 3 for batch in batches)
    assert hand.metrics.snapshot()['kvbm_events_total{event="stored"}'] == 1000


def test_each_start_has_a_generation_of_its_own() -> None:
    generations = {generation_of(ByHand(make_log()).publisher._stream.last_number) for _ in range(20)}
    assert len(generations) == 20 and 0 not in generations


def test_a_silent_stream_beats_so_that_a_lost_last_batch_is_missed() -> None:
    log = make_log()
    hand = ByHand(log)
    picture = Picture()
    store(log, 1)
    for batch in hand.take():
        picture.take(*batch)
    catch_up(picture, hand.publisher.dumps, hand.clock)
    store(log, 2)
    hand.take()  # lost
    assert hand.take() == [] and picture.is_current
    hand.clock.advance(1.0)
    for batch in hand.take():
        picture.take(*batch)
    assert not picture.is_current and picture.wants_dump
    catch_up(picture, hand.publisher.dumps, hand.clock)
    assert len(picture.places["CPU_TIER1", 0]) == 2


def test_a_count_that_is_used_up_begins_a_new_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream([wires := Wire()], 0, Metrics(), ManualClock())
    stream.last_number = stream._end - 1
    stream.send([wire.AllBlocksCleared()])
    stream.send([wire.AllBlocksCleared()])
    first, second = (number for number, _ in wires.sent)
    assert generation_of(first) != generation_of(second) and second & 0xFFFFFFFF == 1


# ---------------------------------------------------------------- a router double against the truth


def churn(draw: random.Random, rounds: int) -> None:
    """Losses, repeats, gaps and restarts: the picture is right whenever it says that it is current, and never
    has what was never there.
    """
    log = make_log()
    truth, hand, picture = Truth(log, draw), ByHand(log), Picture()
    num_compared = 0
    for _ in range(rounds):
        for _ in range(draw.randint(1, 20)):
            truth.step()
        sent = hand.take()
        if (
            draw.random() < 0.05
        ):  # the engine starts again: the disk has what it had, and nobody knows its names
            log = make_log()
            truth, hand, sent = Truth(log, draw), ByHand(log), []
        for number, payload in sent:
            if draw.random() < 0.02:
                continue
            picture.take(number, payload)
            if draw.random() < 0.02:
                picture.take(number, payload)
        if picture.wants_dump and draw.random() < 0.7:
            answer = hand.publisher.dumps.answer(picture.request())
            assert answer is not None
            if draw.random() < 0.9:
                picture.take_page(answer)
        hand.clock.advance(draw.choice([0.0, 0.05, 1.0, 40.0]))
        for number, payload in hand.take():
            picture.take(number, payload)
        if picture.is_current and generation_of(hand.publisher._stream.last_number) == generation_of(
            picture._last or 0
        ):
            if picture._last == hand.publisher._stream.last_number:
                assert picture.places == truth.now()
                num_compared += 1
            for (medium, _), hashes in picture.places.items():
                assert {(medium, h) for h in hashes} <= truth.was_ever
    hand.clock.advance(2.0)
    for number, payload in hand.take():
        picture.take(number, payload)
    catch_up(picture, hand.publisher.dumps, hand.clock)
    assert picture.is_current and picture.places == truth.now()
    assert num_compared > rounds // 20 and picture.gaps_total > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_router_is_right_after_each_resync(seed: int) -> None:
    churn(random.Random(seed), 300)


@pytest.mark.nightly("ten minutes, as long as the promise says")
@pytest.mark.timeout(900)
def test_a_router_is_right_for_ten_minutes() -> None:
    ends_at_s, seed = time.monotonic() + 600.0, 100
    while time.monotonic() < ends_at_s:
        churn(random.Random(seed), 300)
        seed += 1
    print(f"{seed - 100} lives of 300 rounds each")


def test_a_router_follows_a_thousand_engines() -> None:
    """Each at 625 blocks a second, stored and removed: what one core of a router written in Python takes."""
    batches, num_streams = [], 1000
    for turn in range(4):
        hashes = [turn * 64 + i + 2**40 for i in range(64)]
        event: wire.Event = wire.BlockStored(list(hashes), None, [], 16, None, "CPU_TIER1", None)
        batches.append(wire.encode(wire.EventBatch(0.0, [event], 0)))
    pictures = [Picture() for _ in range(num_streams)]
    for picture in pictures:
        picture.is_current, picture._last = True, 1 << 32
    began_s = time.process_time()
    for turn, payload in enumerate(batches, 1):
        for picture in pictures:
            picture.take((1 << 32) + turn, payload)
    rate = 64 * len(batches) * num_streams / (time.process_time() - began_s)
    print(f"{rate / 1e6:.1f} M block events a second; a thousand engines tell 0.6 M")
    assert all(len(picture.places["CPU_TIER1", 0]) == 256 for picture in pictures) and rate > 100_000


def test_a_dump_in_many_pages_while_blocks_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumps_module, "PAGE_HASHES", 50)
    draw = random.Random(5)
    log = make_log()
    truth, hand, picture = Truth(log, draw), ByHand(log), Picture()
    for _ in range(200):
        truth.step()
    hand.take()
    truth.step()
    num_pages = 0
    while not picture.is_current:
        hand.clock.advance(1.0)
        for batch in hand.take():
            picture.take(*batch)
        page = hand.publisher.dumps.answer(picture.request())
        assert page is not None
        picture.take_page(page)
        truth.step()
        num_pages += 1
        assert num_pages < 100
    for batch in hand.take():
        picture.take(*batch)
    assert num_pages > 5 and picture.is_current and picture.places == truth.now()


def test_many_who_ask_share_a_dump_and_an_old_one_is_thrown_away() -> None:
    clock = ManualClock()
    taken = []

    def take() -> tuple[int, Snapshot]:
        taken.append(len(taken))
        return (1 << 32) + 100 * len(taken), Snapshot({("CPU_TIER1", 0): [1, 2]})

    dumps = Dumps(take, clock)

    def ask(since: int, dump: int = 0) -> wire.DumpPage:
        answer = dumps.answer(DumpRequest(since, dump).pack())
        page = decode_page(answer or b"")
        assert page is not None
        return page

    base = 1 << 32
    assert {ask(base + 90).dump for _ in range(100)} == {1} and len(taken) == 1
    assert ask(base + 101).dump == 1 and ask(base + 102).number == 0, "not one for each who asks"
    for dump in (2, 3, 4, 5, 6):
        clock.advance(0.6)
        assert ask(base + 100 * dump).dump == dump, "however many there were"
    assert ask(base, dump=1).number == 0, "the oldest has made room"
    assert len(dumps._dumps) == 4
    clock.advance(31.0)
    assert ask(base, dump=6).number == 0 and ask(0).number


def test_dumps_take_a_fifth_of_a_core_whoever_asks() -> None:
    clock, spent_s = ManualClock(), [0.0]

    def take() -> tuple[int, Snapshot]:
        clock.advance(0.4)
        spent_s[0] += 0.4
        return (1 << 32) + 1, Snapshot({})

    dumps = Dumps(take, clock)
    began_s = clock.now_s()
    for _ in range(10_000):
        dumps.answer(DumpRequest((1 << 32) + 10**6).pack())  # of what was never published
        clock.advance(0.01)
    assert 0.15 < spent_s[0] / (clock.now_s() - began_s) < 0.21


def test_a_million_blocks_are_dumped_and_taken() -> None:
    hashes = [i * 0x9E3779B97F4A7C15 & (2**64 - 1) for i in range(1_000_000)]
    clock = ManualClock()
    dumps = Dumps(lambda: ((1 << 32) + 5, Snapshot({("CPU_TIER1", 0): list(hashes)})), clock)
    picture = Picture()
    picture.take((1 << 32) + 6, wire.encode(wire.EventBatch(0.0, [], 0)))
    began_s = time.process_time()
    catch_up(picture, dumps, clock)
    spent_s = time.process_time() - began_s
    print(f"{spent_s:.2f} s of CPU on both sides: 1 to 2 where nothing else runs")
    assert picture.is_current and len(picture.places["CPU_TIER1", 0]) == 1_000_000


def test_a_dump_that_is_older_than_what_was_kept_is_of_no_use() -> None:
    picture, base = Picture(), 7 << 32
    nothing = wire.encode(wire.EventBatch(0.0, [], 0))
    picture.take(base + 10, nothing)
    for number in (base + 5, (8 << 32) + 50):
        picture.take_page(
            wire.encode(wire.DumpPage(number, 1, 0, True, [wire.Resident("CPU_TIER1", 0, [1])]))
        )
        assert not picture.is_current and picture.wants_dump and not picture.places
    picture.take_page(wire.encode(wire.DumpPage(base + 9, 2, 0, True, [wire.Resident("CPU_TIER1", 0, [1])])))
    assert picture.is_current and picture.places == {("CPU_TIER1", 0): {1}}


def test_a_disk_that_is_turned_off_holds_nothing() -> None:
    clock, heard = ManualClock(), Heard()
    host = BlockTier(Tier.HOST, LruPolicy(), clock, heard)
    around = Surroundings(host, JobTable(1, clock), lambda order: None, clock, Metrics(), listener=heard)
    tier = SlottedTier("disk", Tier.DISK, AdmitAll(), around)
    keys = Truth.chain(0)[:3]
    tier.slots.restore(3, [[(key, slot) for slot, key in enumerate(keys)]])
    assert heard.here[Tier.DISK] == set(keys)
    tier.turn_off("a test")
    assert heard.here[Tier.DISK] == set()
    tier.check_integrity()


def test_batches_that_arrive_during_a_dump_are_bounded() -> None:
    picture = Picture()
    payload = wire.encode(wire.EventBatch(0.0, [wire.BlockRemoved([1] * 60_000, "GPU")], 0))
    for number in range(5000):
        picture.take((1 << 32) + 1 + number, payload)
        assert picture._kept_bytes <= 16 << 20


@pytest.mark.parametrize("junk", [b"", b"\xff" * 40, bytes(24)])
def test_garbage_makes_a_picture_unknown_and_nothing_worse(junk: bytes) -> None:
    log = make_log()
    hand, picture = ByHand(log), Picture()
    store(log, 1)
    for batch in hand.take():
        picture.take(*batch)
    catch_up(picture, hand.publisher.dumps, hand.clock)
    last = hand.publisher._stream.last_number
    picture.take_page(junk)
    picture.take(last + 1, junk)
    assert not picture.is_current and picture.bad_batches_total == 1
    hand.publisher._stream.last_number = last + 1
    store(log, 2)
    for batch in hand.take():
        picture.take(*batch)
    catch_up(picture, hand.publisher.dumps, hand.clock)
    assert picture.is_current and len(picture.places["CPU_TIER1", 0]) == 2


def test_what_could_not_be_told_begins_a_new_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    log = make_log()
    hand, picture = ByHand(log), Picture()
    store(log, 1)
    for batch in hand.take():
        picture.take(*batch)
    catch_up(picture, hand.publisher.dumps, hand.clock)
    store(log, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "send", lambda stream, events: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hand.publisher.publish()
    hand.clock.advance(2.0)
    for batch in hand.take():
        picture.take(*batch)
    assert picture.wants_dump
    catch_up(picture, hand.publisher.dumps, hand.clock)
    assert len(picture.places["CPU_TIER1", 0]) == 2


def test_a_dump_while_others_fold_is_no_older_than_its_number() -> None:
    """What was folded and not sent yet is in the dump, and is told again after it."""
    log = make_log()
    hand, picture = ByHand(log), Picture()
    store(log, 1, 2)
    picture.take(*hand.take()[0])
    store(log, 3)
    log.removed(Tier.HOST, [Truth.chain(0)[1]])
    log.fold()  # as the engine's own publisher makes it do
    catch_up(picture, hand.publisher.dumps, hand.clock)
    there = {hash_of(Truth.chain(0)[number]) for number in (2, 3)}
    assert picture.places == {("CPU_TIER1", 0): there}
    for batch in hand.take():
        picture.take(*batch)
    assert picture.is_current and picture.places == {("CPU_TIER1", 0): there}


# ---------------------------------------------------------------- over ZMQ


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a reader that comes late hears something soon."""
    monkeypatch.setattr(publisher_module, "HEARTBEAT_S", 0.1)


@pytest.fixture
def log() -> EventLog:
    return make_log()


@pytest.fixture
def published(log: EventLog) -> Iterator[ZmqSink]:
    sink = ZmqSink(Place(ANY_PORT, ANY_PORT))
    publisher = EventPublisher(log, [sink], 0, Metrics())
    yield sink
    publisher.close()


def test_a_reader_over_zmq_follows(log: EventLog, published: ZmqSink) -> None:
    reader = ZmqReader(published.endpoint, published.replay_endpoint)
    try:
        store(log, 1, 2)
        wait_for(lambda: reader.poll(0.05) is None and reader.picture.is_current)
        log.removed(Tier.HOST, [Truth.chain(0)[1]])
        there = hash_of(Truth.chain(0)[2])
        wait_for(lambda: reader.poll(0.05) is None and reader.picture.places == {("CPU_TIER1", 0): {there}})
    finally:
        reader.close()


@contextmanager
def before_others() -> Iterator[None]:
    """This thread, and those that it starts, run before those of other processes, where that is permitted."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    yield
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@pytest.mark.nightly("fills a log with a million blocks; the dump alone, without a wire, is tried always")
def test_a_million_blocks_come_to_a_reader_over_zmq_within_five_seconds(log: EventLog) -> None:
    """Blocks go on being stored meanwhile. The quickest of five counts: others use this machine."""
    numbers, expected, took_s = itertools.count(1), set[int](), list[float]()

    def store_more(count: int) -> None:
        keys = [block_key(SequenceHash(next(numbers).to_bytes(32, "big")), 0) for _ in range(count)]
        log.stored(Tier.HOST, keys)
        log.name(Names(keys, keys, None, BLOCK_TOKENS))
        expected.update(map(hash_of, keys))

    for _ in range(100):
        store_more(10_000)
    log.fold()
    for _ in range(5):
        sink = ZmqSink(Place(ANY_PORT, ANY_PORT))
        with before_others(), closing(EventPublisher(log, [sink], 0, Metrics())):
            began_s = time.monotonic()
            with closing(ZmqReader(sink.endpoint, sink.replay_endpoint)) as reader:
                picture = reader.picture
                while not picture.is_current:
                    assert time.monotonic() - began_s < 10 * PATIENCE_S
                    reader.poll(0.01)
                    store_more(1)
                took_s.append(time.monotonic() - began_s)
                assert len(picture.places["CPU_TIER1", 0]) >= 1_000_000
                wait_for(
                    lambda r=reader: r.poll(0.05) is None and r.picture.places == {("CPU_TIER1", 0): expected}
                )
    print(" ".join(f"{each_s:.1f}" for each_s in took_s), "s")
    assert min(took_s) < 5.0


def test_a_reader_finds_its_way_after_the_publisher_began_anew(tmp_path: Path) -> None:
    place = Place(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    reader = ZmqReader(*place[:2])
    end_s = time.monotonic() + PATIENCE_S
    try:
        for number in (1, 2):
            log = make_log()
            publisher = EventPublisher(log, [ZmqSink(place)], 0, Metrics())
            try:
                store(log, number)
                expected = {("CPU_TIER1", 0): {hash_of(Truth.chain(0)[number])}}
                while not (reader.picture.is_current and reader.picture.places == expected):
                    assert time.monotonic() < end_s
                    reader.poll(0.05)
            finally:
                publisher.close()
    finally:
        reader.close()


def test_a_replay_is_answered_as_engines_answer_it(log: EventLog, published: ZmqSink) -> None:
    context = zmq.Context()
    asking = context.socket(zmq.DEALER)
    asking.connect(published.replay_endpoint)
    try:
        store(log, 1)
        wait_for(lambda: len(published._kept) >= 2)
        kept = list(published._kept)[1:]
        asking.send_multipart([b"", kept[0][0].to_bytes(8, "big")])
        answers = []
        while not answers or answers[-1][1] != END_OF_REPLAY:
            assert asking.poll(10_000)
            empty, topic, number, payload = asking.recv_multipart()
            answers.append((topic, number, payload))
            assert empty == b""
        assert [(int.from_bytes(n, "big"), p) for _, n, p in answers[: len(kept)]] == kept
        assert answers[-1] == (b"", END_OF_REPLAY, b"")
    finally:
        asking.close(linger=0)
        context.term()


@pytest.mark.shows("KVBM_CURVE_KEY_FILE", "KVBM_CURVE_ALLOWED")
def test_beyond_this_machine_readers_have_keys(log: EventLog, tmp_path: Path) -> None:
    server, friend, stranger = (new_keys(tmp_path / who, who) for who in ("server", "friend", "stranger"))
    allowed = tmp_path / "allowed"
    allowed.mkdir(mode=0o700)
    for public, _ in (server, friend):
        (allowed / public.name).write_bytes(public.read_bytes())

    def keys_of(pair: tuple[Path, Path]) -> CurveKeys:
        settings = {"curve_key_file": str(pair[1]), "curve_allowed": str(allowed)}
        keys = CurveKeys.from_settings(KvbmSettings.from_env(settings))
        assert keys is not None
        return keys

    sink = ZmqSink(Place("tcp://0.0.0.0:*", "tcp://0.0.0.0:*"), keys_of(server))
    publisher = EventPublisher(log, [sink], 0, Metrics())
    context = zmq.Context()
    heard = {}
    try:
        public = keys_of(server).server_key("server")
        store(log, 1)
        for name, pair in (("friend", friend), ("stranger", stranger), ("plain", None)):
            keys = None if pair is None else keys_of(pair)
            socket = context.socket(zmq.SUB) if keys is None else keys.client_socket(context, zmq.SUB, public)
            socket.subscribe("")
            socket.connect(sink.endpoint.replace("0.0.0.0", "127.0.0.1"))
            heard[name] = socket
        assert heard["friend"].poll(10_000)
        assert not heard["stranger"].poll(500) and not heard["plain"].poll(10)
        ends = (sink.endpoint, sink.replay_endpoint)
        own = keys_of(friend)
        reader = ZmqReader(*(end.replace("0.0.0.0", "127.0.0.1") for end in ends), "", own, public)
        try:
            wait_for(lambda: reader.poll(0.05) is None and len(reader.picture.places) == 1)
        finally:
            reader.close()
    finally:
        for socket in heard.values():
            socket.close(linger=0)
        context.term()
        publisher.close()


def test_what_is_kept_for_replays_is_bounded() -> None:
    sink = ZmqSink(Place(ANY_PORT), max_kept_bytes=1000)
    sink.open(Dumps(lambda: (0, Snapshot({})), ManualClock()))
    try:
        for number in range(100):
            sink.send(number, bytes(100))
        assert len(sink._kept) == 10 and sink._kept[0][0] == 90
    finally:
        sink.close()


def test_strangers_cannot_bring_the_publisher_down(log: EventLog, published: ZmqSink) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(published.replay_endpoint)
    raw = context.socket(zmq.STREAM)
    raw.connect(published.replay_endpoint)
    try:
        for frames in (
            [b""],
            [b"", b"x"],
            [b"", bytes(24)],
            [b"", b"dump" + bytes(20)],
            [b"", b"a", b"b", b"c"],
        ):
            stranger.send_multipart(frames)
        stranger.send_multipart([b"", bytes(1 << 20)])  # too long: the connection is closed
        reader = ZmqReader(published.endpoint, published.replay_endpoint)
        try:
            store(log, 1)
            wait_for(lambda: reader.poll(0.05) is None and reader.picture.is_current)
        finally:
            reader.close()
    finally:
        stranger.close(linger=0)
        raw.close(linger=0)
        context.term()


@pytest.mark.parametrize("endpoint", ["tcp://*:0", "tcp://0.0.0.0:*", "tcp://192.0.2.1:5557"])
def test_what_other_machines_could_read_is_not_bound_without_keys(endpoint: str) -> None:
    sink = ZmqSink(Place(endpoint))
    with pytest.raises(ConfigError, match="KVBM_CURVE_KEY_FILE"):
        sink.open(Dumps(lambda: (0, Snapshot({})), ManualClock()))


def test_a_port_that_is_taken_is_one_line(published: ZmqSink) -> None:
    nothing = Dumps(lambda: (0, Snapshot({})), ManualClock())
    with pytest.raises(ConfigError, match=r"EVENTS_ENDPOINT=.*choose another address"):
        ZmqSink(Place(published.endpoint)).open(nothing)
    with pytest.raises(ConfigError, match=r"EVENTS_REPLAY_ENDPOINT=.*choose another address"):
        ZmqSink(Place(ANY_PORT, published.replay_endpoint)).open(nothing)


def test_a_path_that_another_process_serves_is_left_to_it(log: EventLog, short_path: Path) -> None:
    """ZMQ would take it away from him without a word; one that a dead process has left is taken."""
    place = Place(f"ipc://{short_path}/a", f"ipc://{short_path}/b")
    (short_path / "b").touch()
    publisher = EventPublisher(log, [ZmqSink(place)], 0, Metrics())
    try:
        for other in (place, Place(ANY_PORT, place.replay_endpoint)):
            with pytest.raises(ConfigError, match="another process"):
                ZmqSink(other).open(Dumps(lambda: (0, Snapshot({})), ManualClock()))
        reader = ZmqReader(place.endpoint, str(place.replay_endpoint))
        try:
            wait_for(lambda: reader.poll(0.05) is None and reader.picture.is_current)
        finally:
            reader.close()
    finally:
        publisher.close()


def test_the_end_is_told_over_zmq(log: EventLog) -> None:
    for _ in range(10):
        sink = ZmqSink(Place(ANY_PORT))
        publisher = EventPublisher(log, [sink], 0, Metrics())
        context = zmq.Context()
        sub = context.socket(zmq.SUB)
        sub.subscribe("")
        sub.connect(sink.endpoint)
        try:
            assert sub.poll(10_000)
            for number in range(200):
                keys = Truth.chain(number)
                log.stored(Tier.HOST, keys)
                log.name(Names(keys, keys, None, 16, list(range(16 * len(keys)))))
            publisher.close()
            last = None
            while sub.poll(10_000 if last is None or last.events == [] else 200):
                last = decode_batch(sub.recv_multipart()[2])
            assert last is not None and isinstance(last.events[-1], wire.AllBlocksCleared)
        finally:
            sub.close(linger=0)
            context.term()


def test_a_reader_that_does_not_read_costs_little_memory(log: EventLog) -> None:
    sink = ZmqSink(Place(ANY_PORT), max_kept_bytes=0)
    sink.open(Dumps(lambda: (0, Snapshot({})), ManualClock()))
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.RCVHWM, 1)
    sub.subscribe("")
    sub.connect(sink.endpoint)
    batch = bytes(8000)  # of 64 blocks of 16 tokens
    try:
        while not sub.poll(10):
            sink.send(0, batch)
        before_bytes = resident_bytes()
        for number in range(20_000):
            sink.send(number, batch)
        assert resident_bytes() - before_bytes < 40e6
    finally:
        sub.close(linger=0)
        context.term()
        sink.close()


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.shows("KVBM_EVENTS_ENDPOINT", "KVBM_EVENTS_REPLAY_ENDPOINT")
@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://127.0.0.1:5567", 0, "tcp://127.0.0.1:5567"),
        ("tcp://127.0.0.1:5567", 2, "tcp://127.0.0.1:5569"),
        ("tcp://[::1]:5567", 1, "tcp://[::1]:5568"),
        ("ipc:///run/kvbm", 1, "ipc:///run/kvbm_dp1"),
        ("tcp://127.0.0.1:*", 1, "tcp://127.0.0.1:*"),
    ],
)
def test_data_parallel_ranks_take_neighboring_ports(endpoint: str, rank: int, expected: str) -> None:
    assert endpoint_of_rank(endpoint, rank) == expected


def test_a_publisher_that_closes_says_that_nothing_is_there(log: EventLog) -> None:
    sink, before = Wire(), set(threading.enumerate())
    publisher = EventPublisher(log, [sink], 0, Metrics())
    store(log, 1)
    publisher.close()
    publisher.close()
    batches = [decode_batch(payload) for _, payload in sink.sent]
    events = [event for batch in batches if batch is not None for event in batch.events]
    assert [type(event).__name__ for event in events] == ["BlockStored", "AllBlocksCleared"]
    assert not threads_since(before)
