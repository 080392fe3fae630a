"""An owner and who asks it: what comes is what was asked for, whatever either side does meanwhile."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import numpy as np
import pytest
import zmq

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.fleet.keys import CurveKeys, new_keys
from kvbm_core.peers.client import CONCURRENCY, PeerStore, call_blocks
from kvbm_core.peers.copies import Copies
from kvbm_core.peers.server import MAX_QUESTIONS_EACH, PeerServer
from kvbm_core.peers.wire import (
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    Blocks,
    Done,
    Fetch,
    Find,
    Found,
    Hello,
    Refused,
    Welcome,
    decode_answer,
    hello_of,
    seal_of,
)
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.testing.peer_owner import Owner, content_of, key_of, wait_for
from kvbm_core.transfer.movers.store import StoreMover
from kvbm_core.transfer.plan import JobResult, OrderKind, TierOrder
from kvbm_core.types import BlockKey
from tests.faults.deadlines import asked
from tests.unit.peer_bench import (
    ASKER,
    BLOCK_BYTES,
    OWNER,
    SLOT_BYTES,
    FakeOwner,
    Stranger,
    asking,
    owning,
    targets_for,
)
from tests.unit.test_fleet_keys import keys_of

KEYS = [key_of(number) for number in range(1, 40)]
OK, MISS = Outcome.OK, Outcome.MISS
LONG_S = 10.0
"""Beyond a deadline, for a machine with other things to do."""


def is_block(target: memoryview, key: BlockKey) -> bool:
    return bytes(target[:BLOCK_BYTES]) == content_of(key, BLOCK_BYTES)


def is_untouched(target: memoryview) -> bool:
    return bytes(target) == b"\xee" * SLOT_BYTES


# ---------------------------------------------------------------- what is there comes


def test_what_the_owner_has_comes_and_nothing_else() -> None:
    with owning() as owner, asking() as store:
        owner.put(*KEYS[:5])
        peer, targets = store.at(owner.address), targets_for(7)
        assert peer.contains_many(KEYS[3:7], deadline_s=LONG_S) == [OK, OK, MISS, MISS]
        assert peer.get_many(KEYS[:7], targets, deadline_s=LONG_S) == [OK] * 5 + [MISS] * 2
        assert all(map(is_block, targets, KEYS[:5])) and all(map(is_untouched, targets[5:]))
        assert all(bytes(target[BLOCK_BYTES:]) == b"\xee" * 24 for target in targets)
        assert owner.metrics.snapshot()["kvbm_peer_lent_blocks_total"] == 5
        owner.assert_whole()


def test_a_target_in_several_pieces_is_filled_in_their_order() -> None:
    with owning() as owner, asking() as store:
        owner.put(KEYS[0])
        (target,) = targets_for(1)
        pieces = [target[:10], target[10:700], target[700:]]
        assert store.at(owner.address).get_many(KEYS[:1], [pieces], deadline_s=LONG_S) == [OK]
        assert is_block(target, KEYS[0])


def test_an_owner_and_its_asker_against_a_slow_twin(seed: int) -> None:
    random = Random(seed)
    with owning(num_slots=12) as owner, asking() as store:
        peer = store.at(owner.address)
        for _ in range(300):
            keys = random.sample(KEYS, random.randint(1, 6))
            action = random.random()
            if action < 0.3:
                owner.put(*keys)
            elif action < 0.4:
                with owner.lock:
                    owner.host.forget(keys)
            elif action < 0.42:
                with owner.lock:
                    owner.host.reset()
            else:
                with owner.lock:
                    has = [OK if owner.host.contains(key) else MISS for key in keys]
                if action < 0.6:
                    assert peer.contains_many(keys, deadline_s=LONG_S) == has
                    continue
                targets = targets_for(len(keys))
                assert peer.get_many(keys, targets, deadline_s=LONG_S) == has
                for key, target, outcome in zip(keys, targets, has, strict=True):
                    assert is_block(target, key) if outcome is OK else is_untouched(target)
        owner.assert_whole()


def test_keys_of_every_group_can_be_asked_for() -> None:
    with owning() as owner, asking() as store:
        keys = [KEYS[0], BlockKey(KEYS[0] + b"\x01"), BlockKey(KEYS[0] + b"\xff")]
        owner.put(*keys[:2])
        assert store.at(owner.address).contains_many(keys, deadline_s=LONG_S) == [OK, OK, MISS]


def test_only_named_owners_are_asked_and_nothing_is_put_anywhere() -> None:
    with owning() as owner, asking() as store:
        peer, targets, rejected = store.at(owner.address), targets_for(1), [Outcome.REJECTED]
        for one in (store, peer):
            assert one.put_many(KEYS[:1], targets, deadline_s=1.0) == rejected
            assert one.remove_many(KEYS[:1], deadline_s=1.0) == rejected
            assert not list(one.scan())
        assert store.contains_many(KEYS[:1], deadline_s=1.0) == rejected
        assert store.get_many(KEYS[:1], targets, deadline_s=1.0) == rejected
        store.close()
        assert peer.contains_many(KEYS[:1], deadline_s=1.0) == rejected


# ---------------------------------------------------------------- held while they are copied, and no longer


def test_a_block_that_was_forgotten_while_it_was_copied_is_not_sent() -> None:
    with owning() as owner, asking() as store:
        owner.put(*KEYS[:2])

        def forget() -> None:
            with owner.lock:
                owner.host.forget(KEYS[:1])

        owner.line.before_return = forget
        targets = targets_for(2)
        got = store.at(owner.address).get_many(KEYS[:2], targets, deadline_s=LONG_S)
        assert got == [Outcome.TIMED_OUT] * 2 and all(map(is_untouched, targets))
        owner.assert_whole()


def test_a_slot_that_was_given_to_another_block_meanwhile_is_not_sent() -> None:
    """The rank was stopped for longer than the leader holds: what it copies then is of somebody else."""
    with owning(num_slots=1) as owner:
        owner.put(KEYS[0])
        owner.line.hold()
        stranger = Stranger(owner.address)
        stranger.say(Fetch(1, OWNER.instance, [KEYS[0]], 50))
        owner.line.wait_held()
        loan = owner.line.lender.lend(0, 1, KEYS[:1], 0.01)
        wait_for(lambda: owner.line.lender.expire() or not owner.line.lender.num_loans)
        owner.put(KEYS[1])
        owner.server.lent(1, loan)  # the loan that has ended
        owner.line.wait_held(2)
        owner.line.let_go()
        answer = decode_answer(stranger.hear()[0])
        assert isinstance(answer, Done) and OK not in answer.outcomes
        stranger.close()
        owner.assert_whole()


def test_an_owner_whose_leader_does_not_answer_costs_the_deadline_and_keeps_nothing() -> None:
    with owning() as owner, asking() as store:
        owner.put(*KEYS[:4])
        owner.line.hold()
        with asked() as waits_s:
            got = store.at(owner.address).get_many(KEYS[:4], targets_for(4), deadline_s=0.3)
        assert got == [Outcome.TIMED_OUT] * 4 and 0.0 < max(waits_s) <= 0.3
        wait_for(lambda: not owner.server.copied_blocks)
        owner.line.let_go()
        owner.assert_whole()
        with asking() as other:
            assert other.at(owner.address).contains_many(KEYS[:1], deadline_s=LONG_S) == [OK]


def test_an_asker_that_goes_away_leaves_nothing_held() -> None:
    with owning() as owner:
        owner.put(*KEYS[:20])
        owner.line.hold()
        stranger = Stranger(owner.address)
        stranger.say(Fetch(1, OWNER.instance, list(KEYS[:20]), 5000))
        owner.line.wait_held()
        stranger.close()
        owner.line.let_go()
        owner.assert_whole()


# ---------------------------------------------------------------- who is not served


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_ranks": 2}, "ranks"),
        ({"rank": 1}, "rank"),
        ({"namespace": "another"}, "namespace"),
        ({"fingerprint": "another\nlayout"}, "layout"),
        ({"block_bytes": 2000}, "bytes of a block"),
        ({"instance": "owner"}, "own address"),
    ],
)
def test_who_does_not_fit_is_refused_by_name_in_one_line_once(
    change: dict[str, Any], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    from kvbm_core.peers.address import address_of_rank, parse_address

    terms = replace(ASKER, **change)
    with owning() as owner, asking(terms) as store, caplog.at_level(logging.WARNING, "kvbm"):
        owner.put(*KEYS[:1])
        address = parse_address(owner.address)
        assert address is not None
        source = address._replace(port=address.port - terms.rank).text  # asked is the port of its rank
        assert address_of_rank(source, terms.rank) == owner.address
        for _ in range(3):
            assert store.at(source).contains_many(KEYS[:1], deadline_s=LONG_S) == [Outcome.INCOMPATIBLE]
        wait_for(lambda: owner.line.counts == [0, 1, 0])  # asked once
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 2 and all(word in line and "\n" not in line for line in lines), lines


def test_another_protocol_is_refused() -> None:
    with owning() as owner:
        stranger = Stranger(owner.address, None)
        hello = hello_of(ASKER)
        stranger.say(Hello(99, *[getattr(hello, name) for name in hello.__struct_fields__[1:]]))
        answer = decode_answer(stranger.hear()[0])
        assert isinstance(answer, Refused) and "protocol" in answer.reason
        stranger.close()


def test_another_instance_at_the_same_address_is_met_anew() -> None:
    with asking() as store:
        with owning() as first:
            first.put(KEYS[0])
            address, peer = first.address, store.at(first.address)
            assert peer.contains_many(KEYS[:2], deadline_s=LONG_S) == [OK, MISS]
        got = peer.contains_many(KEYS[:2], deadline_s=LONG_S)
        assert got == [Outcome.IO_ERROR] * 2  # at once, not after the deadline
        with owning(terms=replace(OWNER, instance="second"), bind=address) as second:
            second.put(KEYS[1])
            assert peer.contains_many(KEYS[:2], deadline_s=LONG_S) == [MISS, OK]
            targets = targets_for(2)
            assert peer.get_many(KEYS[:2], targets, deadline_s=LONG_S) == [MISS, OK]
            assert is_block(targets[1], KEYS[1])


def test_a_connection_that_has_ended_is_not_used_again() -> None:
    with asking() as store:
        with owning() as first:
            address, peer = first.address, store.at(first.address)
            assert peer.contains_many(KEYS[:1], deadline_s=LONG_S) == [MISS]
        (link,) = store._idle[address]
        wait_for(lambda: not link.is_usable)
        with owning(replace(OWNER, instance="second"), bind=address) as second:
            second.put(KEYS[0])
            assert peer.contains_many(KEYS[:1], deadline_s=LONG_S) == [OK]


def test_a_question_to_another_instance_is_refused() -> None:
    with owning() as owner:
        owner.put(KEYS[0])
        stranger = Stranger(owner.address)
        stranger.say(Fetch(1, "the one before", [KEYS[0]], 1000))
        assert isinstance(decode_answer(stranger.hear()[0]), Refused)
        stranger.close()
        owner.assert_whole()


HOSTILE: dict[str, list[Any]] = {
    "nothing": [b""],
    "garbage": [b"\xc1\xff" * 100],
    "a hundred frames": [b"x"] * 100,
    "an answer": [b"\x81\xa4type\xa4done"],
    "keys that are none": [Fetch(1, OWNER.instance, [b"short"], 1000)],
    "no key": [Fetch(1, OWNER.instance, [], 1000)],
    "one key twice": [Find(1, OWNER.instance, [KEYS[0], KEYS[0]], 1000)],
    "too many keys": [Find(1, OWNER.instance, [key_of(n) for n in range(MAX_KEYS + 1)], 1000)],
    "a question and more": [Find(1, OWNER.instance, [KEYS[0]], 1000), b"more"],
    "nested without end": [b"\x91" * 60_000],
}


@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("said_hello", [True, False], ids=["after hello", "without hello"])
def test_what_is_no_question_is_counted_and_nobody_else_suffers(parts: list[Any], said_hello: bool) -> None:
    with owning() as owner, asking() as store:
        owner.put(*KEYS[:3])
        stranger = Stranger(owner.address, ASKER if said_hello else None)
        stranger.say(*parts)
        assert isinstance(decode_answer(stranger.hear()[0]), Refused)
        wait_for(lambda: owner.line.counts == [0, 0, 1])
        assert store.at(owner.address).contains_many(KEYS[:1], deadline_s=LONG_S) == [OK]
        stranger.close()
        owner.assert_whole()


def test_a_message_of_100_mb_ends_its_connection_alone() -> None:
    with owning() as owner, asking() as store:
        owner.put(KEYS[0])
        stranger = Stranger(owner.address)
        monitor = stranger.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.say(bytes(100 << 20))
        assert monitor.poll(int(LONG_S * 1000)), "it was taken"
        assert store.at(owner.address).contains_many(KEYS[:1], deadline_s=LONG_S) == [OK]
        stranger.socket.disable_monitor()
        monitor.close()
        stranger.close()


def test_random_bytes_never_end_the_server(seed: int) -> None:
    random = Random(seed)
    with owning() as owner, asking() as store:
        owner.put(KEYS[0])
        stranger = Stranger(owner.address)
        good = [bytes(part) for part in (b"\x86", os.urandom(8))]
        for _ in range(300):
            parts = [random.randbytes(random.randint(0, 200)) for _ in range(random.randint(1, 3))]
            stranger.say(*(parts if random.random() < 0.8 else good))
        assert store.at(owner.address).contains_many(KEYS[:1], deadline_s=LONG_S) == [OK]
        stranger.close()
        owner.assert_whole()


def test_what_is_too_much_is_put_off_at_once() -> None:
    with owning(max_bytes=8 * BLOCK_BYTES) as owner, asking() as store:
        owner.put(*KEYS[:20])
        owner.line.hold()
        stranger, others = Stranger(owner.address), [Stranger(owner.address) for _ in range(3)]
        for one in (stranger, *others):
            one.say(Fetch(1, OWNER.instance, list(KEYS[:8]), 10_000))
        owner.line.wait_held(4)
        started_s = time.monotonic()
        got = store.at(owner.address).get_many(KEYS[:2], targets_for(2), deadline_s=LONG_S)
        assert got == [Outcome.BUSY] * 2 and time.monotonic() - started_s < LONG_S / 2
        stranger.say(Fetch(2, OWNER.instance, list(KEYS[8:9]), 10_000))
        assert decode_answer(stranger.hear()[0]) == Done(2, [Outcome.BUSY])
        owner.line.let_go()
        answers = [decode_answer(stranger.hear()[0]) for _ in range(2)]
        assert [type(answer) for answer in answers] == [Blocks, Done]
        assert answers[1] == Done(1, [OK] * 2 + [Outcome.BUSY] * 6), "as many as there was memory for"
        for one in (stranger, *others):
            one.close()
        owner.assert_whole()
        wait_for(lambda: owner.line.counts[0] == 6)
        assert store.at(owner.address).get_many(KEYS[:2], targets_for(2), deadline_s=LONG_S) == [OK] * 2


def test_one_asker_has_so_many_questions_under_way_at_most() -> None:
    with owning() as owner:
        owner.line.hold()
        stranger = Stranger(owner.address)
        for number in range(MAX_QUESTIONS_EACH + 1):
            stranger.say(Find(number, OWNER.instance, [KEYS[0]], 10_000))
        assert decode_answer(stranger.hear()[0]) == Done(MAX_QUESTIONS_EACH, [Outcome.BUSY])
        owner.line.let_go()
        assert isinstance(decode_answer(stranger.hear()[0]), Found)
        stranger.close()
        owner.assert_whole()


def test_an_asker_that_reads_nothing_keeps_copies_within_their_bound() -> None:
    """Copies of a block are in memory until they are sent, and nobody else's are kept waiting by them."""
    big = replace(OWNER, block_bytes=1 << 20)
    with owning(terms=big, max_bytes=32 << 20) as owner:
        owner.put(*KEYS[:32])
        stranger = Stranger(owner.address, replace(ASKER, block_bytes=1 << 20))
        for number in range(20):
            stranger.say(Fetch(number, OWNER.instance, list(KEYS[:8]), 60_000))
        wait_for(lambda: owner.line.counts[0] > 0)
        assert owner.server.copied_blocks <= 8
        with asking(replace(ASKER, block_bytes=1 << 20)) as store:
            target = np.zeros(1 << 20, np.uint8).data
            assert store.at(owner.address).get_many(KEYS[:1], [target], deadline_s=LONG_S) == [OK]
        stranger.close()
        owner.assert_whole()


