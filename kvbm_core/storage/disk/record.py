"""What stands on the disk: one header for the file, and one before each block's bytes. Pure arithmetic.

Version 1, little-endian. The file: its header, then from FIRST_SLOT_BYTES on slot after slot, each a record's
header and the block's bytes, filled up to whole sectors. A header fills a sector and ends with the xxh3_128
of the rest of it, so no bit of it can change unseen. A record's header names everything that its block
depends on, and holds the xxh3_128 of the bytes: what is read is either what was written under that key in
this life of the file, or it does not verify. No promise rests on the order or the completeness of writes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import xxhash

from kvbm_core.errors import Outcome
from kvbm_core.types import BlockKey

FORMAT_VERSION = 1
SECTOR_BYTES = 4096
FIRST_SLOT_BYTES = 1 << 20  # whole huge pages and flash pages before the first slot
MAX_KEY_BYTES = 40
MAX_PAYLOAD_BYTES = 4 << 30
"""No block has more bytes, and a header that says so is none."""
DIGEST_BYTES = 16
BODY_BYTES = SECTOR_BYTES - DIGEST_BYTES
LIFE_FIELD = slice(16, 32)

_FILE_MAGIC = b"KVBMFILE"
_RECORD_MAGIC = b"KVBMBLOK"
# magic, version, header bytes; life, fingerprint, payload bytes, slots
_FILE = struct.Struct("<8sHH4x16s16sQQ")
# magic, version, key bytes; life, fingerprint, slot, sequence, payload bytes, key, digests of the payload
_RECORD = struct.Struct("<8sHH4x16s16sQQQ40s16s16s")
NO_DEVICE_DIGEST = bytes(DIGEST_BYTES)


class FileHeader(NamedTuple):
    """``life``: 16 random bytes; records of another life (before a reset, of another file) do not count.

    ``fingerprint``: 16 bytes, of what the bytes of a block mean.
    """

    life: bytes
    fingerprint: bytes
    payload_bytes: int
    num_slots: int


class RecordHeader(NamedTuple):
    """``sequence`` grows with the time of writing; records of one call share it, in the order of their
    slots. ``device_digest``: see device_digest.py; zeros where none was made.
    """

    life: bytes
    fingerprint: bytes
    slot: int
    sequence: int
    payload_bytes: int
    key: BlockKey
    digest: bytes
    device_digest: bytes = NO_DEVICE_DIGEST


class SlotHeader(NamedTuple):
    """What stands in a slot: a record's ``header``; or ``flaw``, which says what is wrong with what stands
    there, and its ``key`` if that can be known; or nothing: the slot is free.
    """

    header: RecordHeader | None = None
    flaw: str = ""
    key: bytes = b""


FREE = SlotHeader()
DAMAGED = SlotHeader(flaw="the header does not verify")
UNREADABLE = SlotHeader(flaw="it cannot be read")


def whole_sectors(num_bytes: int) -> int:
    """``num_bytes``, or the next number that is whole sectors."""
    return -(-num_bytes // SECTOR_BYTES) * SECTOR_BYTES


def record_bytes(payload_bytes: int) -> int:
    """What a slot takes in the file."""
    return SECTOR_BYTES + whole_sectors(payload_bytes)


def slot_offset_bytes(slot: int, payload_bytes: int) -> int:
    """Where a slot begins."""
    return FIRST_SLOT_BYTES + slot * record_bytes(payload_bytes)


payload_digest = xxhash.xxh3_128_digest
"""The checksum of a block's bytes."""


def pieces_digest(pieces: Sequence[tuple[int, int]]) -> bytes:
    """The same of bytes that lie in several places; ``pieces`` are (address, bytes)."""
    state = xxhash.xxh3_128()
    for address, num_bytes in pieces:
        state.update((ctypes.c_char * num_bytes).from_address(address))
    return state.digest()


def pack_file(header: FileHeader) -> bytes:
    """One sector."""
    body = _FILE.pack(_FILE_MAGIC, FORMAT_VERSION, SECTOR_BYTES, *header)
    return _sealed(body)


def pack_record(header: RecordHeader) -> bytes:
    """One sector. ValueError for a key that is empty or longer than MAX_KEY_BYTES."""
    sector = bytearray(SECTOR_BYTES)
    with memoryview(sector) as view:
        pack_record_into(view, header)
    return bytes(sector)


