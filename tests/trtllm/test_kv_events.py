"""KV events under TensorRT-LLM's double: a router that follows over ZMQ sees what the tiers hold, and
Dynamo's router one stream of the device and of kvbm.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm_core.events import publisher as publisher_module
from kvbm_core.events.consumer import ZmqReader
from kvbm_core.events.wire import BlockStored, decode_batch
from kvbm_core.identity.roots import Stamp
from kvbm_trtllm.events import own_hash

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")

from tests.engines.ports import free_port
from tests.trtllm.double import NEWEST, RELEASED, World
from tests.trtllm.double.failure import PATIENCE_S
from tests.trtllm.harness import KeepingExecutor, Kind, Serving, serve
from tests.trtllm.scenarios import EACH_BLOCK
from tests.unit.test_consolidator import Engine, Listener

PROMPT = list(range(40))
KINDS = [Kind(RELEASED, "v1", True), Kind(NEWEST, "v2", False)]


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a reader that comes late hears something soon."""
    monkeypatch.setattr(publisher_module, "HEARTBEAT_S", 0.1)


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "what was waited for did not come"
        time.sleep(0.002)


def host_hashes(serving: Serving) -> set[object]:
    keys = serving.leader.chain.host.keys()
    return set(map(own_hash, keys))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_router_sees_what_the_host_holds(kind: Kind) -> None:
    ports = free_port(), free_port()
    env = {
        "KVBM_EVENTS": "zmq",
        "KVBM_EVENTS_ENDPOINT": f"tcp://127.0.0.1:{ports[0]}",
        "KVBM_EVENTS_REPLAY_ENDPOINT": f"tcp://127.0.0.1:{ports[1]}",
    }
    with World(kind.version), serve(0, kind, host_blocks=30, env=env) as serving:
        reader = ZmqReader(env["KVBM_EVENTS_ENDPOINT"], env["KVBM_EVENTS_REPLAY_ENDPOINT"])
        try:
            for turn in range(6):
                serving.ask(range(100 * turn, 100 * turn + 40))

                def sees_it() -> bool:
                    reader.poll(0.02)
                    there = reader.picture.places.get(("CPU_TIER1", 0), frozenset())
                    return reader.picture.is_current and there == host_hashes(serving) and bool(there)

                wait_for(sees_it)
        finally:
            reader.close()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_when_it_becomes_known_which_weights_these_are_old_names_are_void(kind: Kind, tmp_path: Path) -> None:
    env = {"KVBM_EVENTS": "zmq", "KVBM_EVENTS_ENDPOINT": f"ipc://{tmp_path}/a"}
    env["KVBM_EVENTS_REPLAY_ENDPOINT"] = f"ipc://{tmp_path}/b"
    with World(kind.version), serve(0, kind, host_blocks=60, env=env) as serving:
        reader = ZmqReader(env["KVBM_EVENTS_ENDPOINT"], env["KVBM_EVENTS_REPLAY_ENDPOINT"])
        try:
            serving.ask(PROMPT)
            serving.settle()  # what is stored later than the next line reads would be taken for new
            old = host_hashes(serving)
            assert len(old) > 8
            wait_for(lambda: sees(reader, old))
            assert serving.executor.leader is not None
            serving.executor.leader.part._weights._stamp = Stamp("sha256:known", is_lasting=True)
            serving.ask(range(100, 140))
            serving.settle()
            new = host_hashes(serving) - old
            assert len(new) > 8
            wait_for(lambda: sees(reader, new))
        finally:
            reader.close()


def sees(reader: ZmqReader, hashes: set[object]) -> bool:
    """Whether a router takes these to be in the host tier, and no others."""
    reader.poll(0.02)
    return reader.picture.is_current and reader.picture.places.get(("CPU_TIER1", 0), frozenset()) == hashes


