"""What the leader sends with each iteration: whole and unchanged, or nothing, or refused."""

from __future__ import annotations

import pickle
import random
from dataclasses import fields
from typing import Any

import msgspec
import pytest

from kvbm_core.transfer.plan import GroupMove, OrderKind, TierOrder, TransferPlan
from kvbm_core.types import BlockKey, Direction
from kvbm_trtllm.metadata import QUIET, StepPlans, decode, encode


def random_plan(rng: random.Random) -> TransferPlan:
    """A plan of any size, with blocks from any number of lower tiers."""
    moves = tuple(
        GroupMove(group, tuple(rng.sample(range(1 << 20), count)), tuple(rng.sample(range(1 << 40), count)))
        for group, count in enumerate(rng.choices(range(5), k=rng.randint(0, 3)))
    )
    job_id = rng.randrange(1 << 53)
    keys = tuple(BlockKey(rng.randbytes(34)) for _ in range(rng.randint(0, 3)))
    numbers = tuple(range(len(keys)))
    reads = tuple(
        TierOrder(job_id, name, OrderKind.FETCH, keys, numbers, rng.choice([numbers, ()]))
        for name in rng.sample(["disk", "remote", "peer"], rng.randint(0, 3))
    )
    return TransferPlan(job_id, rng.choice(list(Direction)), moves, reads)


def random_step(rng: random.Random) -> StepPlans:
    """Each field filled, or not."""
    names = [str(rng.randrange(1 << 60)) for _ in range(3)]
    return StepPlans(
        onboards=[(name, random_plan(rng)) for name in names[: rng.randint(0, 3)]],
        sync_onboards=[random_plan(rng) for _ in range(rng.randint(0, 2))],
        offloads=[random_plan(rng) for _ in range(rng.randint(0, 2))],
        fences=rng.sample(range(1000), rng.randint(0, 3)),
        awaited=rng.sample(range(1000), rng.randint(0, 3)),
        unkept=rng.sample(range(1000), rng.randint(0, 3)),
        fence_all=rng.random() < 0.5,
        not_loaded=names[: rng.randint(0, 2)],
        refused=names[: rng.randint(0, 2)],
    )


def test_what_was_sent_arrives(rng: random.Random) -> None:
    for _ in range(300):
        plans = random_step(rng)
        sent = encode(plans)
        assert type(sent) is bytes
        assert decode(pickle.loads(pickle.dumps(sent))) == plans, "TensorRT-LLM pickles what it broadcasts"


def test_every_field_arrives_alone() -> None:
    plan = TransferPlan(7, Direction.OFFLOAD, (GroupMove(0, (1, 2), (3, 4)),))
    values: dict[str, Any] = {
        "onboards": [("12", plan)],
        "sync_onboards": [plan],
        "offloads": [plan],
        "fences": [1],
        "awaited": [2],
        "unkept": [5],
        "fence_all": True,
        "not_loaded": ["3"],
        "refused": ["4"],
    }
    assert set(values) == {field.name for field in fields(StepPlans)}
    for name, value in values.items():
        found = decode(encode(StepPlans(**{name: value})))
        assert found == StepPlans(**{name: value}) != StepPlans(), name


@pytest.mark.parametrize("metadata", [None, QUIET, b"", [], {}, ""])
def test_nothing_is_nothing(metadata: object) -> None:
    assert decode(metadata) is None


def test_an_iteration_without_plans_is_not_nothing() -> None:
    assert decode(encode(StepPlans())) == StepPlans()


@pytest.mark.parametrize(
    "foreign",
    [
        pickle.dumps({"requests": [1]}),
        b'{"new_requests": []}',
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode("step"),
        msgspec.msgpack.encode({"fences": "all"}),
        msgspec.msgpack.encode({"onboards": [["1", {"job_id": 1}]]}),
        msgspec.msgpack.encode({"offloads": None}),
        encode(StepPlans())[:-1],
        encode(StepPlans()) + b"\x00",
        b"\xc1",
    ],
)
def test_bytes_of_somebody_else_are_refused(foreign: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(foreign)


@pytest.mark.parametrize("other", ["text", 7, [1], {"fences": [1]}, StepPlans(), bytearray(b"x"), object()])
def test_other_types_are_refused(other: object) -> None:
    with pytest.raises(TypeError, match=type(other).__name__):
        decode(other)


def test_damaged_bytes_are_plans_or_refused_and_nothing_else(rng: random.Random) -> None:
    for _ in range(300):
        sent = bytearray(encode(random_step(rng)))
        sent[rng.randrange(len(sent))] ^= 1 << rng.randrange(8)
        try:
            found = decode(bytes(sent))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        assert isinstance(found, StepPlans)
