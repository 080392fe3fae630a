"""The handshake: who may speak for a rank, one size for all, and a clear word when it cannot be."""

from __future__ import annotations

import msgspec
import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.observe.readiness import Readiness
from kvbm_core.runtime.handshake import (
    ANSWER_WITHIN_S,
    Disabled,
    Handshake,
    PlanTier,
    RankAnswer,
    RankReplaced,
    SlotsFound,
    SlotsReady,
    TierOff,
    TierReach,
)
from kvbm_core.runtime.messages import (
    PROTOCOL_VERSION,
    Ask,
    Configure,
    Hello,
    Here,
    Join,
    Joined,
    Message,
    Move,
    Ready,
    Refused,
    Results,
    TierDirect,
    TierFound,
    TierRefused,
    decode,
    encode,
)
from kvbm_core.runtime.replicas import JOIN_WITHIN_S
from kvbm_core.storage.disk.allocate import DiskError
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.storage.disk.scan import CHUNK_SLOTS
from kvbm_core.transfer.plan import Fetched, JobResult, OrderKind, TierOrder, TierPlace
from kvbm_core.types import BlockKey

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
    acks = [JobResult(1, Outcome.OK, 5, 0.0, 0.0), JobResult(2, Outcome.IO_ERROR, 0, 0.0, 0.0)]
    assert handshake.on_message(A, Results(0, acks)) == []
    assert list(handshake.inbox) == [RankAnswer(0, ack) for ack in acks]


@pytest.mark.parametrize("rank", [0, 1, -1, 7])
def test_nobody_speaks_for_a_rank_that_is_not_his(rank: int) -> None:
    """A worker left over from an engine that died would else commit blocks that were never written."""
    handshake = one_worker()
    handshake.on_message(STRANGER, Results(rank, [JobResult(1, Outcome.OK, 5, 0.0, 0.0)]))
    handshake.on_message(STRANGER, Ready(rank, 8))
    handshake.on_message(A, Configure(5))
    assert not handshake.inbox and handshake.foreign_total == 3


def test_before_its_hello_nobody_is_a_rank() -> None:
    handshake = Handshake(1, lambda block_bytes: 8)
    handshake.on_message(A, Ready(0, 8))
    handshake.on_message(A, Results(0, [JobResult(1, Outcome.OK, 5, 0.0, 0.0)]))
    assert not handshake.inbox and handshake.foreign_total == 2


# ---------------------------------------------------------------- a second process in a rank's place


def ready_ranks(clock: ManualClock) -> Handshake:
    """Two ranks that are in service; what they have said so far has been read."""
    handshake = Handshake(2, lambda block_bytes: 8, clock=clock)
    for rank, identity in enumerate((A, B)):
        handshake.on_message(identity, hello(rank, 2))
    for rank, identity in enumerate((A, B)):
        handshake.on_message(identity, Ready(rank, 8))
    handshake.inbox.clear()
    assert handshake.readiness().is_ready
    return handshake


def test_a_second_process_of_a_rank_that_lives_is_refused_and_nothing_else_happens() -> None:
    clock = ManualClock()
    handshake = ready_ranks(clock)
    for _ in range(3):  # whenever one comes: the rank is asked anew
        clock.advance(100.0)
        assert handshake.on_message(STRANGER, hello(1, 2)) == [(B, Ask([], is_last=False))]
        assert handshake.on_message(STRANGER, hello(1, 2)) == []  # no answer yet, either way
        clock.advance(1.0)
        assert handshake.on_message(B, Here(1)) == []
        ((identity, answer),) = handshake.on_message(STRANGER, hello(1, 2))
        assert identity == STRANGER and isinstance(answer, Refused) and "end one" in answer.reason
    handshake.on_message(STRANGER, Results(1, [JobResult(1, Outcome.OK, 5, 0.0, 0.0)]))
    handshake.on_message(STRANGER, Refused(1, "no memory"))
    assert not handshake.inbox and handshake.readiness().is_ready
    assert handshake.on_message(B, hello(1, 2)) == [(B, Configure(8))]


@pytest.mark.parametrize(
    "stranger",
    [
        hello(1, 3),
        hello(7, 2),
        hello(-1, 2),
        hello(1, 2, protocol=PROTOCOL_VERSION + 1),
        hello(1, 2, block_bytes=0),
        Refused(1, "no memory"),
        Refused(7, "no memory"),
        Refused(-1, "no memory"),
        TierRefused(0, "disk", "no room"),
        TierDirect(0, "disk", True),
        Here(0),
    ],
    ids=repr,
)
def test_whatever_a_stranger_says_a_tier_in_service_stays(stranger: Message) -> None:
    clock = ManualClock()
    handshake = ready_ranks(clock)
    for _ in range(5):
        answers = handshake.on_message(STRANGER, stranger)
        assert all(identity == STRANGER and isinstance(said, Refused) for identity, said in answers)
        clock.advance(10.0)
    assert not handshake.inbox and handshake.readiness().is_ready and handshake.peers() == [A, B]


