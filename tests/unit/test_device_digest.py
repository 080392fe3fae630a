"""The checksum that a device can compute: one definition, three ways to compute it, and what it must see."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from kvbm_core.layout.view import BlockView, Segment
from kvbm_core.storage.disk.device_digest import (
    SECTOR_WORDS,
    block_factors,
    device_digest,
    sector_factors,
)
from kvbm_core.storage.disk.record import NO_DEVICE_DIGEST, SECTOR_BYTES
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.movers.device_stage import DeviceStage

SIZES = (1, 2, 15, 16, 17, 64)
"""In sectors: some are handled together, and some remain."""


def seeded(seed: int) -> random.Random:
    print(f"seed {seed}")
    return random.Random(seed)


def digest_of(payload: bytes) -> bytes:
    return device_digest(np.frombuffer(payload, np.uint8))


def defined(payload: bytes) -> bytes:
    """As the module's text says it, with Python's integers."""

    def factors(what: str, i: int, count: int) -> list[int]:
        raw = hashlib.shake_256(f"kvbm device digest 1 {what} {i}".encode()).digest(8 * count)
        return [int.from_bytes(raw[8 * n : 8 * n + 8], "little") | 1 for n in range(count)]

    def words(content: bytes) -> list[int]:
        return [int.from_bytes(content[n : n + 4], "little", signed=True) for n in range(0, len(content), 4)]

    result = b""
    for i in range(2):
        own, hashes = factors("sector", i, SECTOR_WORDS), b""
        for at in range(0, len(payload), SECTOR_BYTES):
            pairs = zip(words(payload[at : at + SECTOR_BYTES]), own, strict=True)
            hashes += (sum(word * factor for word, factor in pairs) % 2**64).to_bytes(8, "little")
        halves = words(hashes)
        pairs = zip(halves, factors("block", i, len(halves)), strict=True)
        total = sum(half * factor for half, factor in pairs) + factors("start", i, 1)[0]
        result += (total % 2**64).to_bytes(8, "little")
    return result


def stage_for(num_sectors: int) -> DeviceStage:
    """Of blocks of so many sectors, with four places."""
    nbytes = num_sectors * SECTOR_BYTES
    storage = np.zeros(2 * nbytes, np.uint8)
    memory = DeviceMemory((BlockView(2, (Segment(0, 0, nbytes, nbytes),)),), [storage])
    return DeviceStage(memory, nbytes, 4 * (nbytes + SECTOR_BYTES))


@pytest.mark.parametrize("num_sectors", SIZES)
def test_all_ways_give_what_the_definition_says(num_sectors: int) -> None:
    rng = seeded(num_sectors)
    payloads = [
        rng.randbytes(num_sectors * SECTOR_BYTES),
        bytes(num_sectors * SECTOR_BYTES),
        b"\xff" * (num_sectors * SECTOR_BYTES),
    ]
    stage = stage_for(num_sectors)
    with stage.bound():
        places = [stage.take() for _ in range(4)][::-1]
        headers = [rng.randbytes(SECTOR_BYTES) for _ in payloads]
        for place, header, payload in zip(places, headers, payloads, strict=False):
            start = place - stage.address
            stage.staged_bytes[start : start + stage.place_bytes].numpy()[:] = list(header + payload)
        looked = stage.look(places[:3])
    for payload, header, (sector, digest) in zip(payloads, headers, looked, strict=True):
        assert digest == digest_of(payload) == defined(payload) != NO_DEVICE_DIGEST
        assert sector == header


def test_what_stands_on_disks_stays_what_it_is() -> None:
    """Another digest would make a miss of every record that was written before."""
    payload = b"".join(hashlib.sha256(n.to_bytes(4, "little")).digest() for n in range(384))
    assert digest_of(payload).hex() == "8c55099ab1ec3de5683f3c2a7e51725c"


def test_only_whole_sectors_have_one() -> None:
    for wrong in (0, 1, SECTOR_BYTES - 1, SECTOR_BYTES + 4):
        with pytest.raises(ValueError, match="no whole sectors"):
            digest_of(bytes(wrong))
    with pytest.raises(ValueError, match="no whole sectors"):
        device_digest(np.zeros((2, SECTOR_BYTES), np.uint8))


@pytest.mark.parametrize("seed", range(3))
def test_no_small_change_goes_unseen(seed: int) -> None:
    """Bits, words and sectors: changed, exchanged, moved, and the ones that cancel out in weaker sums."""
    rng = seeded(seed)
    whole = rng.randbytes(5 * SECTOR_BYTES)
    seen = {digest_of(whole): whole}

    def check(changed: bytes, what: str) -> None:
        assert seen.setdefault(digest_of(changed), changed) == changed, what

    for bit in rng.sample(range(8 * len(whole)), 600):
        check(flipped(whole, bit), f"bit {bit}")
    for unit in (1, 2, 4, 8, 64, SECTOR_BYTES):
        for _ in range(60):
            first, second = sorted(rng.sample(range(len(whole) // unit), 2))
            check(exchanged(whole, first * unit, second * unit, unit), f"{unit} {first} {second}")
    for _ in range(400):  # the top bits of two words
        first, second = rng.sample(range(len(whole) // 4), 2)
        check(flipped(flipped(whole, 32 * first + 31), 32 * second + 31), f"tops {first} {second}")
    for at in range(0, len(whole), SECTOR_BYTES):  # a write that was torn
        check(whole[:at] + bytes(len(whole) - at), f"zeros from {at}")
        check(bytes(at) + whole[at:], f"zeros up to {at}")
        check(whole[at:] + whole[:at], f"turned by {at}")
    assert len(seen) > 1_000


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def exchanged(content: bytes, first: int, second: int, unit: int) -> bytes:
    changed = bytearray(content)
    changed[first : first + unit], changed[second : second + unit] = (
        content[second : second + unit],
        content[first : first + unit],
    )
    return bytes(changed)


@pytest.mark.parametrize("num_sectors", [1, 512, 4096])
def test_no_two_words_can_change_in_a_way_that_both_sets_cancel(num_sectors: int) -> None:
    """For whatever bit, 0 to 31, is flipped in two words: with factors a and b the sum changes by 2**bit
    times a + b or a - b, which is 0 modulo 2**64 only if their low 33 bits, or more, are alike or opposite.
    """
    for factors in (sector_factors(), block_factors(num_sectors)[:, :-1]):
        low = factors.astype(np.uint64) & np.uint64(2**33 - 1)
        negative = (np.uint64(2**33) - low) & np.uint64(2**33 - 1)
        both = np.concatenate((low, negative), axis=1)
        pairs = {(int(a), int(b)) for a, b in both.T}
        assert len(pairs) == both.shape[1], "two words have factors that are alike, or opposite, in both sets"
        assert (factors & 1).all(), "and a word that changes alone always changes the sum"


def test_factors_are_not_changed_by_mistake() -> None:
    for factors in (sector_factors(), block_factors(3)):
        with pytest.raises(ValueError, match="read-only"):
            factors[0, 0] = 1
