"""KV events under vLLM: its own hashes, words and decoder; what is told of tiers, salts, adapters, images."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvbm_core.clock import SystemClock
from kvbm_core.errors import ConfigError
from kvbm_core.events import ports
from kvbm_core.events.dumps import Dumps
from kvbm_core.events.log import Names, Snapshot
from kvbm_core.events.publisher import EventPublisher
from kvbm_core.events.zmq_sink import Place, ZmqSink
from kvbm_core.identity.roots import Stamp
from kvbm_core.observe.metrics import Metrics
from kvbm_core.types import Direction, Tier
from kvbm_vllm import consolidator_config
from kvbm_vllm.events import _extra_keys as extra_keys_of
from kvbm_vllm.events import hash_maker
from tests.engines import PATIENCE_S
from tests.engines.ports import free_port
from tests.unit.event_truth import Truth, make_log
from tests.unit.test_consolidator import Listener
from tests.vllm.harness import adapter, media
from tests.vllm.kvbm_engine import KvbmEngine

PROMPT = range(50)


def stored(engine: KvbmEngine) -> list[BlockStored]:
    return [event for event in engine.record.events if isinstance(event, BlockStored)]


def removed(engine: KvbmEngine) -> list[BlockRemoved]:
    return [event for event in engine.record.events if isinstance(event, BlockRemoved)]


def hashes(events: Sequence[Any], medium: str = "CPU_TIER1") -> list[Any]:
    return [h for event in events if event.medium == medium for h in event.block_hashes]


def resident(engine: KvbmEngine, tier: Tier) -> int:
    return (engine.leader.chain.host if tier is Tier.HOST else engine.disk.slots).resident_blocks


def names_of(request: Any) -> set[Any]:
    """What vLLM publishes of its blocks."""
    return {maybe_convert_block_hash(block_hash) for block_hash in request.block_hashes}


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "what was waited for did not come"
        time.sleep(0.005)


# ---------------------------------------------------------------- vLLM's own publisher


def test_a_stored_block_is_announced_once_under_the_engines_own_hash(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, kv_events=True) as engine:
        request = engine.add("a", PROMPT, 2)
        engine.run()
        engine.settle()
        engine.ask("b", PROMPT, 2)
        events = stored(engine)
        published = [maybe_convert_block_hash(block_hash) for block_hash in request.block_hashes[:12]]
        assert hashes(events) == published and isinstance(published[0], int)
        assert events[0].parent_block_hash is None
        assert [token for event in events for token in event.token_ids] == list(range(48))
        assert {(event.medium, event.block_size) for event in events} == {("CPU_TIER1", 4)}
        engine.assert_clean()


def test_whole_hashes_are_published_where_vllm_publishes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    some = bytes(range(32))
    for flag in ("0", "1"):
        monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", flag)
        assert hash_maker()(some) == maybe_convert_block_hash(some)  # type: ignore[arg-type]


def test_nothing_is_announced_that_did_not_arrive(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, kv_events=True) as engine:
        engine.executors[0].fail_next(Direction.OFFLOAD, times=10)
        engine.ask("a", PROMPT, 2)
        engine.settle()
        engine.ask("other", range(200, 203), 2)
        assert not stored(engine)
        engine.assert_clean()


def test_an_evicted_block_is_announced_as_removed(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, kv_events=True, host_blocks=12) as engine:
        for turn in range(4):
            engine.ask(f"turn {turn}", range(100 * turn, 100 * turn + 30), 2)
            engine.settle()
        engine.ask("last", range(900, 903), 1)
        there: set[Any] = set()
        for event in engine.record.events:
            own = set(event.block_hashes)
            there = there | own if isinstance(event, BlockStored) else there - own
        assert removed(engine)
        assert len(there) == resident(engine, Tier.HOST) == 12
        assert {event.medium for event in removed(engine)} == {"CPU_TIER1"}
        engine.assert_clean()


def test_a_reset_announces_every_block_as_removed_and_never_the_devices(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, kv_events=True) as engine:
        engine.ask("a", PROMPT, 2)
        engine.settle()
        engine.reset_device(with_connector=True)
        engine.ask("other", range(200, 203), 2)
        gone = hashes(removed(engine))
        assert set(gone) == set(hashes(stored(engine))[:12]) and len(gone) == 12
        assert not [event for event in engine.record.events if isinstance(event, AllBlocksCleared)]
        engine.assert_clean()


def test_without_a_publisher_no_event_is_kept(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("a", PROMPT, 2)
        engine.settle()
        engine.ask("b", PROMPT, 2)
        assert not engine.record.events and engine.leader.chain.host.listener is None
        engine.assert_clean()


def test_without_events_nothing_of_them_is_loaded() -> None:
    modules = ("nats", "kvbm_core.events.zmq_sink", "kvbm_core.events.consolidator", "kvbm_core.fleet.gate")
    program = f"import sys, kvbm_vllm.assembly; print([name for name in {modules} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("[]")


def test_hybrid_events_say_which_group(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, kv_events=True, windows=(None, 8)) as engine:
        engine.ask("a", PROMPT, 2)
        engine.settle()
        engine.ask("other", range(200, 203), 2)
        assert {event.group_idx for event in stored(engine)} == {0, 1}
        said = {e.group_idx: (e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in stored(engine)}
        told_by_vllm = engine.scheduler.kv_cache_manager.kv_cache_event_metadata
        assert said == dict(enumerate(told_by_vllm))
        assert said[1] == ("sliding_window", 8), "routers leave these out"
        engine.assert_clean()


def test_blocks_on_disk_are_announced_and_after_a_restart_when_somebody_asks(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, kv_events=True, disk_blocks=64) as engine:
        engine.ask("a", PROMPT, 2)
        engine.settle()
        wait_for(lambda: engine.leader.poll() is None and resident(engine, Tier.DISK) == 12)
        engine.ask("other", range(200, 202), 1)
        before = hashes(stored(engine), "CPU_TIER2")
        assert len(before) == 12 and before == hashes(stored(engine))[:12]
    with KvbmEngine(tmp_path, kv_events=True, disk_blocks=64) as engine:
        wait_for(lambda: engine.leader.poll() is None and resident(engine, Tier.DISK) == 12)
        engine.ask("nobody", range(300, 302), 1)
        assert not stored(engine), "nobody knows what they are called"
        engine.ask("again", PROMPT, 2)
        engine.settle()
        engine.ask("other", range(400, 403), 2)
        assert sorted(hashes(stored(engine), "CPU_TIER2")) == sorted(before)
        assert set(hashes(stored(engine))) >= set(before), "what was loaded is in the host too"
        tokens = [t for e in stored(engine) if e.medium == "CPU_TIER2" for t in e.token_ids]
        assert tokens == list(range(48))
        engine.assert_clean()


def test_of_a_salted_request_hashes_alone_are_told_and_they_depend_on_the_salt(tmp_path: Path) -> None:
    seen: list[list[Any]] = []
    for salt in (None, "salt of mine", "salt of yours"):
        (folder := tmp_path / str(salt)).mkdir()
        with KvbmEngine(folder, kv_events=True) as engine:
            engine.add("a", PROMPT, 2, salt=salt)
            engine.run()
            engine.settle()
            engine.ask("other", range(200, 203), 2)
            events = [event for event in stored(engine) if len(hashes([event])) > 1]
            seen.append(hashes(events))
            assert len(seen[-1]) == 12
            if salt is not None:
                assert all(not event.token_ids and event.extra_keys is None for event in events)
                assert salt.encode() not in msgspec.msgpack.encode(events)
    assert not set(seen[0]) & set(seen[1]) and not set(seen[1]) & set(seen[2])


def test_an_adapter_is_named_and_is_a_part_of_the_extra_keys(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, kv_events=True, lora=True) as engine:
        engine.add("a", PROMPT, 2, lora=adapter("loraA", 1))
        engine.run()
        engine.settle()
        engine.ask("other", range(200, 203), 2)
        named = [event for event in stored(engine) if event.lora_name == "loraA"]
        assert len(hashes(named)) == 12
        assert all(keys == ("loraA",) for event in named for keys in event.extra_keys or [None])
        engine.assert_clean()


def test_images_are_a_part_of_the_extra_keys_wherever_a_run_begins(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, kv_events=True) as engine:
        images = [media("cat", 2, 6), media("dog", 14, 3)]
        request = engine.add("a", PROMPT, 2, images=images)
        engine.run()
        engine.settle()
        engine.ask("other", range(200, 203), 2)
        told = [keys for event in stored(engine)[:1] for keys in event.extra_keys or []]
        assert [bool(keys) for keys in told] == [True, True, False, True, True] + 7 * [False]
        assert "cat" in repr(told[0]) and "dog" in repr(told[3])
        for first in range(6):
            assert extra_keys_of(request, first, 6, 4) == told[first:6]


def test_new_weights_take_back_what_was_told(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, kv_events=True, disk_blocks=64) as engine:
        engine.ask("a", PROMPT, 2)
        engine.settle()
        wait_for(lambda: engine.leader.poll() is None and resident(engine, Tier.DISK) == 12)
        engine.ask("b", range(200, 202), 1)
        there = set(hashes(stored(engine)))
        assert set(hashes(stored(engine), "CPU_TIER2")) == there
        engine.hooks._changes.weights.changed("a test")
        engine.ask("c", range(300, 303), 2)
        engine.ask("d", range(400, 403), 2)
        assert there <= set(hashes(removed(engine)))
        assert there <= set(hashes(removed(engine), "CPU_TIER2")), "on disk they are of the old weights"
        engine.assert_clean()


def test_when_it_becomes_known_which_weights_these_are_old_names_are_void(tmp_path: Path) -> None:
    """A first start with weights that take long to read: until then names of blocks are this process' own."""
    with KvbmEngine(tmp_path, kv_events=True) as engine:
        engine.ask("a", PROMPT, 2)
        engine.settle()
        engine.ask("b", range(200, 202), 1)
        there = set(hashes(stored(engine)))
        long = engine.add("long", range(60, 80), 12)
        for _ in range(3):
            engine.step()
        engine.hooks._changes.weights._stamp = Stamp("sha256:known", is_lasting=True)
        engine.reset_device()
        engine.ask("c", PROMPT, 2)
        engine.run()
        engine.settle()
        engine.ask("d", range(400, 403), 2)
        assert there <= set(hashes(removed(engine))), "nobody finds them any more"
        now: set[Any] = set()
        for event in engine.record.events:
            own = set(event.block_hashes)
            now = now | own if isinstance(event, BlockStored) else now - own
        request = engine.add("again", PROMPT, 2)
        engine.run()
        assert there <= now and names_of(request) >= there, "stored anew, under the names of now"
        assert not now & names_of(long), "a request that began before goes on under names of before"
        engine.assert_clean()


