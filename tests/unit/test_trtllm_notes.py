"""What the leader says outside of iterations: whole and unchanged, or refused."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvbm_trtllm.notes import Finish, LoadEnded, Note, decode, encode
from tests.unit.test_trtllm_metadata import random_plan


def test_what_was_sent_arrives(rng: random.Random) -> None:
    for _ in range(100):
        note: Note = Finish("7", tuple(rng.sample(range(1000), 3)), rng.choice([None, random_plan(rng)]))
        assert decode(encode(note)) == note
    ended = LoadEnded("7", 3, True)
    assert decode(encode(ended)) == ended


@pytest.mark.parametrize("change", [{"type": "later"}, {"more": 5}, {"job_id": "3"}, {"request_id": None}])
def test_what_another_version_says_is_refused(change: dict[str, object]) -> None:
    said = {"type": "load_ended", "request_id": "7", "job_id": 3, "is_done": True}
    assert decode(msgspec.msgpack.encode(said)) == LoadEnded("7", 3, True)
    with pytest.raises(msgspec.DecodeError):
        decode(msgspec.msgpack.encode({**said, **change}))


def test_any_bytes_are_a_note_or_refused(rng: random.Random) -> None:
    sent = encode(Finish("7", (1, 2), random_plan(rng)))
    for _ in range(1000):
        changed = bytearray(sent[: rng.randrange(len(sent) + 1)])
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            assert isinstance(decode(bytes(changed)), Note)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
