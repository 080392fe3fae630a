"""The format of a record, the object in which a shared store keeps a run of blocks. No I/O here.

Version 2, little-endian: ``[block 0]...[block k-1][trailer]``. The trailer fills whole sectors: a table with
one entry per block, zeros, the fields of the record, and the xxh3_128 of all of that. It names everything
that the bytes depend on. So no index, listing or hint has to be trusted: what is read is what was written
under that key, or it does not verify. The trailer is at the end, so that one request can read it together
with the last blocks of the record, however many are wanted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import xxhash

from kvbm_core.storage.base import Memory, plain_parts
from kvbm_core.storage.disk.record import DIGEST_BYTES, MAX_KEY_BYTES, whole_sectors

RECORD_VERSION = 2
TAIL_BYTES = 16
SALT_BYTES = 16
SECRET_ID_BYTES = 16

_MAGIC = b"KVBMRUN\0"
# magic, version, blocks, group, codec, bytes of the key; life, fingerprint, id of the secret, salt, bytes of
# a block, key
_FIELDS = struct.Struct("<8sHHBBBx16s16s16s16sQ40s")
# tail of the key, bytes that are stored, digest of these
_ENTRY = struct.Struct("<16sI16s")
_END_BYTES = _FIELDS.size + DIGEST_BYTES


class RecordFields(NamedTuple):
    """``life``: a digest of the folder's name (see ``life_of``). ``fingerprint``: what the bytes of a block
    mean. ``secret_id``: which secret ``mark`` was made with; zeros for none. ``salt``: random bytes, other
    ones in each encrypted record.

    ``codec``: how blocks are stored; see encoding.py. ``group``: of the blocks. ``mark``: the last block's
    key; with a secret, a digest of the key that needs the secret.
    """

    num_blocks: int
    group: int
    codec: int
    life: bytes
    fingerprint: bytes
    secret_id: bytes
    salt: bytes
    block_bytes: int
    mark: bytes


class StoredBlock(NamedTuple):
    """A block's entry in the table. ``tail``: the last bytes of its key's mark. ``num_bytes`` and ``digest``
    (xxh3_128): of the bytes as they are stored, perhaps compressed or encrypted.
    """

    tail: bytes
    num_bytes: int
    digest: bytes


class RecordTrailer(NamedTuple):
    """The fields, and one entry per block."""

    fields: RecordFields
    blocks: tuple[StoredBlock, ...]


@cache
def trailer_bytes(num_blocks: int) -> int:
    """The size of the trailer of a record of so many blocks."""
    return whole_sectors(num_blocks * _ENTRY.size + _END_BYTES)


def digest_of(memory: Memory) -> bytes:
    """The checksum of a block's bytes."""
    state = xxhash.xxh3_128()
    for part in plain_parts(memory):
        state.update(part)
    return state.digest()


def pack_fields(fields: RecordFields) -> bytes:
    """The fields as bytes of the trailer. ValueError for a key that is empty or longer than MAX_KEY_BYTES."""
    if not 0 < len(fields.mark) <= MAX_KEY_BYTES:
        raise ValueError(f"a key of {len(fields.mark)} bytes does not go into a record")
    return _FIELDS.pack(_MAGIC, RECORD_VERSION, *fields[:3], len(fields.mark), *fields[3:])


def pack_trailer_into(memory: memoryview, fields: RecordFields, blocks: Sequence[StoredBlock]) -> None:
    """``memory`` is of exactly ``trailer_bytes``; whatever it held is overwritten."""
    table_bytes, at = len(blocks) * _ENTRY.size, memory.nbytes - _END_BYTES
    for index, block in enumerate(blocks):
        _ENTRY.pack_into(memory, index * _ENTRY.size, *block)
    memory[table_bytes:at] = bytes(at - table_bytes)
    memory[at:-DIGEST_BYTES] = pack_fields(fields)
    memory[-DIGEST_BYTES:] = xxhash.xxh3_128_digest(memory[:-DIGEST_BYTES])


def trailer_in(record: memoryview) -> memoryview:
    """The trailer at the end of a whole record; the record says how long it is. It may not verify. Empty if
    the record is too short to have one.
    """
    if record.nbytes < _END_BYTES:
        return record[:0]
    num_blocks = _FIELDS.unpack_from(record, record.nbytes - _END_BYTES)[2]
    num_bytes = trailer_bytes(num_blocks)
    return record[-num_bytes:] if num_bytes <= record.nbytes else record[:0]


def unpack_trailer(memory: memoryview) -> RecordTrailer | None:
    """None if it does not verify, or has another version; ``version_of`` tells these apart."""
    if version_of(memory) != RECORD_VERSION:
        return None
    found = _FIELDS.unpack_from(memory, memory.nbytes - _END_BYTES)
    num_blocks, group, codec, mark_bytes, *others, key = found[2:]
    is_possible = 0 < mark_bytes <= MAX_KEY_BYTES and num_blocks
    if not is_possible or trailer_bytes(num_blocks) != memory.nbytes:
        return None
    fields = RecordFields._make((num_blocks, group, codec, *others, key[:mark_bytes]))
    table = memory[: num_blocks * _ENTRY.size]
    return RecordTrailer(fields, tuple(map(StoredBlock._make, _ENTRY.iter_unpack(table))))


def version_of(memory: memoryview) -> int | None:
    """The version of a trailer that verifies; None for anything else."""
    if memory.nbytes < _END_BYTES:
        return None
    magic, version = struct.unpack_from("<8sH", memory, memory.nbytes - _END_BYTES)
    seal = xxhash.xxh3_128_digest(memory[:-DIGEST_BYTES])
    return int(version) if magic == _MAGIC and seal == memory[-DIGEST_BYTES:] else None