def test_an_adapter_that_is_loaded_anew_takes_back_what_was_told_of_it(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, kv_events=True, lora=True) as engine:
        for name, number in (("loraA", 1), ("loraB", 2)):
            engine.add(name, PROMPT, 2, lora=adapter(name, number))
        engine.run()
        engine.settle()
        engine.ask("other", range(200, 203), 2)
        of_a = {h for e in stored(engine) if e.lora_name == "loraA" for h in e.block_hashes}
        engine.hold(Direction.OFFLOAD)
        late = engine.add("late", range(60, 90), 1, lora=adapter("loraA", 1))
        for _ in range(3):
            engine.step()
        engine.hooks._changes.adapter_changes(1, "/adapters/loraA")
        engine.step()
        engine.release(Direction.OFFLOAD)
        engine.run()
        engine.settle()
        engine.ask("other 3", range(220, 223), 2)
        assert len(of_a) == 12 and set(hashes(removed(engine))) == of_a
        assert not names_of(late) & set(hashes(stored(engine)))
        engine.assert_clean()


def test_many_blocks_that_go_at_once_are_told_in_small_events(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, kv_events=True) as engine:
        for first in range(0, 400, 100):
            engine.ask("a", range(first, first + 100), 1)
            engine.settle()
        engine.reset_device(with_connector=True)
        engine.ask("other", range(500, 503), 2)
        assert len(hashes(removed(engine))) == 100
        assert max(len(event.block_hashes) for event in removed(engine)) <= 64
        engine.assert_clean()