# ---------------------------------------------------------------- owners that lie


def block_of(call_id: int, number: int, key: BlockKey, **other: Any) -> list[Any]:
    content = other.get("content", content_of(key, BLOCK_BYTES))
    seal = other.get("seal", seal_of(key, memoryview(content_of(key, BLOCK_BYTES))))
    return [Blocks(call_id, [number], [seal]), content]


LIES: dict[str, Any] = {
    "another call": lambda q: [block_of(q.call_id + 1, 0, KEYS[0]), [Done(q.call_id + 1, [OK, OK])]],
    "a number beyond": lambda q: [block_of(q.call_id, 2, KEYS[0]), [Done(q.call_id, [OK, OK])]],
    "a number below": lambda q: [block_of(q.call_id, -1, KEYS[0]), [Done(q.call_id, [OK, OK])]],
    "short bytes": lambda q: [block_of(q.call_id, 0, KEYS[0], content=b"x"), [Done(q.call_id, [OK, OK])]],
    "long bytes": lambda q: [
        block_of(q.call_id, 0, KEYS[0], content=bytes(BLOCK_BYTES + 1)),
        [Done(q.call_id, [OK, OK])],
    ],
    "other bytes": lambda q: [
        block_of(q.call_id, 0, KEYS[0], content=bytes(BLOCK_BYTES)),
        [Done(q.call_id, [OK, OK])],
    ],
    "another seal": lambda q: [block_of(q.call_id, 0, KEYS[0], seal=b"?"), [Done(q.call_id, [OK, OK])]],
    "another block": lambda q: [block_of(q.call_id, 0, KEYS[1]), [Done(q.call_id, [OK, OK])]],
    "done without a block": lambda q: [[Done(q.call_id, [OK, OK])]],
    "too few outcomes": lambda q: [[Done(q.call_id, [OK])]],
    "found": lambda q: [[Found(q.call_id, [True, True])]],
    "a second welcome": lambda q: [[Welcome("owner")]],
    "no bytes behind a block": lambda q: [[Blocks(q.call_id, [0], [b""])], [Done(q.call_id, [OK, OK])]],
    "fewer bytes than blocks": lambda q: [[Blocks(q.call_id, [0, 1], [b"", b""]), b"x"]],
    "more bytes than blocks": lambda q: [[Blocks(q.call_id, [0], [b""]), b"x", b"y"]],
    "bytes behind the end": lambda q: [[Done(q.call_id, [OK, OK]), b"x"]],
    "garbage": lambda q: [[b"\xc1" * 50]],
    "many frames": lambda q: [[b"x"] * 50],
    "much": lambda q: [[bytes(MAX_MESSAGE_BYTES + 10)]],
    "silence": lambda q: [],
    "far more than a block": lambda q: [block_of(q.call_id, 0, KEYS[0], content=bytes(1 << 20))],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_an_owner_that_lies_fills_nothing_and_is_over_in_time(lie: Any) -> None:
    owner = FakeOwner(lie, Welcome("owner"))
    try:
        with asking() as store, asked() as waits_s:
            for _ in range(2):
                targets = targets_for(2)
                got = store.at(owner.address).get_many(KEYS[:2], targets, deadline_s=0.4)
                assert OK not in got and 0.0 < max(waits_s) <= 0.4
                assert is_untouched(targets[1])
    finally:
        owner.close()


@pytest.mark.shows("KVBM_PEER_DEADLINE_S")
def test_an_order_to_an_owner_that_is_silent_costs_its_deadline_once_and_others_nothing() -> None:
    """However many questions it is: this one has 24, on four threads."""
    silent, num_blocks, deadline_s = FakeOwner(LIES["silence"], Welcome("owner")), 24 * 64, 0.5
    slab = HostSlab(num_blocks, SLOT_BYTES)
    slab.wait_ready(LONG_S)
    with owning() as owner:
        store = PeerStore(ASKER)
        mover = StoreMover("peers", store, slab, io_deadline_s=deadline_s)
        try:
            owner.put(*KEYS[:4])
            ended: SimpleQueue[JobResult] = SimpleQueue()
            for job_id, (source, count) in enumerate(((silent.address, num_blocks), (owner.address, 4))):
                keys = tuple(key_of(n + 1) for n in range(count))
                slots = tuple(range(count))
                mover.submit(
                    TierOrder(job_id, "peers", OrderKind.FETCH, keys, slots, source=source), ended.put
                )
            results = [ended.get(timeout=LONG_S) for _ in range(2)]
            assert {result.job_id: result.outcome for result in results} == {0: Outcome.TIMED_OUT, 1: OK}
            assert silent.questions <= CONCURRENCY
        finally:
            mover.close()
            silent.close()
            slab.close()


def test_more_bytes_than_any_block_has_are_not_even_taken() -> None:
    owner = FakeOwner(LIES["far more than a block"], Welcome("owner"))
    try:
        with asking() as store:
            got = store.at(owner.address).get_many(KEYS[:2], targets_for(2), deadline_s=LONG_S)
            assert got == [Outcome.IO_ERROR] * 2
    finally:
        owner.close()


def test_blocks_that_came_before_the_owner_lied_count_and_no_block_counts_twice() -> None:
    def script(question: Fetch) -> list[Any]:
        call_id = question.call_id
        return [block_of(call_id, 0, KEYS[0]), block_of(call_id, 0, KEYS[1]), [Done(call_id, [OK, OK])]]

    owner = FakeOwner(script, Welcome("owner"))
    try:
        with asking() as store:
            targets = targets_for(2)
            got = store.at(owner.address).get_many(KEYS[:2], targets, deadline_s=LONG_S)
            assert (
                got == [OK, Outcome.IO_ERROR] and is_block(targets[0], KEYS[0]) and is_untouched(targets[1])
            )
    finally:
        owner.close()


@pytest.mark.parametrize("welcome", [Refused("x" * 10_000 + "\n"), Done(0, []), b"\x00" * 100], ids=repr)
def test_an_owner_that_does_not_welcome_us_costs_no_exception(welcome: Any) -> None:
    owner = FakeOwner(lambda question: [], welcome)
    try:
        with asking() as store:
            assert OK not in store.at(owner.address).contains_many(KEYS[:1], deadline_s=0.5)
            assert owner.questions == 0
    finally:
        owner.close()


@pytest.mark.parametrize(
    "source", ["", "tcp://", "tcp://h:0", "tcp://h:99999", "ipc:///tmp/x", "a b:1", "x" * 999]
)
def test_what_is_no_address_is_not_asked(source: str) -> None:
    with asking() as store:
        assert store.at(source).contains_many(KEYS[:1], deadline_s=1.0) == [Outcome.REJECTED]


def test_nobody_listens_there() -> None:
    with owning() as owner:
        address = owner.address
    with asking() as store:
        started_s = time.monotonic()
        assert store.at(address).contains_many(KEYS[:1], deadline_s=LONG_S) == [Outcome.IO_ERROR]
        assert time.monotonic() - started_s < LONG_S / 2


def test_calls_are_not_larger_than_memory_for_them() -> None:
    assert call_blocks(128 << 10) == 128 and call_blocks(2 << 20) == 8 and call_blocks(1 << 30) == 1


# ---------------------------------------------------------------- keys


def keys_with(folder: Path, name: str, allowed: Path) -> CurveKeys:
    """Of a key pair that is there already."""
    secret = folder / f"{name}.key_secret"
    settings = KvbmSettings.from_env({"curve_key_file": str(secret), "curve_allowed": str(allowed)})
    keys = CurveKeys.from_settings(settings)
    assert keys is not None
    return keys


def test_with_keys_only_those_on_the_list_are_served(tmp_path: Path) -> None:
    friends = tmp_path / "friends"
    new_keys(friends, "127.0.0.1")
    friend, owner_keys = keys_of(friends, "friend"), keys_with(friends, "127.0.0.1", friends)
    stranger = keys_of(tmp_path / "others", "stranger", friends / "127.0.0.1.key")
    with owning(keys=owner_keys) as owner:
        owner.put(KEYS[0])
        with asking(keys=friend) as store:
            targets = targets_for(1)
            assert store.at(owner.address).get_many(KEYS[:1], targets, deadline_s=LONG_S) == [OK]
            assert is_block(targets[0], KEYS[0])
        for keys in (stranger, None):
            with asking(keys=keys) as store:
                assert OK not in store.at(owner.address).contains_many(KEYS[:1], deadline_s=1.0)
        assert owner.metrics.snapshot()["kvbm_peer_lent_blocks_total"] == 1
        wait_for(lambda: owner.line.counts[1] >= 1)
        owner.assert_whole()


def test_large_blocks_come_encrypted_too(tmp_path: Path) -> None:
    new_keys(tmp_path, "127.0.0.1")
    keys, num_bytes = keys_with(tmp_path, "127.0.0.1", tmp_path), 1 << 17
    with owning(replace(OWNER, block_bytes=num_bytes), keys=keys) as owner:
        owner.put(KEYS[0])
        with asking(replace(ASKER, block_bytes=num_bytes), keys) as store:
            targets = targets_for(1, num_bytes)
            assert store.at(owner.address).get_many(KEYS[:1], targets, deadline_s=LONG_S) == [OK]
            assert bytes(targets[0]) == content_of(KEYS[0], num_bytes)


def test_an_owner_without_the_right_key_is_not_believed(tmp_path: Path) -> None:
    """Whoever has taken an owner's address gets no question that it can read."""
    keys_of(tmp_path / "ours", "127.0.0.1")
    asker = keys_of(tmp_path / "ours", "asker")
    impostor = keys_of(tmp_path / "theirs", "127.0.0.1", tmp_path / "ours")
    with owning(keys=impostor) as owner, asking(keys=asker) as store:
        owner.put(KEYS[0])
        assert OK not in store.at(owner.address).contains_many(KEYS[:1], deadline_s=1.0)


def test_without_keys_nobody_off_this_machine_is_asked_or_served() -> None:
    with asking() as store:
        assert store.at("tcp://192.0.2.1:5000").contains_many(KEYS[:1], deadline_s=1.0) == [Outcome.REJECTED]
    with pytest.raises(ConfigError, match=r"KVBM_PEER_BIND=.*KVBM_CURVE_KEY_FILE"):
        Owner(OWNER, bind="tcp://0.0.0.0:*")


def test_an_address_that_is_taken_is_one_clear_line() -> None:
    with owning() as owner, pytest.raises(ConfigError, match=r"KVBM_PEER_BIND.*cannot be bound"):
        PeerServer(owner.address, OWNER, owner, owner.line, copies=Copies(BLOCK_BYTES, 1 << 20))


def test_without_peers_nothing_of_them_is_imported() -> None:
    program = (
        "import sys, kvbm_core.runtime.assembly, kvbm_core.runtime.worker\n"
        "print(*[name for name in sys.modules if name.startswith(('kvbm_core.peers', 'kvbm_core.fleet'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