def test_a_process_in_the_place_of_one_that_died_gets_its_rank_and_starts_empty() -> None:
    clock = ManualClock()
    handshake = ready_ranks(clock)
    handshake.next_job_id = lambda: 70
    assert handshake.on_message(STRANGER, hello(1, 2)) == [(B, Ask([], is_last=False))]
    clock.advance(ANSWER_WITHIN_S / 2)
    handshake.on_message(A, Here(0))  # another rank's life says nothing of this one's
    assert handshake.on_message(STRANGER, hello(1, 2)) == []
    clock.advance(ANSWER_WITHIN_S / 2)
    configure = Configure(8, first_job_id=70)
    assert handshake.on_message(STRANGER, hello(1, 2)) == [(STRANGER, configure)]
    assert list(handshake.inbox) == [RankReplaced(1, 70)]
    assert handshake.readiness() == Readiness(False, "rank 1 has no memory yet")
    assert handshake.on_message(STRANGER, hello(1, 2)) == [(STRANGER, configure)]  # the answer had been lost
    handshake.on_message(B, Ready(1, 8))  # it is nobody any more
    assert not handshake.readiness().is_ready
    handshake.on_message(STRANGER, Ready(1, 3))
    assert [event.slots for event in handshake.inbox if isinstance(event, SlotsReady)] == [3]
    assert handshake.readiness().is_ready


def test_one_that_does_not_fit_in_the_place_of_one_that_died_turns_the_tier_off() -> None:
    clock = ManualClock()
    handshake = ready_ranks(clock)
    handshake.on_message(STRANGER, hello(1, 2))
    clock.advance(ANSWER_WITHIN_S)
    ((identity, answer),) = handshake.on_message(STRANGER, hello(1, 2, fingerprint="other"))
    assert identity == STRANGER and isinstance(answer, Refused)
    assert "rank 1 was started anew" in reason(handshake)


def test_a_rank_that_dies_before_the_others_have_come_may_come_again() -> None:
    clock = ManualClock()
    handshake = Handshake(2, lambda block_bytes: 8, clock=clock)
    handshake.on_message(STRANGER, hello(0, 2))
    handshake.on_message(A, hello(0, 2))
    clock.advance(ANSWER_WITHIN_S)
    assert handshake.on_message(A, hello(0, 2)) == []
    assert sorted(handshake.on_message(B, hello(1, 2))) == [(A, Configure(8)), (B, Configure(8))]
    assert not handshake.inbox


# ---------------------------------------------------------------- ranks that do not come


@pytest.mark.shows("DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS")
def test_ranks_that_are_missing_are_named_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock, overdue = ManualClock(), []
    handshake = Handshake(
        3, lambda block_bytes: 8, clock=clock, init_timeout_s=100.0, on_overdue=lambda: overdue.append(1)
    )
    assert handshake.readiness().reason == "ranks 0, 1, 2 have not said hello"
    handshake.on_message(B, hello(1, 3))
    clock.advance(99.0)
    assert handshake.on_tick() == [] and not overdue and not caplog.records
    for _ in range(3):
        clock.advance(1.0)
        assert handshake.on_tick() == []
    (record,) = caplog.records
    line = record.getMessage()
    assert record.levelname == "ERROR" and overdue == [1] and "\n" not in line
    assert "ranks 0, 2 have not said hello" in line and "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS=100" in line
    for rank, identity in ((0, A), (2, b"c")):  # late is not never
        handshake.on_message(identity, hello(rank, 3))
    assert handshake.readiness().reason == "ranks 0, 1, 2 have no memory yet"
    for rank, identity in ((0, A), (1, B), (2, b"c")):
        handshake.on_message(identity, Ready(rank, 8))
    assert handshake.readiness().is_ready and handshake.wait(0)


def test_a_tier_that_is_ready_in_time_is_never_overdue(caplog: pytest.LogCaptureFixture) -> None:
    clock, overdue = ManualClock(), []
    handshake = Handshake(
        1, lambda block_bytes: 8, clock=clock, init_timeout_s=100.0, on_overdue=lambda: overdue.append(1)
    )
    handshake.on_message(A, hello())
    handshake.on_message(A, Ready(0, 8))
    clock.advance(1000.0)
    handshake.on_tick()
    assert not overdue and not caplog.records