def test_what_was_stored_where_machines_share_it_is_told_once(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, kv_events=True, store="memory://events") as engine:
        engine.ask("a", PROMPT, 2)
        engine.settle()
        engine.wait_for(lambda: not engine.leader.chain.storing_blocks)
        engine.ask("b", range(200, 202), 1)
        shared = hashes(stored(engine), "REMOTE")
        assert sorted(shared) == sorted(hashes(stored(engine))) and len(shared) == 12
        engine.reset_device(with_connector=True)
        engine.ask("c", range(300, 302), 1)
        assert not hashes(removed(engine), "REMOTE"), "it is not this engine's to remove"
        engine.assert_clean()


@pytest.mark.parametrize("match_tokens", [None, 2])
def test_states_are_announced_as_such_and_under_the_engines_own_hash(
    match_tokens: int | None, tmp_path: Path
) -> None:
    """With --prefix-match-unit vLLM's hashes are of fewer tokens than a block has."""
    with KvbmEngine(
        tmp_path, windows=("state", None), match_tokens=match_tokens, num_blocks=80, kv_events=True
    ) as engine:
        request = engine.add("a", PROMPT, 1)
        engine.run()
        engine.settle()
        engine.step()
        step = 4 // match_tokens if match_tokens else 1
        published = [maybe_convert_block_hash(block_hash) for block_hash in request.block_hashes]
        ours = [event for event in stored(engine) if event.medium == "CPU_TIER1"]
        kinds = {event.group_idx: event.kv_cache_spec_kind for event in ours}
        states = next(group for group, kind in kinds.items() if kind == "mamba")
        assert hashes([event for event in ours if event.group_idx == states]) == [published[12 * step - 1]]
        kv = [event for event in ours if event.group_idx != states]
        assert hashes(kv) == published[step - 1 : 12 * step : step]
        engine.assert_clean()


