"""What leader and workers say to each other: closed msgspec structs, decoded by type, never by content.

Wire: one ZMQ frame, MessagePack, at most MAX_MESSAGE_BYTES. A frame that does not decode is dropped and
counted.
"""

from __future__ import annotations

import msgspec

from kvbm_core.transfer.plan import JobResult, TierOrder, TierPlace, TransferPlan

PROTOCOL_VERSION = 7
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
    replicates: bool = False
    """Every rank has the same KV: rank 0 stores it, the others get it from there."""
    broadcast_address: str = ""
    """Where they do, in the words of rank 0's MeetingPoint."""
    head_shards: str = ""
    """What its blocks mean as head shards, ``HeadShards.meaning``; empty: they are not to be kept as such."""
    head_shard_bytes: int = 0


class Configure(msgspec.Struct, tag="configure", frozen=True, forbid_unknown_fields=True):
    """Leader -> worker: how many slots of the host tier every rank that stores allocates, and what is below.

    ``broadcast_address``: where the others get what rank 0 loads. ``first_job_id``: jobs below it were of
    this rank's process before, and are not to be begun in this one.
    """

    num_slots: int
    tiers: tuple[TierPlace, ...] = ()
    broadcast_address: str = ""
    first_job_id: int = 0


class Ready(msgspec.Struct, tag="ready", frozen=True, forbid_unknown_fields=True):
    """Worker -> leader: slots 0 .. ready_slots-1 can be used."""

    rank: int
    ready_slots: int


class Results(msgspec.Struct, tag="results", frozen=True, forbid_unknown_fields=True):
    """Worker -> leader: jobs that are over, or late."""

    rank: int
    results: list[JobResult]


class Ask(msgspec.Struct, tag="ask", frozen=True, forbid_unknown_fields=True):
    """Leader -> worker: these jobs have not been answered. The results of those that are over, then Here.

    ``is_last``: what has not come by now is not to be begun any more, and is answered as rejected.
    """

    job_ids: list[int]
    is_last: bool


class Here(msgspec.Struct, tag="here", frozen=True, forbid_unknown_fields=True):
    """Worker -> leader: an Ask has come; this rank is alive."""

    rank: int


class Refused(msgspec.Struct, tag="refused", frozen=True, forbid_unknown_fields=True):
    """Either way: this side cannot take part; ``reason`` is one line for the log."""

    rank: int
    reason: str


class TierFound(msgspec.Struct, tag="tier_found", frozen=True, forbid_unknown_fields=True):
    """Worker -> leader: slots of a lower tier below ``end`` can be used; what the newest of them hold, and
    when it was written.
    """

    rank: int
    tier: str
    end: int
    slots: list[int]
    keys: list[bytes]
    sequences: list[int]


class TierRefused(msgspec.Struct, tag="tier_refused", frozen=True, forbid_unknown_fields=True):
    """Worker -> leader: this rank serves without this lower tier; ``reason`` is one line for the log."""

    rank: int
    tier: str
    reason: str


class Move(msgspec.Struct, tag="move", frozen=True, forbid_unknown_fields=True):
    """Leader -> worker: an order to a lower tier. Answered by a result, but for a FORGET."""

    order: TierOrder


class Finish(msgspec.Struct, tag="finish", frozen=True, forbid_unknown_fields=True):
    """Leader -> worker: a request is over; its device blocks wait for these jobs, of which ``plan`` begins
    now.

    For engines whose own messages end with a request's last step.
    """

    request_id: str
    job_ids: tuple[int, ...]
    plan: TransferPlan | None


class LoadEnded(msgspec.Struct, tag="load_ended", frozen=True, forbid_unknown_fields=True):
    """Leader -> worker: every rank has answered this load, and the leader knows what becomes of its request.

    For engines that cannot compute what was not loaded: all ranks have to act alike. Sent of each load that
    failed, and of those that the leader has let the workers wait for.
    """

    request_id: str
    job_id: int
    is_done: bool


Note = Finish | LoadEnded
"""What a worker's adapter takes up, in its own time."""
Order = Configure | Ask | Move | Note
"""What only a leader says."""
Message = Hello | Ready | Results | Here | Refused | TierFound | TierRefused | Order

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