def test_a_start_that_waits_in_vain_says_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    handshake = Handshake(2, lambda block_bytes: 8)
    handshake.on_message(A, hello(0, 2))
    assert not handshake.wait(0.01)
    (record,) = caplog.records
    assert "rank 1 has not said hello" in record.getMessage() and record.levelname == "WARNING"


def test_a_tier_that_is_off_says_why() -> None:
    handshake = one_worker()
    handshake.on_message(A, Refused(0, "no memory"))
    assert handshake.readiness() == Readiness(False, "the tier is off: worker 0: no memory")


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


@pytest.mark.parametrize(
    ("stranger", "words"),
    [
        (hello(0, 2, engine="other dp0"), "engine 'other dp0', this leader is of 'ours dp0'"),
        (hello(0, 2), "engine ''"),
        (hello(0, 2, engine="ours dp1"), "engine 'ours dp1'"),
        (hello(2, 3, engine="ours dp0"), "rank 2 of 3, the leader expects 2 ranks"),
        (hello(-1, 2, engine="ours dp0"), "rank -1 of 2"),
        (hello(0, 2, engine="other", protocol=PROTOCOL_VERSION + 1), "install one kvbm everywhere"),
    ],
    ids=["engine", "no engine", "data-parallel rank", "size", "negative", "protocol"],
)
def test_where_strangers_can_come_they_are_refused_and_the_tier_joins(stranger: Hello, words: str) -> None:
    handshake = Handshake(2, lambda block_bytes: 8, engine="ours dp0")
    for _ in range(2):
        ((identity, answer),) = handshake.on_message(STRANGER, stranger)
        assert identity == STRANGER and isinstance(answer, Refused) and words in answer.reason
    assert handshake.foreign_total == 2 and not handshake.inbox
    handshake.on_message(A, hello(0, 2, engine="ours dp0"))
    answers = handshake.on_message(B, hello(1, 2, engine="ours dp0"))
    assert sorted(answers) == [(A, Configure(8)), (B, Configure(8))]
    handshake.on_message(STRANGER, stranger)
    assert handshake.peers() == [A, B] and not handshake.inbox


def test_a_rank_of_another_engine_that_cannot_take_part_changes_nothing() -> None:
    """It says so before any hello."""
    handshake = Handshake(1, lambda block_bytes: 8, engine="ours dp0")
    for engine in ("other dp0", ""):
        assert handshake.on_message(STRANGER, Refused(0, "unknown layout", engine)) == []
    assert handshake.foreign_total == 2 and not handshake.inbox
    handshake.on_message(A, Refused(0, "unknown layout", "ours dp0"))
    assert reason(handshake) == "worker 0: unknown layout"


def test_a_worker_of_any_version_is_told_of_in_one_line() -> None:
    """A later one may say more than we know, and is answered in words that all versions know."""
    later = {**msgspec.to_builtins(hello(0, 2)), "type": "hello", "protocol": PROTOCOL_VERSION + 1, "more": 3}
    said = decode(msgspec.msgpack.encode(later))
    assert said is not None
    ((_, answer),) = Handshake(2, lambda block_bytes: 8).on_message(A, said)
    assert isinstance(answer, Refused) and "install one kvbm everywhere" in answer.reason
    assert msgspec.msgpack.decode(encode(answer)) == {"type": "refused", "rank": 0, "reason": answer.reason}


def test_what_else_is_known_of_missing_ranks_is_said() -> None:
    handshake = Handshake(2, lambda block_bytes: 8)
    handshake.describe_missing = lambda ranks: f"seen {ranks}"
    handshake.on_message(A, hello(0, 2))
    assert handshake.readiness() == Readiness(False, "rank 1 has not said hello: seen [1]")


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


# ---------------------------------------------------------------- ranks that have the same KV


def replica(rank: int, world_size: int = 2, **changes: object) -> Hello:
    same = {"block_bytes": 100, "num_device_blocks": 50, "fingerprint": "layout"}
    said = {"part": "all", "machine": "here", "broadcast_address": f"471{rank}/token"}
    return hello(rank, world_size, **{**same, **said, **changes})


def join_all(handshake: Handshake, *identities: bytes) -> list[tuple[bytes, Message]]:
    """Every rank says that it has met the others; the answers to the last one."""
    answers: list[tuple[bytes, Message]] = []
    for rank, identity in enumerate(identities):
        assert answers == []
        answers = handshake.on_message(identity, Joined(rank, ""))
    return answers


