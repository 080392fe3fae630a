"""The handshake: who may speak for a rank, one size for all, and a clear word when it cannot be."""

from __future__ import annotations

import pytest

from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.runtime.handshake import Disabled, Handshake, RankAck, SlotsReady
from kvbm_core.runtime.messages import PROTOCOL_VERSION, Acks, Configure, Hello, JobAck, Ready, Refused

A, B, STRANGER = b"a", b"b", b"stranger"


def hello(rank: int = 0, world_size: int = 1, **changes: object) -> Hello:
    fields = {
        "protocol": PROTOCOL_VERSION,
        "rank": rank,
        "world_size": world_size,
        "block_bytes": 100 + rank,
        "num_device_blocks": 50 - rank,
        "fingerprint": f"layout{rank}",
        **changes,
    }
    return Hello(**fields)


def one_worker(num_slots: int = 8) -> Handshake:
    handshake = Handshake(1, lambda block_bytes: num_slots)
    assert handshake.on_message(A, hello()) == [(A, Configure(num_slots))]
    return handshake


def two_workers(num_slots: int = 8) -> Handshake:
    handshake = Handshake(2, lambda block_bytes: num_slots)
    handshake.on_message(A, hello(0, 2))
    handshake.on_message(B, hello(1, 2))
    return handshake


def reason(handshake: Handshake) -> str:
    """Why the tier is off, as the leader is told."""
    event = handshake.inbox.popleft()
    assert isinstance(event, Disabled) and not handshake.inbox
    assert "\n" not in event.reason
    return event.reason


def test_all_ranks_are_sized_together_once_the_last_one_is_there() -> None:
    asked: list[int] = []
    handshake = Handshake(2, lambda block_bytes: asked.append(block_bytes) or 8)
    assert handshake.on_message(B, hello(1, 2)) == []
    assert handshake.on_message(B, hello(1, 2)) == []  # repeated: nobody has answered yet
    assert sorted(handshake.on_message(A, hello(0, 2))) == [(A, Configure(8)), (B, Configure(8))]
    assert asked == [201]
    assert handshake.on_message(B, hello(1, 2)) == [(B, Configure(8))]  # the answer had been lost
    assert asked == [201] and not handshake.inbox


def test_slots_are_usable_when_every_rank_has_them() -> None:
    handshake = two_workers()
    handshake.on_message(A, Ready(0, 8))
    assert not handshake.inbox and not handshake.wait(0)
    handshake.on_message(B, Ready(1, 3))
    assert handshake.wait(0)
    handshake.on_message(B, Ready(1, 8))
    assert list(handshake.inbox) == [
        SlotsReady(3, 8, 201, 49, "layout0-layout1"),
        SlotsReady(8, 8, 201, 49, "layout0-layout1"),
    ]


def test_news_that_overtake_each_other_take_no_slot_away() -> None:
    handshake = two_workers()
    handshake.on_message(A, Ready(0, 8))
    handshake.on_message(A, Ready(0, 3))
    handshake.on_message(B, Ready(1, 8))
    assert [event.slots for event in handshake.inbox if isinstance(event, SlotsReady)] == [8]


def test_a_rank_has_no_more_slots_than_were_asked_for() -> None:
    handshake = one_worker(4)
    handshake.on_message(A, Ready(0, 1000))
    assert [event.slots for event in handshake.inbox if isinstance(event, SlotsReady)] == [4]


def test_acknowledgements_reach_the_leader_in_order() -> None:
    handshake = one_worker()
    acks = [JobAck(1, Outcome.OK, 5, 0.0, 0.0), JobAck(2, Outcome.IO_ERROR, 0, 0.0, 0.0)]
    assert handshake.on_message(A, Acks(0, acks)) == []
    assert list(handshake.inbox) == [RankAck(0, ack) for ack in acks]


@pytest.mark.parametrize("rank", [0, 1, -1, 7])
def test_nobody_speaks_for_a_rank_that_is_not_his(rank: int) -> None:
    """A worker left over from an engine that died would else commit blocks that were never written."""
    handshake = one_worker()
    handshake.on_message(STRANGER, Acks(rank, [JobAck(1, Outcome.OK, 5, 0.0, 0.0)]))
    handshake.on_message(STRANGER, Ready(rank, 8))
    handshake.on_message(A, Configure(5))
    assert not handshake.inbox and handshake.foreign_total == 3


def test_before_its_hello_nobody_is_a_rank() -> None:
    handshake = Handshake(1, lambda block_bytes: 8)
    handshake.on_message(A, Ready(0, 8))
    handshake.on_message(A, Acks(0, [JobAck(1, Outcome.OK, 5, 0.0, 0.0)]))
    assert not handshake.inbox and handshake.foreign_total == 2


def test_a_second_process_of_the_same_rank_turns_the_tier_off() -> None:
    handshake = one_worker()
    ((identity, answer),) = handshake.on_message(STRANGER, hello())
    assert identity == STRANGER and isinstance(answer, Refused)
    assert "two processes say that they are rank 0" in reason(handshake)


def test_until_it_is_configured_a_rank_may_come_again_under_another_name() -> None:
    handshake = Handshake(2, lambda block_bytes: 8)
    handshake.on_message(STRANGER, hello(0, 2))
    handshake.on_message(A, hello(0, 2))
    assert sorted(handshake.on_message(B, hello(1, 2))) == [(A, Configure(8)), (B, Configure(8))]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (hello(protocol=PROTOCOL_VERSION + 1), "install one kvbm everywhere"),
        (hello(world_size=2), "rank 0 of 2"),
        (hello(rank=1), "rank 1 of 1"),
        (hello(rank=-1), "rank -1 of 1"),
        (hello(block_bytes=0), "0 bytes"),
        (hello(num_device_blocks=0), "0 of them"),
    ],
    ids=["protocol", "world", "rank too high", "rank negative", "no bytes", "no blocks"],
)
def test_a_hello_that_does_not_fit_is_refused_and_said(wrong: Hello, words: str) -> None:
    handshake = Handshake(1, lambda block_bytes: 8)
    ((identity, answer),) = handshake.on_message(A, wrong)
    assert identity == A and isinstance(answer, Refused) and words in answer.reason
    assert words in reason(handshake)
    assert handshake.wait(0)  # start-up does not wait for what will not come


def test_a_size_that_cannot_be_is_told_to_every_rank() -> None:
    def refuse(block_bytes: int) -> int:
        raise ConfigError("DYN_KVBM_CPU_CACHE_GB", 1, "too small")

    handshake = Handshake(2, refuse)
    handshake.on_message(A, hello(0, 2))
    answers = handshake.on_message(B, hello(1, 2))
    assert [(who, type(answer)) for who, answer in answers] == [(A, Refused), (B, Refused)]
    assert "DYN_KVBM_CPU_CACHE_GB" in reason(handshake)


def test_a_worker_that_cannot_take_part_is_heard_without_a_hello() -> None:
    handshake = Handshake(1, lambda block_bytes: 8)
    assert handshake.on_message(A, Refused(0, "unknown layout")) == []
    assert reason(handshake) == "worker 0: unknown layout"
