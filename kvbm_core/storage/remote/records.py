"""What stands in a shared store: a record, which is a run of blocks and says itself what it is. Arithmetic.

Version 2, little-endian: ``[block 0]...[block k-1][trailer]``. The trailer is whole sectors: a table with one
entry per block, zeros, the fields of the record, and the xxh3_128 of all of that. It names everything that
the bytes depend on, so no index, listing or hint has to be believed: what is read is either what was written
under that key, or it does not verify. It stands behind the blocks, so that any last blocks of a record come
with it in one request.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
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
    """``life``: of the folder that the record is in. ``fingerprint``: of what the bytes of a block mean.
    ``secret_id``: zeros, or which secret ``mark`` was made with. ``salt``: random bytes of this record's own.

    ``codec``: how blocks are stored; see encoding.py. ``group``: that of the blocks. ``mark``: what stands
    for the last block's key: itself, or a digest of it that only who has the secret can make.
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
    """``tail``: the last bytes of its key's mark. ``num_bytes``, ``digest`` (xxh3_128): as it is stored."""

    tail: bytes
    num_bytes: int
    digest: bytes


class RecordTrailer(NamedTuple):
    """One entry per block."""

    fields: RecordFields
    blocks: tuple[StoredBlock, ...]


def trailer_bytes(num_blocks: int) -> int:
    """What it takes, for a record of so many blocks."""
    return whole_sectors(num_blocks * _ENTRY.size + _END_BYTES)


def digest_of(memory: Memory) -> bytes:
    """The checksum of a block's bytes."""
    state = xxhash.xxh3_128()
    for part in plain_parts(memory):
        state.update(part)
    return state.digest()


def pack_fields(fields: RecordFields) -> bytes:
    """As they stand in the trailer. ValueError for a key that is empty or longer than MAX_KEY_BYTES."""
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
    """The trailer of a whole record, by what the record itself says of its length: it may not verify. Empty
    if there can be none.
    """
    if record.nbytes < _END_BYTES:
        return record[:0]
    num_blocks = _FIELDS.unpack_from(record, record.nbytes - _END_BYTES)[2]
    num_bytes = trailer_bytes(num_blocks)
    return record[-num_bytes:] if num_bytes <= record.nbytes else record[:0]


def unpack_trailer(memory: memoryview) -> RecordTrailer | None:
    """None if it does not verify, or is not of this version; ``version_of`` tells which."""
    if version_of(memory) != RECORD_VERSION:
        return None
    found = _FIELDS.unpack_from(memory, memory.nbytes - _END_BYTES)
    num_blocks, group, codec, mark_bytes, *others, key = found[2:]
    if not 0 < mark_bytes <= MAX_KEY_BYTES or trailer_bytes(num_blocks) != memory.nbytes:
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
