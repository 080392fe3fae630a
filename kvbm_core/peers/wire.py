"""What two instances say to each other, rank to rank: closed msgspec structs, decoded by type.

The asker speaks first (Hello), and then asks one thing after the other. A block's bytes are a frame of their
own behind the message that names it. Whoever hears what is none of these closes the connection, or drops the
message and counts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
import xxhash

from kvbm_core.errors import Outcome
from kvbm_core.peers.copies import Bytes
from kvbm_core.storage.disk.record import payload_digest
from kvbm_core.types import BlockKey, is_block_key

PROTOCOL = 2
IO_THREADS = 2
"""Of ZMQ on either side: encryption takes a core for less than 1 GB/s."""
PIECE_BYTES = 256 << 10
"""Of a block, copied and hashed at once: what stays in a core's cache between the two."""
MAX_KEYS = 256
"""In one question."""
MAX_MESSAGE_BYTES = 64 << 10
"""Of a message without a block's bytes."""
MAX_TEXT_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Terms:
    """What has to be the same on both sides, and who this side is. ``instance``: random, new at each start.

    ``fingerprint``: what the bytes of a block mean on this rank; ``namespace``: of which model and
    configuration all keys are.
    """

    instance: str
    rank: int
    num_ranks: int
    block_bytes: int
    fingerprint: str
    namespace: str


class Hello(msgspec.Struct, tag="hello", frozen=True, forbid_unknown_fields=True):
    """Asker -> owner: the first message of a connection."""

    protocol: int
    instance: str
    rank: int
    num_ranks: int
    block_bytes: int
    fingerprint: str
    namespace: str


class Welcome(msgspec.Struct, tag="welcome", frozen=True, forbid_unknown_fields=True):
    """Owner -> asker: ask. ``instance``: of the owner, to be named in each question."""

    instance: str


class Refused(msgspec.Struct, tag="refused", frozen=True, forbid_unknown_fields=True):
    """Owner -> asker: why nothing is to be had over this connection; one line."""

    reason: str


class Find(msgspec.Struct, tag="find", frozen=True, forbid_unknown_fields=True):
    """Asker -> owner: which of these are there? Answered by Found."""

    call_id: int
    instance: str
    keys: list[bytes]
    deadline_ms: int


class Found(msgspec.Struct, tag="found", frozen=True, forbid_unknown_fields=True):
    """Owner -> asker: of each key, whether it is there now; which promises nothing."""

    call_id: int
    is_there: list[bool]


class Fetch(msgspec.Struct, tag="fetch", frozen=True, forbid_unknown_fields=True):
    """Asker -> owner: send these. Answered by Blocks, as many as it takes, or by Written; then by Done.

    ``addresses``: where each of them may be written to instead, in the asker's landing zone; ``zone``: what
    NIXL needs for that. Empty: nowhere.
    """

    call_id: int
    instance: str
    keys: list[bytes]
    deadline_ms: int
    zone: bytes = b""
    addresses: list[int] = []


class Blocks(msgspec.Struct, tag="blocks", frozen=True, forbid_unknown_fields=True):
    """Owner -> asker: the next frames have the bytes of keys ``numbers`` of the question. ``seals``: of each,
    see seal_of.
    """

    call_id: int
    numbers: list[int]
    seals: list[bytes]


class Written(msgspec.Struct, tag="written", frozen=True, forbid_unknown_fields=True):
    """Owner -> asker: as Blocks, but the bytes are where the asker wanted them."""

    call_id: int
    numbers: list[int]
    seals: list[bytes]


class Done(msgspec.Struct, tag="done", frozen=True, forbid_unknown_fields=True):
    """Owner -> asker: all has been sent. ``outcomes``: of each key; of a Find too, if it is not answered."""

    call_id: int
    outcomes: list[Outcome]


Question = Hello | Find | Fetch
Answer = Welcome | Refused | Found | Blocks | Written | Done

T = TypeVar("T")

_ENCODER = msgspec.msgpack.Encoder()
_QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    """One frame."""
    return _ENCODER.encode(message)


def decode_question(frame: bytes | memoryview) -> Question | None:
    """What an asker says; None if it is too long or none of ours."""
    return _decode(_QUESTIONS, frame)


def decode_answer(frame: bytes | memoryview) -> Answer | None:
    """What an owner says; None if it is too long or none of ours."""
    return _decode(_ANSWERS, frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview) -> T | None:
    if len(frame) > MAX_MESSAGE_BYTES:
        return None
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def seal_of(key: BlockKey, payload: memoryview) -> bytes:
    """Of a block's bytes under its key: neither can change unseen, nor be somebody else's."""
    return xxhash.xxh3_128_digest(payload_digest(payload) + key)


def copied_seal(key: BlockKey, target: Bytes, source: Bytes) -> bytes:
    """Copies ``source`` to ``target``; the seal of what is there then. ValueError if they differ in size."""
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes for {len(target)}")
    state = xxhash.xxh3_128()
    for start in range(0, len(source), PIECE_BYTES):
        piece = target[start : start + PIECE_BYTES]
        np.copyto(piece, source[start : start + PIECE_BYTES])
        state.update(piece.data)
    return xxhash.xxh3_128_digest(state.digest() + key)


def hello_of(terms: Terms) -> Hello:
    """The first message of an asker."""
    return Hello(
        PROTOCOL,
        terms.instance,
        terms.rank,
        terms.num_ranks,
        terms.block_bytes,
        terms.fingerprint,
        terms.namespace,
    )


def refusal_of(hello: Hello, own: Terms) -> str | None:
    """Why an asker gets nothing here, in one line; None if it may ask."""
    if hello.instance == own.instance:
        return "this is the instance that asks: the hint names its own address"
    same = (
        ("protocol", hello.protocol, PROTOCOL, "install one kvbm everywhere"),
        ("ranks", hello.num_ranks, own.num_ranks, "tensor-parallel sizes have to be the same"),
        ("rank", hello.rank, own.rank, "addresses of ranks have neighboring ports"),
        (
            "namespace",
            hello.namespace,
            own.namespace,
            "model, revision, dtype and engine have to be the same",
        ),
        ("layout", hello.fingerprint, own.fingerprint, "KV cache layouts have to be the same"),
        ("bytes of a block", hello.block_bytes, own.block_bytes, "block sizes have to be the same"),
    )
    for what, theirs, ours, remedy in same:
        if theirs != ours:
            return f"{what}: the asker has {shown(theirs)}, the owner {shown(ours)}; {remedy}"
    return None


def shown(value: object) -> str:
    """As part of a line for people: short, and without control characters."""
    text = "".join(c if c.isprintable() else "?" for c in str(value)[: MAX_TEXT_CHARACTERS + 1])
    return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[:MAX_TEXT_CHARACTERS]}..."


def block_keys(keys: list[bytes]) -> tuple[BlockKey, ...] | None:
    """The keys of a question; None if one is no key, or named twice, or there are too many."""
    if not 0 < len(keys) <= MAX_KEYS or len(set(keys)) < len(keys) or not all(map(is_block_key, keys)):
        return None
    return tuple(map(BlockKey, keys))


def has_places(fetch: Fetch) -> bool:
    """Whether its blocks are to be written to the asker's landing zone."""
    return bool(fetch.zone) and len(fetch.addresses) == len(fetch.keys)