def pack_record_into(sector: memoryview, header: RecordHeader) -> None:
    """As ``pack_record``, into a sector that has never held anything but headers of records."""
    life, fingerprint, slot, sequence, payload_bytes, key, digest, device_digest = header
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes does not go into a record")
    _RECORD.pack_into(
        sector,
        0,
        _RECORD_MAGIC,
        FORMAT_VERSION,
        len(key),
        life,
        fingerprint,
        slot,
        sequence,
        payload_bytes,
        key,
        digest,
        device_digest,
    )
    sector[BODY_BYTES:] = xxhash.xxh3_128_digest(sector[:BODY_BYTES])


def foreign_version(sector: bytes | memoryview) -> int | None:
    """The version of a file of ours that this kvbm does not know; None for any other content.

    0 was never one: it is what a loss of power leaves of a header of which only the first bytes were written.
    """
    magic, version = struct.unpack_from("<8sH", sector)
    return int(version) if magic == _FILE_MAGIC and version not in (0, FORMAT_VERSION) else None


def unpack_file(sector: bytes | memoryview) -> FileHeader | None:
    """The header of a file, or None if the sector is none of this version."""
    fields = _opened(sector, _FILE, _FILE_MAGIC)
    if fields is None or fields[2] != SECTOR_BYTES:
        return None
    header = FileHeader(*fields[3:])
    return header if 0 < header.payload_bytes <= MAX_PAYLOAD_BYTES and header.num_slots else None


def unpack_record(sector: bytes | memoryview) -> RecordHeader | None:
    """The header of a record, or None if the sector is none of this version."""
    fields = _opened(sector, _RECORD, _RECORD_MAGIC)
    if fields is None or not 0 < fields[2] <= MAX_KEY_BYTES:
        return None
    header = RecordHeader(*fields[3:])
    if not 0 < header.payload_bytes <= MAX_PAYLOAD_BYTES:
        return None
    return header._replace(key=BlockKey(header.key[: fields[2]]))


def judge_slot(sector: bytes | memoryview, slot: int, file: FileHeader) -> SlotHeader:
    """What the first sector of ``slot`` says.

    A slot may hold what an earlier life, or another geometry, left there. That is free. A damaged header
    counts if its life is ours but for a few bits.
    """
    header = unpack_record(sector)
    if header is None:
        life = bytes(sector[LIFE_FIELD])
        alike = sum(ours == theirs for ours, theirs in zip(file.life, life, strict=True)) if any(life) else 0
        return DAMAGED if alike >= len(life) // 2 else FREE
    if header.life != file.life:
        return FREE
    if header.slot != slot:
        return SlotHeader(flaw=f"it belongs into slot {header.slot}", key=header.key)
    if (header.fingerprint, header.payload_bytes) != (file.fingerprint, file.payload_bytes):
        return SlotHeader(flaw="it is of another geometry than the file", key=header.key)
    return SlotHeader(header)


def judge_record(header: RecordHeader | None, key: BlockKey, slot: int, file: FileHeader) -> Outcome:
    """Whether a record's header is that of this block in this slot: OK if its bytes match its digest, which
    is not looked at here. CORRUPT: it does not verify; INCOMPATIBLE: its bytes mean something else; MISS: it
    is another block's.
    """
    if header is None:
        return Outcome.CORRUPT
    if (header.fingerprint, header.payload_bytes) != (file.fingerprint, file.payload_bytes):
        return Outcome.INCOMPATIBLE
    if (header.key, header.life, header.slot) != (key, file.life, slot):
        return Outcome.MISS
    return Outcome.OK


def _sealed(fields: bytes) -> bytes:
    body = fields.ljust(BODY_BYTES, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def _opened(sector: bytes | memoryview, form: struct.Struct, magic: bytes) -> tuple[Any, ...] | None:
    if len(sector) != SECTOR_BYTES:
        return None
    fields = form.unpack_from(sector)
    if fields[0] != magic or fields[1] != FORMAT_VERSION:
        return None
    view = memoryview(sector)
    return fields if xxhash.xxh3_128_digest(view[:BODY_BYTES]) == view[BODY_BYTES:].tobytes() else None
