"""What leader and workers say to each other: closed msgspec structs, decoded by type, never by content.

Wire: one ZMQ frame, MessagePack, at most MAX_MESSAGE_BYTES. A frame that does not decode is dropped and counted.
"""

from __future__ import annotations

import msgspec

from kvbm_core.errors import Outcome

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 4 * 1024 * 1024


class Hello(msgspec.Struct, tag="hello", frozen=True, forbid_unknown_fields=True):
    """Worker -> leader: the device cache is known. Repeated until Configure arrives."""

    protocol: int
    rank: int
    world_size: int
    block_bytes: int
    """Bytes of one block of this rank's shard (the largest group's)."""
    num_device_blocks: int
    fingerprint: str
    """Of the bytes in one slot of this rank."""


class Configure(msgspec.Struct, tag="configure", frozen=True, forbid_unknown_fields=True):
    """Leader -> worker: how many slots of the host tier every rank allocates."""

    num_slots: int


class Ready(msgspec.Struct, tag="ready", frozen=True, forbid_unknown_fields=True):
    """Worker -> leader: slots 0 .. ready_slots-1 can be used."""

    rank: int
    ready_slots: int


class JobAck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One finished job on one rank. ``seconds`` is the copy's time, ``queued_s`` the time before it."""

    job_id: int
    outcome: Outcome
    num_bytes: int
    seconds: float
    queued_s: float


class Acks(msgspec.Struct, tag="acks", frozen=True, forbid_unknown_fields=True):
    """Worker -> leader: jobs that are over."""

    rank: int
    acks: list[JobAck]


class Refused(msgspec.Struct, tag="refused", frozen=True, forbid_unknown_fields=True):
    """Either way: this side cannot take part; ``reason`` is one line for the log."""

    rank: int
    reason: str


Message = Hello | Configure | Ready | Acks | Refused

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One frame."""
    return _ENCODER.encode(message)


def decode(frame: bytes) -> Message | None:
    """The message, or None if the frame is too long or not one of ours."""
    if len(frame) > MAX_MESSAGE_BYTES:
        return None
    try:
        return _DECODER.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
