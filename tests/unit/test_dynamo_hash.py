"""NVIDIA Dynamo's hashes, against values observed on the published package (kvbm 1.6.1)."""

from __future__ import annotations

import pytest
from xxhash import xxh3_64_intdigest

from kvbm_core.tokens.dynamo_hash import block_hash, salt_hash, sequence_hashes

FIRST, SECOND = 14643705804678351452, 4945711292740353085


@pytest.mark.parametrize(
    ("salt", "lora_name", "expected"),
    [
        (None, None, 1389868326933519382),
        (None, "loraA", 14824891849260885750),
        ("saltX", "loraA", 7455317836786410870),
    ],
)
def test_salt_hash(salt: str | None, lora_name: str | None, expected: int) -> None:
    assert salt_hash(salt, lora_name) == expected


def test_an_empty_salt_is_not_an_absent_one() -> None:
    assert salt_hash("") != salt_hash(None)


def test_salts_outside_ascii_are_hashed_as_utf_8_not_as_escapes() -> None:
    assert salt_hash("é") == xxh3_64_intdigest('{"salt":"é"}'.encode(), seed=0)


def test_sequence_hashes() -> None:
    assert block_hash([1, 2, 3, 4], 1337) == FIRST
    assert sequence_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4, 1337) == [FIRST, SECOND]


@pytest.mark.parametrize("num_tokens", [0, 3, 4, 7, 8])
def test_only_full_blocks_are_hashed(num_tokens: int) -> None:
    hashes = sequence_hashes(list(range(1, num_tokens + 1)), 4, 1337)
    assert hashes == [FIRST, SECOND][: num_tokens // 4]


@pytest.mark.parametrize("token", [-1, 2**32, 1.5])
def test_a_token_that_is_no_u32_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="unsigned 32 bit"):
        block_hash([1, token], 0)
