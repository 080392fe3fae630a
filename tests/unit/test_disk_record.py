"""The format on disk: what goes in comes out, what is not whole does not, and the bytes stay what they
are.
"""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvbm_core.storage.disk.record import (
    FIRST_SLOT_BYTES,
    FORMAT_VERSION,
    MAX_KEY_BYTES,
    MAX_PAYLOAD_BYTES,
    SECTOR_BYTES,
    FileHeader,
    RecordHeader,
    foreign_version,
    pack_file,
    pack_record,
    payload_digest,
    record_bytes,
    slot_offset_bytes,
    unpack_file,
    unpack_record,
)
from kvbm_core.types import BlockKey

SIXTEEN = st.binary(min_size=16, max_size=16)
NUMBERS = st.integers(0, 2**64 - 1)
LENGTHS = st.integers(1, MAX_PAYLOAD_BYTES)
FILE_HEADERS = st.builds(FileHeader, SIXTEEN, SIXTEEN, LENGTHS, st.integers(1, 2**64 - 1))
KEYS = st.binary(min_size=1, max_size=MAX_KEY_BYTES).map(BlockKey)
RECORD_HEADERS = st.builds(RecordHeader, SIXTEEN, SIXTEEN, NUMBERS, NUMBERS, LENGTHS, KEYS, SIXTEEN, SIXTEEN)

FILE = FileHeader(b"life".ljust(16), b"print".ljust(16), 65536, 1000)
RECORD = RecordHeader(FILE.life, FILE.fingerprint, 7, 1 << 60, 65536, BlockKey(bytes(range(33))), b"d" * 16)


def sealed(sector: bytes) -> bytes:
    """``sector`` with the checksum that it should have."""
    return sector[:-16] + xxhash.xxh3_128_digest(sector[:-16])


def changed(sector: bytes, at: int, content: bytes) -> bytes:
    """Another content, with a checksum that is right."""
    return sealed(sector[:at] + content + sector[at + len(content) :])


@given(FILE_HEADERS)
def test_a_files_header_comes_back(header: FileHeader) -> None:
    sector = pack_file(header)
    assert len(sector) == SECTOR_BYTES and sector == sealed(sector)
    assert unpack_file(sector) == unpack_file(memoryview(sector)) == header
    assert unpack_record(sector) is None and foreign_version(sector) is None


@given(RECORD_HEADERS)
def test_a_records_header_comes_back(header: RecordHeader) -> None:
    sector = pack_record(header)
    assert len(sector) == SECTOR_BYTES and sector == sealed(sector)
    assert unpack_record(sector) == unpack_record(memoryview(sector)) == header
    assert unpack_file(sector) is None and foreign_version(sector) is None


@pytest.mark.parametrize("length", [0, MAX_PAYLOAD_BYTES + 1, 1 << 63, (1 << 64) - 1])
def test_a_block_of_an_impossible_length_makes_no_header(length: int) -> None:
    assert unpack_file(pack_file(FILE._replace(payload_bytes=length))) is None
    assert unpack_record(pack_record(RECORD._replace(payload_bytes=length))) is None
    assert unpack_file(pack_file(FILE._replace(num_slots=0))) is None


def test_keys_that_differ_in_zeros_at_the_end_are_different() -> None:
    for length in range(1, MAX_KEY_BYTES + 1):
        header = unpack_record(pack_record(RECORD._replace(key=BlockKey(bytes(length)))))
        assert header is not None and header.key == bytes(length)


@pytest.mark.parametrize("length", [0, MAX_KEY_BYTES + 1, 1000])
def test_a_key_that_does_not_fit_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"a key of {length} bytes"):
        pack_record(RECORD._replace(key=BlockKey(bytes(length))))


@pytest.mark.parametrize("payload_bytes", [-1, 2**64])
def test_numbers_that_do_not_fit_are_refused(payload_bytes: int) -> None:
    with pytest.raises(struct.error):
        pack_record(RECORD._replace(payload_bytes=payload_bytes))
    with pytest.raises(struct.error):
        pack_file(FILE._replace(payload_bytes=payload_bytes))


def test_where_slots_are() -> None:
    for payload_bytes, stored_bytes in (
        (1, 4096),
        (4095, 4096),
        (4096, 4096),
        (4097, 8192),
        (1 << 20, 1 << 20),
    ):
        assert record_bytes(payload_bytes) == SECTOR_BYTES + stored_bytes
        offsets = [slot_offset_bytes(slot, payload_bytes) for slot in range(4)]
        assert offsets == [FIRST_SLOT_BYTES + slot * (SECTOR_BYTES + stored_bytes) for slot in range(4)]
    assert FIRST_SLOT_BYTES % SECTOR_BYTES == 0


def test_what_is_no_whole_sector_is_nothing() -> None:
    for sector in (pack_file(FILE), pack_record(RECORD)):
        for other in (
            sector[:-1],
            sector + b"\0",
            sector[1:] + b"\0",
            bytes(SECTOR_BYTES),
            b"\xff" * SECTOR_BYTES,
            b"",
        ):
            assert unpack_file(other) is None and unpack_record(other) is None


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 0xFFFF])
def test_another_version_is_told_from_damage(version: int) -> None:
    field = version.to_bytes(2, "little")
    for sector in (
        changed(pack_file(FILE), 8, field),
        pack_file(FILE)[:8] + field + bytes(SECTOR_BYTES - 10),
    ):
        assert foreign_version(sector) == version, "whatever the rest of it means"
        assert unpack_file(sector) is None
    assert foreign_version(changed(pack_record(RECORD), 8, field)) is None
    assert unpack_record(changed(pack_record(RECORD), 8, field)) is None
    assert foreign_version(b"a text of some length".ljust(SECTOR_BYTES)) is None


@pytest.mark.parametrize("num_bytes", range(1, 12))
def test_the_beginning_of_a_header_of_ours_is_damage(num_bytes: int) -> None:
    torn = pack_file(FILE)[:num_bytes].ljust(SECTOR_BYTES, b"\0")
    assert foreign_version(torn) is None and unpack_file(torn) is None


def test_a_header_of_another_size_is_none_of_this_version() -> None:
    assert unpack_file(changed(pack_file(FILE), 10, (512).to_bytes(2, "little"))) is None
    for length in (0, MAX_KEY_BYTES + 1, 0xFFFF):
        assert unpack_record(changed(pack_record(RECORD), 10, length.to_bytes(2, "little"))) is None


def test_the_format_is_what_it_was() -> None:
    """Files outlive the kvbm that wrote them: whoever changes a byte of this changes FORMAT_VERSION."""
    head = b"\x01\x00\x00\x10" + bytes(4) + FILE.life + FILE.fingerprint
    assert pack_file(FILE)[:64] == b"KVBMFILE" + head + (65536).to_bytes(8, "little") + (1000).to_bytes(
        8, "little"
    )
    assert pack_file(FILE)[64:-16] == bytes(SECTOR_BYTES - 80)
    sector = pack_record(RECORD)
    head = b"\x01\x00\x21\x00" + bytes(4) + RECORD.life + RECORD.fingerprint
    numbers = b"".join(number.to_bytes(8, "little") for number in (7, 1 << 60, 65536))
    assert sector[:128] == b"KVBMBLOK" + head + numbers + RECORD.key.ljust(40, b"\0") + RECORD.digest
    assert sector[128:-16] == bytes(SECTOR_BYTES - 144)
    assert payload_digest(memoryview(b"block")).hex() == "4f66d8eccfd71ad53e0bab022df15cf2"
    assert pack_file(FILE)[-16:].hex() == "352d06d53a06976b422d254c344be637"
