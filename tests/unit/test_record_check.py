"""A whole record checked without its keys, as ``kvbm remote verify`` does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.extents import Extent
from kvbm_core.storage.names import Meaning
from kvbm_core.storage.remote.inspect import check_record
from kvbm_core.storage.remote.judge import BAD_BLOCK, OF_ANOTHER_SECRET, OURS, Verdict
from kvbm_core.storage.remote.names import place_of
from kvbm_core.storage.remote.records import digest_of, pack_trailer_into, trailer_in, unpack_trailer
from kvbm_core.storage.remote.secret import Secret
from kvbm_core.testing.store_contract import key_of
from tests.unit.record_stores import KINDS, OTHER_SECRET, SECRET, Kind, flipped, get

KEYS = tuple(key_of(number) for number in range(8))
EXTENTS = [Extent(1, KEYS[:1]), Extent(4, KEYS[:4]), Extent(1, (key_of(3, group=7),))]
BY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def checked(kind: Kind, content: bytes, extent: Extent, secret: Secret | None) -> Verdict:
    """``content`` under the extent's name."""
    place = place_of(kind.name_of(extent))
    assert place is not None and place.stem
    return check_record(place, memoryview(content), secret)


@BY_KIND
def test_what_was_put_is_good(kind: Callable[[], Kind]) -> None:
    own = kind()
    own.put(*EXTENTS)
    for extent in EXTENTS:
        assert checked(own, own.content(extent), extent, own.secret) is OURS
        if own.secret is None:
            assert checked(own, own.content(extent), extent, SECRET) is OURS, "no secret is needed for it"


@BY_KIND
def test_any_bit_and_any_length_that_is_wrong_is_damage(kind: Callable[[], Kind], rng: random.Random) -> None:
    own, extent = kind(), EXTENTS[1]
    own.put(extent)
    content = own.content(extent)
    for bit in rng.sample(range(8 * len(content)), 300):
        verdict = checked(own, flipped(content, [bit]), extent, own.secret)
        assert verdict.is_bad, f"bit {bit} of {8 * len(content)}: {verdict}"
    for num_bytes in [0, 1, 100, 4096, len(content) - 1, *rng.sample(range(len(content)), 30)]:
        assert checked(own, content[:num_bytes], extent, own.secret).is_bad, num_bytes
    for more in (b"\0", rng.randbytes(5000), content):
        assert checked(own, more + content, extent, own.secret).is_bad
        if more is not content:
            assert checked(own, content + more, extent, own.secret).is_bad


@BY_KIND
def test_a_record_under_another_ones_name_is_found_where_names_can_be_checked(
    kind: Callable[[], Kind],
) -> None:
    own = kind()
    own.put(*EXTENTS)
    one, _, other = EXTENTS
    verdict = checked(own, own.content(one), other, own.secret)
    assert verdict.is_bad == (own.secret is None)


@BY_KIND
def test_a_record_of_another_folder_is_left_alone(kind: Callable[[], Kind]) -> None:
    own, other = kind(), kind()
    other.meaning = Meaning("other", b"other", b"other".ljust(16))
    other.put(EXTENTS[0])
    verdict = checked(own, other.content(EXTENTS[0]), EXTENTS[0], own.secret)
    assert verdict.flaw and not verdict.is_bad


@pytest.mark.parametrize("name", ["secret", "encrypted", "zstd and encrypted"])
def test_what_was_made_with_another_secret_is_never_damage(name: str) -> None:
    own = KINDS[name]()
    own.put(*EXTENTS)
    for extent in EXTENTS:
        for secret in (None, OTHER_SECRET):
            assert checked(own, own.content(extent), extent, secret) is OF_ANOTHER_SECRET


@pytest.mark.parametrize("name", ["encrypted", "zstd", "zstd and encrypted"])
def test_blocks_that_cannot_be_decoded_are_damage_whatever_their_checksums_say(name: str) -> None:
    """Of one block, whose bytes are somebody else's and whose trailer was made for them."""
    own, extent = KINDS[name](), EXTENTS[0]
    own.put(extent)
    content = bytearray(own.content(extent))
    end = trailer_in(memoryview(content))
    trailer = unpack_trailer(end)
    assert trailer is not None
    (block,) = trailer.blocks
    content[: block.num_bytes] = bytes(block.num_bytes)
    digest = digest_of(memoryview(content)[: block.num_bytes])
    pack_trailer_into(end, trailer.fields, [block._replace(digest=digest)])
    assert checked(own, bytes(content), extent, own.secret) is BAD_BLOCK


@pytest.mark.parametrize("name", ["zstd", "zstd and encrypted"])
def test_a_block_that_takes_nothing_is_damage_and_engines_remove_its_record(name: str) -> None:
    own, extent = KINDS[name](), EXTENTS[1]
    own.put(extent)
    content = own.content(extent)
    end = memoryview(bytearray(trailer_in(memoryview(content))))
    trailer = unpack_trailer(end)
    assert trailer is not None
    nothing = [block._replace(num_bytes=0, digest=digest_of(memoryview(b""))) for block in trailer.blocks]
    kept_bytes = 0
    for num_kept, block in enumerate(trailer.blocks):
        pack_trailer_into(end, trailer.fields, [*trailer.blocks[:num_kept], *nothing[num_kept:]])
        changed = content[:kept_bytes] + bytes(end)
        assert checked(own, changed, extent, own.secret).is_bad
        own.objects.put(own.name_of(extent), changed)
        assert get(own.open(), extent) == [Outcome.CORRUPT] * 4 and not own.is_there(extent)
        kept_bytes += block.num_bytes


def test_the_last_block_is_the_one_that_the_record_is_named_by() -> None:
    own, extent = Kind(), EXTENTS[0]
    own.put(extent)
    content = bytearray(own.content(extent))
    end = trailer_in(memoryview(content))
    trailer = unpack_trailer(end)
    assert trailer is not None
    pack_trailer_into(end, trailer.fields, [trailer.blocks[0]._replace(tail=bytes(16))])
    assert checked(own, bytes(content), extent, None) is BAD_BLOCK


@pytest.mark.parametrize(
    ("change", "is_bad"),
    [
        ({"codec": 8}, False),
        ({"block_bytes": 999}, True),
        ({"block_bytes": 1 << 60, "codec": 1}, True),
        ({"num_blocks": 2}, True),
        ({"num_blocks": 0}, False),
        ({"group": 3}, True),
        ({"mark": b"short"}, True),
    ],
    ids=str,
)
def test_a_sealed_trailer_that_says_something_else_takes_no_memory(
    change: dict[str, Any], is_bad: bool
) -> None:
    """Whoever can write to a store can seal anything."""
    own, extent = Kind(), EXTENTS[0]
    own.put(extent)
    content = bytearray(own.content(extent))
    end = trailer_in(memoryview(content))
    trailer = unpack_trailer(end)
    assert trailer is not None
    blocks = trailer.blocks * change.get("num_blocks", 1)
    pack_trailer_into(end, trailer.fields._replace(**change), blocks)
    verdict = checked(own, bytes(content), extent, None)
    assert verdict.flaw and verdict.is_bad == is_bad