def test_what_all_ranks_have_is_sized_named_and_stored_once() -> None:
    asked: list[tuple[int, str]] = []

    def plan_disk(block_bytes: int, fingerprint: str) -> TierPlace:
        asked.append((block_bytes, fingerprint))
        return DISK

    handshake = Handshake(2, lambda block_bytes: block_bytes // 10, {"disk": plan_disk})
    assert handshake.storing_ranks == [0, 1]
    handshake.on_message(B, replica(1))
    join = Join((0, 1), "4710/token", 0, 1)
    assert handshake.on_message(A, replica(0)) == [(A, join), (B, join)]
    assert handshake.on_message(B, replica(1)) == [(B, join)], "it had been lost"
    assert asked == [] and handshake.on_tick() == []
    configure = Configure(10, (DISK,), is_shared=True)
    assert sorted(join_all(handshake, A, B)) == [(A, configure), (B, configure)]
    assert asked == [(100, "layout")]
    assert handshake.on_message(B, replica(1)) == [(B, configure)]  # the answer had been lost
    assert handshake.on_message(B, Joined(1, "")) == [] == handshake.on_tick()
    assert handshake.storing_peers() == [A] and handshake.storing_ranks == [0]
    handshake.on_message(A, Ready(0, 10))
    assert not handshake.inbox  # the others load too
    handshake.on_message(B, Ready(1, 10))
    assert list(handshake.inbox) == [SlotsReady(10, 10, 100, 50, "layout")]
    assert not handshake.wait(0)
    handshake.on_message(A, TierFound(0, "disk", DISK.num_slots, [], [], []))
    assert handshake.wait(0)


def test_each_machine_has_one_copy_of_each_part() -> None:
    """Ranks 0 to 3 are the first stage, on two machines, and 4 and 5 the second, on one of them."""
    asked: list[tuple[int, str]] = []
    handshake = Handshake(6, lambda size: 10, {"disk": lambda size, name: asked.append((size, name)) or DISK})
    where = ["here", "there", "here", "there", "there", "there"]
    identities = [b"%d" % rank for rank in range(6)]
    for rank, (identity, machine) in enumerate(zip(identities, where, strict=True)):
        second = {"part": "second", "fingerprint": "two", "block_bytes": 7} if rank > 3 else {}
        answers = handshake.on_message(identity, replica(rank, 6, machine=machine, **second))
    here, there = Join((0, 2), "4710/token", 0, 2), Join((1, 3), "4711/token", 0, 2)
    second_join = Join((4, 5), "4714/token", 1, 2)
    joins = [here, there, here, there, second_join, second_join]
    assert answers == list(zip(identities, joins, strict=True))
    join_all(handshake, *identities)
    assert handshake.storing_peers() == [b"0", b"1", b"4"] and handshake.storing_ranks == [0, 1, 4]
    assert asked == [(207, "layout-two")], "bytes of all that store, and a name that machines do not change"


def test_a_rank_that_is_alone_on_its_machine_stores_under_the_same_name() -> None:
    handshake = Handshake(2, lambda block_bytes: 10)
    handshake.on_message(A, replica(0))
    answers = handshake.on_message(B, replica(1, machine="there"))
    assert answers == [(A, Join((0,), "4710/token", 0, 1)), (B, Join((1,), "4711/token", 0, 1))]
    join_all(handshake, A, B)
    assert handshake.storing_ranks == [0, 1]


def test_ranks_that_keep_their_own_shards_all_store() -> None:
    handshake = two_workers()
    assert sorted(handshake.storing_peers()) == [A, B] and handshake.storing_ranks == [0, 1]


OWN_COPIES = "each rank stores and loads its own copy"


def check_own_copies(
    handshake: Handshake,
    answers: list[tuple[bytes, Message]],
    caplog: pytest.LogCaptureFixture,
    words: str,
    block_bytes: int = 200,
) -> None:
    """Both ranks store what they have; one line says why."""
    configure = Configure(block_bytes // 10)
    assert sorted(answers) == [(A, configure), (B, configure)]
    assert sorted(handshake.storing_peers()) == [A, B] and handshake.storing_ranks == [0, 1]
    lines = [record.getMessage() for record in caplog.records if OWN_COPIES in record.getMessage()]
    assert len(lines) == 1 and "DYN_KVBM_NCCL_MLA_MODE" in lines[0] and words in lines[0]
    assert "\n" not in lines[0] and not handshake.inbox


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (replica(0), replica(1, part=""), "not set on ranks [1] of 2"),
        (replica(0, part=""), replica(1), "not set on ranks [0] of 2"),
        (replica(0), replica(1, fingerprint="other"), "rank 1 are not those of rank 0"),
        (replica(0), replica(1, block_bytes=101), "rank 1 are not those of rank 0"),
        (replica(0), replica(1, num_device_blocks=49), "rank 1 are not those of rank 0"),
    ],
    ids=["second not set", "first not set", "other layout", "other size", "other number"],
)
def test_ranks_that_are_not_alike_store_their_own(
    first: Hello, second: Hello, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    handshake = Handshake(2, lambda block_bytes: block_bytes // 10)
    handshake.on_message(A, first)
    answers = handshake.on_message(B, second)
    check_own_copies(handshake, answers, caplog, words, first.block_bytes + second.block_bytes)


def test_ranks_that_cannot_meet_store_their_own(caplog: pytest.LogCaptureFixture) -> None:
    handshake = Handshake(2, lambda block_bytes: block_bytes // 10)
    handshake.on_message(A, replica(0))
    handshake.on_message(B, replica(1))
    assert handshake.on_message(A, Joined(0, "")) == []
    answers = handshake.on_message(B, Joined(1, "this torch has no NCCL"))
    check_own_copies(handshake, answers, caplog, "rank 1: this torch has no NCCL")
    assert handshake.on_message(A, Joined(0, "a connection ended")) == []
    handshake.on_message(A, Ready(0, 20))
    handshake.on_message(B, Ready(1, 20))
    assert list(handshake.inbox) == [SlotsReady(20, 20, 200, 50, "layout-layout")]


def test_a_rank_that_does_not_say_whether_it_could_is_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    handshake = Handshake(2, lambda block_bytes: block_bytes // 10, clock=clock)
    handshake.on_message(A, replica(0))
    handshake.on_message(B, replica(1))
    handshake.on_message(A, Joined(0, ""))
    clock.advance(JOIN_WITHIN_S - 1)
    assert handshake.on_tick() == []
    clock.advance(1)
    check_own_copies(handshake, handshake.on_tick(), caplog, "ranks [1] did not join within 60 s")
    assert handshake.on_tick() == []


def test_a_rank_that_dies_while_others_wait_for_it(caplog: pytest.LogCaptureFixture) -> None:
    """Its new process has not met anybody, and nobody can meet it where the old one would have been."""
    clock = ManualClock()
    handshake = Handshake(2, lambda block_bytes: block_bytes // 10, clock=clock)
    handshake.on_message(A, replica(0))
    handshake.on_message(B, replica(1))
    handshake.on_message(STRANGER, replica(1))
    clock.advance(ANSWER_WITHIN_S)
    answers = handshake.on_message(STRANGER, replica(1))
    configure = Configure(20)
    assert sorted(answers) == [(A, configure), (STRANGER, configure)]
    assert "rank 1 was started anew" in caplog.text


def test_a_rank_of_those_that_share_is_not_replaced() -> None:
    clock = ManualClock()
    handshake = Handshake(2, lambda block_bytes: 8, clock=clock)
    handshake.on_message(A, replica(0))
    handshake.on_message(B, replica(1))
    join_all(handshake, A, B)
    handshake.on_message(STRANGER, replica(1))
    clock.advance(ANSWER_WITHIN_S)
    (answer,) = handshake.on_message(STRANGER, replica(1))
    assert isinstance(answer[1], Refused) and "restart the engine" in reason(handshake)


def test_a_rank_alone_on_its_machine_is_told_again_what_it_stores_when_it_is_replaced() -> None:
    clock = ManualClock()
    handshake = Handshake(2, lambda block_bytes: 8, clock=clock)
    handshake.on_message(A, replica(0))
    handshake.on_message(B, replica(1, machine="there"))
    join_all(handshake, A, B)
    again = replica(1, machine="there")
    handshake.on_message(STRANGER, again)
    clock.advance(ANSWER_WITHIN_S)
    answers = handshake.on_message(STRANGER, again)
    join = Join((1,), "4711/token", 0, 1)
    assert answers == [(STRANGER, join), (STRANGER, Configure(8, is_shared=True))]


# ---------------------------------------------------------------- the disk


DISK = TierPlace("disk", "folder", 5)
REMOTE = TierPlace("remote", "file:///mnt/kv")
STORE = TierOrder(2**40, "disk", OrderKind.STORE, (BlockKey(b"k" * 33),), (1,), (2,))
FORGET = TierOrder(0, "disk", OrderKind.FORGET, ())
FETCHED = (Fetched("disk", 2**40, 0.5), Fetched("remote", 0, 1.5))
LOST = JobResult(
    2**40, Outcome.MISS, 7, 0.5, 1.5, "1 of 2", failed=((3, Outcome.MISS),), fetched=FETCHED, copy_s=0.1
)


def with_disk(num_ranks: int, plan_disk: PlanTier = lambda block_bytes, fingerprint: DISK) -> Handshake:
    """Every rank has said hello."""
    handshake = Handshake(num_ranks, lambda block_bytes: 8, {"disk": plan_disk})
    for rank, identity in enumerate((A, B)[:num_ranks]):
        handshake.on_message(identity, hello(rank, num_ranks))
    return handshake


def test_the_disk_is_planned_once_for_all_ranks_and_told_to_each() -> None:
    asked: list[tuple[int, str]] = []

    def plan_disk(block_bytes: int, fingerprint: str) -> TierPlace:
        asked.append((block_bytes, fingerprint))
        return DISK

    handshake = Handshake(2, lambda block_bytes: 8, {"disk": plan_disk})
    assert handshake.on_message(B, hello(1, 2)) == [] and asked == [] and handshake.peers() == [B]
    assert sorted(handshake.on_message(A, hello(0, 2))) == [
        (A, Configure(8, (DISK,))),
        (B, Configure(8, (DISK,))),
    ]
    assert handshake.on_message(B, hello(1, 2)) == [(B, Configure(8, (DISK,)))]  # the answer had been lost
    assert asked == [(201, "layout0-layout1")]  # in the order of the ranks, not of their hellos
    assert sorted(handshake.peers()) == [A, B] and not handshake.inbox


@pytest.mark.parametrize(
    "error",
    [ConfigError("DYN_KVBM_DISK_CACHE_GB", 1, "too small"), DiskError(28, "kvbm: no room; make room")],
)
def test_a_disk_that_cannot_be_leaves_the_host_tier_on(error: Exception) -> None:
    def refuse(block_bytes: int, fingerprint: str) -> TierPlace:
        raise error

    handshake = Handshake(1, lambda block_bytes: 8, {"disk": refuse})
    assert handshake.on_message(A, hello()) == [(A, Configure(8))]
    (event,) = handshake.inbox
    assert event == TierOff("disk", str(error.args[-1])) and event.reason.startswith("kvbm: ")
    assert handshake.on_message(A, hello()) == [(A, Configure(8))]  # and it is not tried again
    assert len(handshake.inbox) == 1
    handshake.on_message(A, Ready(0, 8))
    assert handshake.wait(0)


def test_what_a_rank_found_on_its_disk_reaches_the_leader() -> None:
    handshake = with_disk(2)
    handshake.on_message(B, TierFound(1, "disk", 40, [3, 39], [b"k" * 32, b"l" * 33], [70, 60]))
    handshake.on_message(A, TierFound(0, "disk", 40, [], [], []))
    handshake.on_message(A, TierRefused(0, "disk", "no room"))
    assert list(handshake.found) == [
        SlotsFound("disk", 1, 40, [Found(3, BlockKey(b"k" * 32), 70), Found(39, BlockKey(b"l" * 33), 60)]),
        SlotsFound("disk", 0, 40, []),
    ]
    assert list(handshake.inbox) == [TierOff("disk", "worker 0: no room")] and handshake.foreign_total == 0


def test_blocks_go_straight_to_devices_while_every_rank_that_stores_says_so() -> None:
    handshake = with_disk(2)
    handshake.on_message(A, TierDirect(0, "disk", True))
    handshake.on_message(A, TierDirect(0, "disk", True))
    assert not handshake.inbox
    handshake.on_message(B, TierDirect(1, "disk", True))
    assert list(handshake.inbox) == [TierReach("disk", True)]
    handshake.on_message(B, TierDirect(1, "disk", False))
    handshake.on_message(B, TierDirect(1, "disk", False))
    handshake.on_message(A, TierDirect(0, "disk", False))
    assert list(handshake.inbox) == [TierReach("disk", True), TierReach("disk", False)]
    alone = Handshake(2, lambda block_bytes: block_bytes // 10, {"disk": lambda size, fingerprint: DISK})
    for rank, identity in enumerate((A, B)):
        alone.on_message(identity, replica(rank))
    join_all(alone, A, B)
    alone.on_message(A, TierDirect(0, "disk", True))
    assert list(alone.inbox) == [TierReach("disk", True)], "the others get what rank 0 loads"


def test_what_a_rank_that_died_could_do_its_new_process_has_to_say_anew() -> None:
    clock = ManualClock()
    handshake = ready_ranks(clock)
    for rank, identity in enumerate((A, B)):
        handshake.on_message(identity, TierDirect(rank, "disk", True))
    handshake.on_message(STRANGER, hello(1, 2))
    clock.advance(ANSWER_WITHIN_S)
    handshake.on_message(STRANGER, hello(1, 2))
    off, replaced = TierReach("disk", False), RankReplaced(1, 0)
    assert list(handshake.inbox) == [TierReach("disk", True), off, replaced]
    handshake.on_message(B, TierDirect(1, "disk", True))  # it is nobody any more
    assert len(handshake.inbox) == 3
    handshake.on_message(STRANGER, TierDirect(1, "disk", True))
    assert handshake.inbox[-1] == TierReach("disk", True)


def test_the_start_waits_until_every_rank_knows_all_of_its_disk() -> None:
    handshake = with_disk(2)
    handshake.on_message(A, Ready(0, 8))
    handshake.on_message(B, Ready(1, 8))
    assert not handshake.wait(0)
    for identity, rank, end in (
        (A, 0, DISK.num_slots),
        (A, 0, DISK.num_slots),
        (B, 1, DISK.num_slots - 1),
    ):
        handshake.on_message(identity, TierFound(rank, "disk", end, [], [], []))
        assert not handshake.wait(0)
    handshake.on_message(B, TierFound(1, "disk", DISK.num_slots, [], [], []))
    assert handshake.wait(0)


def test_each_lower_tier_has_its_place_and_its_own_news() -> None:
    """Two with slots are both looked through before the start goes on; one by key has nothing to look at."""
    far = TierPlace("far", "elsewhere", 3)
    places = {"disk": DISK, "far": far, "remote": REMOTE}

    def plan_of(name: str) -> PlanTier:
        return lambda block_bytes, fingerprint: places[name]

    handshake = Handshake(1, lambda block_bytes: 8, {name: plan_of(name) for name in places})
    assert handshake.on_message(A, hello()) == [(A, Configure(8, (DISK, far, REMOTE)))]
    assert [handshake.places_of(name) for name in (*places, "nowhere")] == [5, 3, 0, 0]
    handshake.on_message(A, Ready(0, 8))
    handshake.on_message(A, TierFound(0, "disk", 5, [], [], []))
    assert not handshake.wait(0)
    handshake.on_message(A, TierRefused(0, "remote", "gone"))
    assert not handshake.wait(0)
    handshake.on_message(A, TierFound(0, "far", 3, [], [], []))
    assert handshake.wait(0)
    assert [event.tier for event in handshake.found] == ["disk", "far"]
    assert TierOff("remote", "worker 0: gone") in handshake.inbox


def test_a_tier_that_cannot_be_leaves_the_others_on() -> None:
    def refuse(block_bytes: int, fingerprint: str) -> TierPlace:
        raise DiskError(28, "no room")

    plans: dict[str, PlanTier] = {"disk": refuse, "remote": lambda block_bytes, fingerprint: REMOTE}
    handshake = Handshake(1, lambda block_bytes: 8, plans)
    assert handshake.on_message(A, hello()) == [(A, Configure(8, (REMOTE,)))]
    assert list(handshake.inbox) == [TierOff("disk", "no room")]
    handshake.on_message(A, Ready(0, 8))
    assert handshake.wait(0)


def test_what_is_found_in_a_tier_that_nobody_planned_is_no_news() -> None:
    handshake = with_disk(1)
    handshake.on_message(A, TierFound(0, "cellar", 40, [3], [b"k" * 32], [70]))
    assert not handshake.found


def test_the_start_does_not_wait_for_a_disk_that_is_refused() -> None:
    handshake = with_disk(2)
    for identity, rank in ((A, 0), (B, 1)):
        handshake.on_message(identity, Ready(rank, 8))
    handshake.on_message(B, TierRefused(1, "disk", "no room"))
    assert handshake.wait(0)


def test_the_start_waits_for_the_host_tier_too() -> None:
    handshake = with_disk(1)
    handshake.on_message(A, TierFound(0, "disk", DISK.num_slots, [], [], []))
    assert not handshake.wait(0)
    handshake.on_message(A, Ready(0, 8))
    assert handshake.wait(0)


@pytest.mark.parametrize(
    "message",
    [
        TierFound(0, "disk", 40, [3], [b"k" * 32], [70]),
        TierRefused(0, "disk", "no room"),
        TierFound(7, "disk", 40, [], [], []),
        TierRefused(-1, "disk", "no room"),
        Move(STORE),
        Move(FORGET),
    ],
    ids=["found", "refused", "found by nobody", "refused by nobody", "store", "forget"],
)
def test_nobody_speaks_for_the_disk_of_another_rank_nor_for_the_leader(message: Message) -> None:
    handshake = with_disk(1)
    assert handshake.on_message(STRANGER, message) == []
    assert not handshake.inbox and not handshake.found and handshake.foreign_total == 1


def test_what_is_found_in_lists_of_unequal_lengths_is_no_news() -> None:
    handshake = with_disk(1)
    with pytest.raises(ValueError, match="zip"):  # the channel logs it and goes on
        handshake.on_message(A, TierFound(0, "disk", 40, [3, 4], [b"k" * 32], [70]))
    assert not handshake.found


@pytest.mark.parametrize(
    "message",
    [
        Configure(8, (DISK,)),
        Configure(8, (DISK, REMOTE), 7, is_shared=True),
        replica(0),
        Join((3, 4), "4711/token", 1, 2),
        Joined(4, "no NCCL"),
        TierFound(1, "disk", 4096, [0, 5], [b"k" * 32, b"\xff" * 33], [2**63, 0]),
        TierRefused(3, "disk", "no room"),
        Move(STORE),
        Move(FORGET),
        Results(1, [LOST, msgspec.structs.replace(LOST, is_late=True)]),
        Ask([2**40, 1], is_last=True),
        Here(3),
    ],
)
def test_what_is_said_about_disks_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


def test_the_largest_chunk_of_found_blocks_fits_into_a_message() -> None:
    chunk = range(CHUNK_SLOTS)
    message = TierFound(
        0, "disk", 2**40, [2**40 + i for i in chunk], [b"k" * 33] * CHUNK_SLOTS, [2**62 + i for i in chunk]
    )
    assert decode(encode(message)) == message


# ---------------------------------------------------------------- head shards

BY_HEADS = {"head_shards": "meaning", "head_shard_bytes": 25}


def by_heads(*hellos: Hello) -> Handshake:
    """Ranks that have said this, and have slots; with a disk and a remote store."""
    plans: dict[str, PlanTier] = {"disk": lambda size, layout: DISK, "remote": lambda size, layout: REMOTE}
    handshake = Handshake(len(hellos), lambda block_bytes: 8, plans)
    for rank, said in enumerate(hellos):
        handshake.on_message(b"%d" % rank, said)
    if any(said.part for said in hellos):
        join_all(handshake, *(b"%d" % rank for rank in range(len(hellos))))
    for rank in range(len(hellos)):
        handshake.on_message(b"%d" % rank, Ready(rank, 8))
    return handshake


def test_a_store_keeps_heads_if_all_ranks_mean_the_same_by_them() -> None:
    handshake = by_heads(hello(0, 2, **BY_HEADS), hello(1, 2, **BY_HEADS))
    (ready,) = (event for event in handshake.inbox if isinstance(event, SlotsReady))
    assert (ready.fingerprint, ready.head_shard_bytes) == ("meaning", 25)
    ((_, configure),) = handshake.on_message(b"1", hello(1, 2, **BY_HEADS))
    assert isinstance(configure, Configure)
    assert configure.tiers == (DISK, msgspec.structs.replace(REMOTE, head_shards="meaning"))


@pytest.mark.parametrize("other", [{}, {"head_shards": "another", "head_shard_bytes": 25}])
def test_one_rank_that_means_something_else_keeps_all_blocks_as_they_are(other: dict[str, object]) -> None:
    handshake = by_heads(hello(0, 2, **BY_HEADS), hello(1, 2, **other))
    (ready,) = (event for event in handshake.inbox if isinstance(event, SlotsReady))
    assert (ready.fingerprint, ready.head_shard_bytes) == ("layout0-layout1", 0)
    ((_, configure),) = handshake.on_message(b"0", hello(0, 2, **BY_HEADS))
    assert isinstance(configure, Configure) and configure.tiers == (DISK, REMOTE)


def test_ranks_that_get_blocks_from_rank_0_have_no_say_in_it() -> None:
    handshake = by_heads(replica(0, **BY_HEADS), replica(1))
    (ready,) = (event for event in handshake.inbox if isinstance(event, SlotsReady))
    assert (ready.fingerprint, ready.head_shard_bytes) == ("meaning", 25)


def test_a_new_process_in_a_rank_s_place_must_mean_the_same_by_heads() -> None:
    clock = ManualClock()
    handshake = Handshake(1, lambda block_bytes: 8, clock=clock)
    handshake.on_message(A, hello(**BY_HEADS))
    clock.advance(1.0)
    assert [type(said) for _, said in handshake.on_message(STRANGER, hello())] == [Ask]
    clock.advance(ANSWER_WITHIN_S)
    ((_, answer),) = handshake.on_message(STRANGER, hello())
    assert isinstance(answer, Refused) and "does not fit in its old place" in answer.reason
