"""What leader and workers say to each other: closed msgspec structs, decoded by type, never by content.

Wire: one ZMQ frame, MessagePack, at most MAX_MESSAGE_BYTES. A frame that does not decode is dropped and
counted.
"""

from __future__ import annotations

import msgspec

from kvbm_core.transfer.plan import JobResult, TierOrder, TierPlace

PROTOCOL_VERSION = 11
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
    part: str = ""
    """Which part of the KV this rank has, if others have the same and one of them may store it for all;
    empty: it stores its own.
    """
    machine: str = ""
    """What its loopback addresses are called, see ``loopback_name``: where they are the same, ranks can
    meet.
    """
    broadcast_address: str = ""
    """Where they do if this is the first of them, in the words of its MeetingPoint."""
    head_shards: str = ""
    """What its blocks mean as head shards, ``HeadShards.meaning``; empty: they are not to be kept as such."""
    head_shard_bytes: int = 0
    engine: str = ""
    """Whose rank it is, where others could reach the leader too."""


class Join(msgspec.Struct, tag="join", frozen=True, forbid_unknown_fields=True):
    """Leader -> worker: these ranks, of which this is one, have the same KV. They meet at ``address``, the
    first one's. Sent again until Joined arrives.

    If all ranks can join, the first one stores, as shard ``shard`` of ``num_shards``.
    """

    ranks: tuple[int, ...]
    address: str
    shard: int
    num_shards: int


class Joined(msgspec.Struct, tag="joined", frozen=True, forbid_unknown_fields=True):
    """Worker -> leader: this rank has met the others of its Join; or cannot: ``problem`` is one line."""

    rank: int
    problem: str


class Configure(msgspec.Struct, tag="configure", frozen=True, forbid_unknown_fields=True):
    """Leader -> worker: how many slots of the host tier every rank that stores allocates, and what is below.

    ``first_job_id``: jobs below it were of this rank's process before, and are not to be begun in this one.
    ``is_shared``: who stores is as the Join said; else each rank stores its own.
    """

    num_slots: int
    tiers: tuple[TierPlace, ...] = ()
    first_job_id: int = 0
    is_shared: bool = False


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


class Refused(msgspec.Struct, tag="refused", frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Either way: this side cannot take part; ``reason`` is one line for the log.

    What the leader says of it is read by workers of other versions too: it never changes.
    """

    rank: int
    reason: str
    engine: str = ""
    """A worker's, see Hello."""


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


class TierDirect(msgspec.Struct, tag="tier_direct", frozen=True, forbid_unknown_fields=True):
    """Worker -> leader: whether this rank reads this tier straight into its device's memory from now on."""

    rank: int
    tier: str
    is_direct: bool


class Borrow(msgspec.Struct, tag="borrow", frozen=True, forbid_unknown_fields=True):
    """Worker -> leader: a peer asks for these. Answered by Lent. ``is_find``: only whether they are there."""

    rank: int
    number: int
    keys: list[bytes]
    ttl_s: float
    is_find: bool


class GiveBack(msgspec.Struct, tag="give_back", frozen=True, forbid_unknown_fields=True):
    """Worker -> leader: what was lent under this number has been copied. Answered by Returned."""

    rank: int
    number: int


class PeerNews(msgspec.Struct, tag="peer_news", frozen=True, forbid_unknown_fields=True):
    """Worker -> leader: what this rank has not done for peers since it last said so."""

    rank: int
    busy: int
    refused: int
    bad: int


class Lent(msgspec.Struct, tag="lent", frozen=True, forbid_unknown_fields=True):
    """Leader -> worker: where the blocks are; see peers.lending.Loan."""

    number: int
    slots: tuple[int, ...]
    places: tuple[int, ...]
    tier: str
    is_refused: bool


class Returned(msgspec.Struct, tag="returned", frozen=True, forbid_unknown_fields=True):
    """Leader -> worker: the blocks are not held any more. ``was_held``: until now."""

    number: int
    was_held: bool


class Move(msgspec.Struct, tag="move", frozen=True, forbid_unknown_fields=True):
    """Leader -> worker: an order to a lower tier. Answered by a result, but for FORGET and ERASE."""

    order: TierOrder


class Note(msgspec.Struct, tag="note", frozen=True, forbid_unknown_fields=True):
    """Leader -> worker: what the leader's adapter says to the worker's, besides the engine's own messages."""

    content: bytes


Order = Configure | Join | Ask | Move | Lent | Returned | Note
"""What only a leader says."""
OfPeers = Borrow | GiveBack | PeerNews
"""What a rank says for its peers."""
Message = (
    Hello | Joined | Ready | Results | Here | Refused | TierFound | TierRefused | TierDirect | OfPeers | Order
)


class _AnyHello(msgspec.Struct, tag="hello"):
    """What a hello of each version has."""

    protocol: int
    rank: int


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_HELLO_DECODER = msgspec.msgpack.Decoder(_AnyHello)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode(message: Message) -> bytes:
    """One frame."""
    return _ENCODER.encode(message)


def decode(frame: bytes) -> Message | None:
    """The message, or None if the frame is too long or not one of ours. Of a hello of another version, which
    may say more than ours, its version and its rank.
    """
    if len(frame) > MAX_MESSAGE_BYTES:
        return None
    try:
        return _DECODER.decode(frame)
    except _UNREADABLE:
        pass
    try:
        said = _HELLO_DECODER.decode(frame)
    except _UNREADABLE:
        return None
    if said.protocol == PROTOCOL_VERSION:
        return None
    return Hello(said.protocol, said.rank, 0, 0, 0, "")