# ---------------------------------------------------------------- our stream, read by vLLM's decoder


def test_vllms_decoder_reads_our_batches_and_its_replays_are_ours() -> None:
    log = make_log()
    sink = ZmqSink(Place("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "topic"))
    publisher = EventPublisher(log, [sink], 2, Metrics())
    context = zmq.Context()
    sub, asking = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        sub.subscribe("topic")
        sub.connect(sink.endpoint)
        asking.connect(sink.replay_endpoint)
        assert sub.poll(10_000), "a beat"
        chain = Truth.chain(0)[:3]
        log.stored(Tier.HOST, chain)
        log.name(Names(chain, chain, None, 2, list(range(6)), 1, "loraA", [("loraA",)] * 3))
        log.removed(Tier.HOST, chain[:1])
        log.cleared(Tier.HOST, chain[1:])
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        events: list[Any] = []
        while len(events) < 3:
            assert sub.poll(10_000)
            topic, number, payload = sub.recv_multipart()
            batch = decoder.decode(payload)
            events += batch.events
            assert topic == b"topic" and batch.data_parallel_rank == 2
        first, second, third = events
        assert isinstance(first, BlockStored) and first.token_ids == list(range(6))
        assert (first.lora_id, first.lora_name, first.medium) == (1, "loraA", "CPU_TIER1")
        assert isinstance(second, BlockRemoved) and isinstance(third, AllBlocksCleared)
        asking.send_multipart([b"", number])
        assert asking.poll(10_000)
        empty, _, again, same = asking.recv_multipart()
        assert (empty, again, same) == (b"", number, payload)
        assert asking.poll(10_000)
        assert asking.recv_multipart()[2] == ZmqEventPublisher.END_SEQ
    finally:
        publisher.close()
        for socket in (sub, asking):
            socket.close(linger=0)
        context.term()


@pytest.mark.shows("KVBM_EVENTS=zmq", "KVBM_EVENTS_ENDPOINT")
def test_a_router_follows_a_real_scheduler_over_our_own_stream(tmp_path: Path) -> None:
    """Without vLLM's publisher: what the router sees is what the tiers hold, step for step."""
    from kvbm_core.events.consumer import ZmqReader

    ports = [free_port(), free_port()]
    extra = {
        "events": "zmq",
        "events_endpoint": f"tcp://127.0.0.1:{ports[0]}",
        "events_replay_endpoint": f"tcp://127.0.0.1:{ports[1]}",
    }
    with KvbmEngine(tmp_path, host_blocks=30, disk_blocks=40, extra=extra) as engine:
        reader = ZmqReader(extra["events_endpoint"], extra["events_replay_endpoint"])
        try:
            for turn in range(8):
                engine.ask(f"turn {turn}", range(50 * (turn % 5), 50 * (turn % 5) + 50), 2)
                engine.settle()

                def sees_it() -> bool:
                    engine.leader.poll()
                    reader.poll(0.02)
                    media = {m: len(h) for (m, _), h in reader.picture.places.items()}
                    host, disk = resident(engine, Tier.HOST), resident(engine, Tier.DISK)
                    return reader.picture.is_current and media == {"CPU_TIER1": host, "CPU_TIER2": disk}

                wait_for(sees_it)
            assert not engine.record.events
            engine.assert_clean()
        finally:
            reader.close()


@pytest.mark.shows(
    "DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE=dedup",
    "DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE=passthrough",
    "DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE",
)
@pytest.mark.parametrize("mode", ["dedup", "passthrough"])
def test_dynamos_one_stream_of_a_real_scheduler(tmp_path: Path, mode: str) -> None:
    """vLLM publishes its device's events over ZMQ; the reader hears the consolidator alone."""
    engine_end, published = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    extra = {"kv_events_consolidator_mode": mode}
    ends = (engine_end, published, published)
    with KvbmEngine(tmp_path, host_blocks=30, consolidated=ends, extra=extra) as engine:
        listener = Listener(published)
        try:
            wait_for(lambda: bool(listener.hear() or listener.batches))
            service = engine.connector.scheduler_side.publishing
            assert service is not None and service.consolidator is not None
            turn = 0
            while service.consolidator._last_number is None:  # until it hears vLLM's publisher
                turn += 1
                assert turn < 1000
                engine.ask(f"early {turn}", range(1000 + 8 * turn, 1005 + 8 * turn), 1)
            first = engine.add("a", PROMPT, 2)
            engine.run()
            engine.settle()
            engine.ask("b", range(60, 63), 1)
            device = {maybe_convert_block_hash(h) for h in first.block_hashes[:12]}
            wait_for(lambda: device <= there(listener)["GPU"])
            engine.reset_device()  # vLLM says AllBlocksCleared: what the host has stays
            engine.ask("c", range(70, 73), 1)
            host = {"dedup": "GPU", "passthrough": "CPU_TIER1"}[mode]
            wait_for(lambda: device <= there(listener)[host])
            if mode == "passthrough":
                wait_for(lambda: not device & there(listener)["GPU"])
            engine.reset_device(with_connector=True)
            engine.ask("d", range(80, 83), 1)
            wait_for(lambda: not device & (there(listener)["GPU"] | there(listener)["CPU_TIER1"]))
            assert not engine.record.events, "they go one way only"
            engine.assert_clean()
        finally:
            listener.close()


def there(listener: Listener) -> dict[str, set[Any]]:
    """What a router that hears this stream from the start takes to be where."""
    listener.hear()
    found: dict[str, set[Any]] = {"GPU": set(), "CPU_TIER1": set()}
    for _, payload in listener.batches:
        for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
            assert not isinstance(event, AllBlocksCleared)
            own = found[str(event.medium)]
            (own.update if isinstance(event, BlockStored) else own.difference_update)(event.block_hashes)
    return found


# ---------------------------------------------------------------- what dynamo.vllm asks


def events_at(endpoint: str) -> SimpleNamespace:
    """vLLM's own events over ZMQ."""
    return SimpleNamespace(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)


def config(**changes: Any) -> SimpleNamespace:
    """As dynamo.vllm makes one."""
    made = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="DynamoConnector", kv_connector_extra_config={}, engine_id="engine"
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        kv_events_config=events_at("tcp://*:20080"),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        additional_config={},
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.fixture(autouse=True)
def kept_ports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of this test alone."""
    monkeypatch.setattr(ports, "KEPT", kept := ports.KeptPorts())
    yield
    kept.close()


@pytest.mark.shows("DYN_KVBM_LEADER_ZMQ_PUB_PORT")
def test_dynamo_is_told_where_to_find_the_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("DYN_KVBM_LEADER_ZMQ_PUB_PORT", str(port - 1000))
    ends = consolidator_config.get_consolidator_endpoints(config())
    assert ends == ("tcp://127.0.0.1:20080", f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port}")


def test_a_port_that_another_engine_has_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    context = zmq.Context()
    taken = context.socket(zmq.PUB)
    try:
        port = taken.bind_to_random_port("tcp://127.0.0.1", 20_000, 30_000)
        monkeypatch.setenv("DYN_KVBM_LEADER_ZMQ_PUB_PORT", str(port - 1000))
        ends = consolidator_config.get_consolidator_endpoints(config())
        assert ends is not None and not ends[1].endswith(f":{port}")
    finally:
        taken.close(linger=0)
        context.term()


def test_two_engines_that_start_at_once_get_two_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second worker's router would read the first engine's events, which listens first."""
    port = free_port()
    program = f"from kvbm_core.events.ports import KEPT; print(KEPT.keep({port}), KEPT.keep(0))"
    assert ports.KEPT.keep(port) == port == ports.KEPT.keep(port)
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    refused, instead = other.stdout.split()
    assert refused == "None" and int(instead) not in (0, port)
    sink = ZmqSink(Place(f"tcp://127.0.0.1:{port}"))
    try:
        sink.open(Dumps(lambda: (0, Snapshot({})), SystemClock()))  # as the engine does, in its process
    finally:
        sink.close()


PAIR = SimpleNamespace(
    kv_connector="PdConnector",
    kv_connector_extra_config={"connectors": [{"kv_connector": "DynamoConnector"}, {"kv_connector": "X"}]},
)
OTHER = SimpleNamespace(kv_connector="NixlConnector", kv_connector_extra_config={})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"kv_transfer_config": PAIR}, True),
        ({"kv_transfer_config": OTHER}, False),
        ({"kv_transfer_config": None}, False),
        ({"cache_config": SimpleNamespace(enable_prefix_caching=False)}, False),
        ({"kv_events_config": None}, False),
        ({"parallel_config": SimpleNamespace(data_parallel_size=2)}, False),
        ({"kv_events_config": events_at("ipc:///run/events")}, True),
        ({"kv_events_config": events_at("tcp://*:0")}, False),  # a port of vLLM's choice
        ({"kv_events_config": events_at("tcp://127.0.0.1:20080")}, False),  # where vLLM connects
    ],
)
def test_when_there_is_something_to_consolidate(changes: dict[str, Any], expected: bool) -> None:
    assert consolidator_config.should_enable_consolidator(config(**changes)) is expected


@pytest.mark.shows("DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR")
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR", "false")
    assert consolidator_config.get_consolidator_endpoints(config()) is None


def test_a_port_beyond_the_last_one_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_LEADER_ZMQ_PUB_PORT", "65000")
    with pytest.raises(ConfigError, match="DYN_KVBM_LEADER_ZMQ_PUB_PORT=65000: leaves no port"):
        consolidator_config.get_consolidator_endpoints(config())