@pytest.mark.parametrize("salt", [None, "salt of mine"])
def test_tokens_are_told_unless_there_is_a_salt(salt: str | None, tmp_path: Path) -> None:
    env = {"KVBM_EVENTS": "zmq", "KVBM_EVENTS_ENDPOINT": f"ipc://{tmp_path}/a"}
    env["KVBM_EVENTS_REPLAY_ENDPOINT"] = f"ipc://{tmp_path}/b"
    with World(NEWEST), serve(0, KINDS[1], host_blocks=30, env=env) as serving:
        listener = Listener(env["KVBM_EVENTS_ENDPOINT"])
        try:
            wait_for(lambda: bool(listener.hear() or listener.batches))
            serving.ask(PROMPT, **({} if salt is None else {"cache_salt": salt}))
            wait_for(lambda: bool(listener.hear() or _stored(listener)))
            for event in _stored(listener):
                size = event.block_size * len(event.block_hashes)
                assert len(event.token_ids) == (size if salt is None else 0)
        finally:
            listener.close()


def test_of_a_replay_with_a_salt_no_tokens_are_told(tmp_path: Path) -> None:
    """Of one that was loaded while it was parked, of which nobody is asked again."""
    env = {**EACH_BLOCK, "KVBM_EVENTS": "zmq", "KVBM_EVENTS_ENDPOINT": f"ipc://{tmp_path}/a"}
    env["KVBM_EVENTS_REPLAY_ENDPOINT"] = f"ipc://{tmp_path}/b"
    with World(NEWEST), serve(0, KINDS[1], executor_class=KeepingExecutor, env=env) as serving:
        listener = Listener(env["KVBM_EVENTS_ENDPOINT"])
        try:
            wait_for(lambda: bool(listener.hear() or listener.batches))
            serving.ask(PROMPT, cache_salt="salt of mine")
            serving.forget_device()
            request = serving.submit(PROMPT, 30, cache_salt="salt of mine")
            serving.run_to(request, "generation")
            serving.executor.step()
            serving.settle_without_steps()  # else it would reach its last token
            serving.executor.drop_device_cache()
            serving.executor.preempt(request)
            serving.executor.run_until_idle()
            assert serving.reason(request) == "length"
            assert len(serving.executor.calls.named("get_num_new_matched_tokens")) == 2
            serving.settle()
            hashes = host_hashes(serving)

            def hears_all() -> bool:
                listener.hear()
                return {one for event in _stored(listener) for one in event.block_hashes} >= hashes

            wait_for(hears_all)
            assert not any(event.token_ids for event in _stored(listener))
        finally:
            listener.close()


def _stored(listener: Listener) -> list[BlockStored]:
    batches = [decode_batch(payload) for _, payload in listener.batches]
    events = [event for batch in batches if batch is not None for event in batch.events]
    return [event for event in events if isinstance(event, BlockStored)]


def test_dynamo_reads_one_stream_of_device_and_host() -> None:
    """The device's events as dynamo.trtllm publishes them: signed hashes of TensorRT-LLM's own, no medium."""
    device_port, pub_port = free_port(), free_port() - 1000
    env = {"DYN_KVBM_TRTLLM_ZMQ_PORT": str(device_port), "DYN_KVBM_LEADER_ZMQ_PUB_PORT": str(pub_port)}
    engine = Engine(f"tcp://127.0.0.1:{device_port}")
    try:
        with World(RELEASED), serve(0, KINDS[0], host_blocks=30, env=env) as serving:
            listener = Listener(f"tcp://127.0.0.1:{pub_port + 1000}")
            try:
                wait_for(lambda: bool(listener.hear() or listener.batches))
                size = serving.leader.groups[0].block_size_tokens
                device = [-1 - number for number in range(3)]
                event = {
                    "type": "BlockStored",
                    "block_hashes": device,
                    "parent_block_hash": None,
                    "token_ids": PROMPT[: 3 * size],
                    "block_size": size,
                }
                # Again and again: at first nobody listens.
                wait_for(lambda: engine.say(event) is None and bool(listener.hear() or _stored(listener)))
                assert _stored(listener)[0].block_hashes == device
                serving.ask(PROMPT)

                def is_told() -> bool:
                    listener.hear()
                    serving.executor.run_until_idle()
                    told = [h for event in _stored(listener) for h in event.block_hashes]
                    return len(told) == len(host_hashes(serving)) > 3 and told[:3] == device

                wait_for(is_told)
                assert {event.medium for event in _stored(listener)} == {"GPU"}
                second = _stored(listener)[1]
                assert second.parent_block_hash == device[-1], "the name that the router knows"
            finally:
                listener.close()
    finally:
        engine.close()
