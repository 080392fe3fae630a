"""KV events as bytes: batches in the format that engines publish, their numbers, and the pages of a dump.

A batch is MessagePack, [time in seconds, events, data-parallel rank]; an event is a map with its ``type``.
Beside each batch goes its number, 8 bytes, big endian: the generation in the upper half, which is drawn at
random whenever a stream begins, and in the lower half a count without gaps. So a number that does not follow
the one before says that something was missed, and one of another generation that all before it is void.

What the numbers are for: somebody who missed something asks for a dump, what all tiers hold at one moment, in
pages, with the number of the last batch that is part of it.
"""

from __future__ import annotations

import secrets
from struct import Struct

import msgspec

BlockHash = int | bytes
"""As the engine publishes it: 64 bits, or all bytes of it."""

COUNT_BITS = 32
MAX_GENERATION = 2**31 - 1
"""So that a number is positive for readers to whom it has a sign."""
MAX_BATCH_HASHES = 64
PAGE_HASHES = 65_536
MAX_PAGE_BYTES = 800_000
"""A NATS server takes messages of 1 MiB, if nobody has told it otherwise."""
NUMBER = Struct(">Q")
_REQUEST = Struct(">4sQQI")
_DUMP = b"dump"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that follow each other are in a medium. ``token_ids`` is empty if it must not be told which they
    are: then a hash is all that there is.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[object, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    block_mm_infos: list[object] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """These blocks are in a medium no more."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Nothing is in ``medium`` any more; None: in any. Who does not know the field forgets too much."""

    medium: str | None = None


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one message carries; without events it only says that nothing was missed."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class Resident(msgspec.Struct, array_like=True, gc=False):
    """Blocks of one group in one medium."""

    medium: str
    group: int
    hashes: list[BlockHash]


class DumpPage(msgspec.Struct, array_like=True, gc=False):
    """A page of a dump. ``number``: of the last batch that is part of it; 0: there is no such dump (any
    more), ask for a new one. ``dump`` and ``page`` + 1 ask for the next page, if ``is_last`` is not said.
    """

    number: int
    dump: int
    page: int
    is_last: bool
    residents: list[Resident]


class DumpRequest(msgspec.Struct, frozen=True):
    """``since``: the number of the first batch that the asker has kept; a dump that is older than that is of
    no use to it. ``dump`` 0: a new one, page 0.
    """

    since: int
    dump: int = 0
    page: int = 0

    def pack(self) -> bytes:
        """As bytes; never 8 of them, which ask for a replay."""
        return _REQUEST.pack(_DUMP, self.since, self.dump, self.page)

    @staticmethod
    def unpack(frame: bytes) -> DumpRequest | None:
        """None if it is none."""
        if len(frame) != _REQUEST.size or not frame.startswith(_DUMP):
            return None
        _, since, dump, page = _REQUEST.unpack(frame)
        return DumpRequest(since, dump, page)


def new_generation() -> int:
    """Drawn at random, not 0."""
    return 1 + secrets.randbelow(MAX_GENERATION)


def generation_of(number: int) -> int:
    """Of a batch's number."""
    return number >> COUNT_BITS


_ENCODER = msgspec.msgpack.Encoder()
_BATCH = msgspec.msgpack.Decoder(EventBatch)
_PAGE = msgspec.msgpack.Decoder(DumpPage)


def encode(message: EventBatch | DumpPage) -> bytes:
    """Any thread."""
    return _ENCODER.encode(message)


def decode_batch(payload: bytes) -> EventBatch | None:
    """None if it is none."""
    try:
        return _BATCH.decode(payload)
    except msgspec.DecodeError:
        return None


def decode_page(payload: bytes) -> DumpPage | None:
    """None if it is none."""
    try:
        return _PAGE.decode(payload)
    except msgspec.DecodeError:
        return None
