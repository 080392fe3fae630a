"""No bit of a record can change unseen."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm_core.errors import Outcome
from kvbm_core.storage.extents import MAX_EXTENT_BLOCKS
from kvbm_core.storage.remote.records import (
    RECORD_VERSION,
    RecordFields,
    RecordTrailer,
    StoredBlock,
    pack_trailer_into,
    trailer_bytes,
    unpack_trailer,
    version_of,
)
from kvbm_core.testing.extent_contract import extent_of, last_of
from tests.effort import tries
from tests.unit.record_stores import KINDS, flipped, get

SIXTEEN = st.binary(min_size=16, max_size=16)
BLOCKS = st.lists(st.builds(StoredBlock, SIXTEEN, st.integers(0, 2**32 - 1), SIXTEEN), min_size=1, max_size=9)


FIELDS = st.builds(
    RecordFields,
    st.just(0),
    st.integers(0, 255),
    st.integers(0, 255),
    *[SIXTEEN] * 4,
    st.integers(0, 2**64 - 1),
    st.binary(min_size=1, max_size=40),
)


@given(FIELDS, BLOCKS)
def test_a_trailer_says_what_was_put_into_it(fields: RecordFields, blocks: list[StoredBlock]) -> None:
    fields = fields._replace(num_blocks=len(blocks))
    memory = memoryview(bytearray(b"\xff" * trailer_bytes(len(blocks))))
    pack_trailer_into(memory, fields, blocks)
    assert unpack_trailer(memory) == RecordTrailer(fields, tuple(blocks))
    assert version_of(memory) == RECORD_VERSION


def test_a_trailer_of_any_number_of_blocks_is_whole_sectors() -> None:
    for count in range(1, MAX_EXTENT_BLOCKS + 1):
        size = trailer_bytes(count)
        fields = RecordFields(count, 0, 0, *[bytes(16)] * 4, 1, b"key")
        blocks = [StoredBlock(index.to_bytes(16, "big"), 1, bytes(16)) for index in range(count)]
        memory = memoryview(bytearray(size))
        pack_trailer_into(memory, fields, blocks)
        assert size % 4096 == 0 and unpack_trailer(memory) == RecordTrailer(fields, tuple(blocks))
    assert trailer_bytes(64) == 4096 and trailer_bytes(MAX_EXTENT_BLOCKS) == 5 * 4096


def test_a_key_that_does_not_go_into_a_record_is_refused() -> None:
    for mark in (b"", bytes(41)):
        fields = RecordFields(1, 0, 0, *[bytes(16)] * 4, 1, mark)
        with pytest.raises(ValueError, match="does not go into a record"):
            pack_trailer_into(memoryview(bytearray(4096)), fields, [])


@pytest.mark.parametrize("kind_name", KINDS)
def test_every_bit_of_a_record_that_changes_is_found(kind_name: str) -> None:
    """All that says something in a plain one; a part of what is filled up, and of others."""
    kind, extent = KINDS[kind_name](), extent_of(1, 3)
    kind.payload_bytes = 200
    kind.put(extent)
    store, content = kind.open(), kind.content(extent)
    stored_bytes = len(content) - 4096
    bits = range(8 * len(content))
    few = set(Random(kind_name).sample(bits, tries(300, nightly=len(bits))))
    says = [*range(stored_bytes + 3 * 36), *range(len(content) - 136, len(content))]
    if kind_name == "plain":
        few.update(8 * byte + bit for byte in says for bit in range(8))
    for bit in sorted(few):
        kind.objects.put(kind.name_of(extent), flipped(content, [bit]))
        outcomes = get(store, extent, 200)
        assert Outcome.OK not in outcomes or bit // 8 < stored_bytes, f"bit {bit} of the trailer"
        assert outcomes.count(Outcome.OK) <= 2, f"bit {bit} of a payload"
        if bit // 8 < stored_bytes:
            assert outcomes.count(Outcome.OK) == 2, "the other blocks are good"
            assert not kind.is_there(extent), "it is removed"


@pytest.mark.parametrize("kind_name", KINDS)
def test_a_bad_block_costs_none_before_it(kind_name: str) -> None:
    kind, extent = KINDS[kind_name](), extent_of(1, 8)
    kind.put(extent)
    content = kind.content(extent)
    stored_bytes = (len(content) - 4096) // 8
    for bad in range(8):
        kind.objects.put(kind.name_of(extent), flipped(content, [8 * (bad * stored_bytes + 7)]))
        for count in (8, 5, 2):
            kind.objects.put(kind.name_of(extent), flipped(content, [8 * (bad * stored_bytes + 7)]))
            outcomes = get(kind.open(), last_of(extent, count))
            if kind.codec == "none":
                wanted = [Outcome.CORRUPT if index == bad else Outcome.OK for index in range(8)]
                assert outcomes == wanted[-count:]
            else:
                assert outcomes.count(Outcome.OK) >= count - 1
