"""Objects that are damaged, truncated, extended, swapped or foreign: none of their blocks is loaded."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.base import Memory
from kvbm_core.storage.extents import Extent
from kvbm_core.testing.extent_contract import extent_of, last_of
from kvbm_core.testing.memory_engine import EngineFaults, MemoryEngine
from kvbm_core.testing.store_contract import LONG_S, buffers, content_in, fill
from tests.effort import tries
from tests.unit.record_stores import (
    KINDS,
    MEANING,
    OTHER_SECRET,
    PAYLOAD_BYTES,
    SECRET,
    Kind,
    compressible,
    flipped,
    get,
)

DAMAGES = tries(200, nightly=2_000)
"""Of each of five kinds of store: 1,000."""
Damage = Callable[[Random, Kind, Extent, bytes], bytes]


def bits(rng: Random, kind: Kind, extent: Extent, content: bytes) -> bytes:
    """Of the trailer."""
    first = 8 * (len(content) - 4096)
    return flipped(content, rng.sample(range(first, 8 * len(content)), rng.randrange(1, 20)))


def zeros(rng: Random, kind: Kind, extent: Extent, content: bytes) -> bytes:
    """All over the first to the last block's bytes."""
    return bytes(len(content) - 4096) + content[-4096:]


def truncated(rng: Random, kind: Kind, extent: Extent, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def cut_in_front(rng: Random, kind: Kind, extent: Extent, content: bytes) -> bytes:
    return content[rng.randrange(1, len(content)) :]


def extended(rng: Random, kind: Kind, extent: Extent, content: bytes) -> bytes:
    more = rng.randbytes(rng.randrange(1, 9000))
    return content + more if rng.random() < 0.5 else more + content


def swapped(rng: Random, kind: Kind, extent: Extent, content: bytes) -> bytes:
    """For the right record of another extent, of this size or another one, or of another group."""
    group = rng.randrange(2)
    other = extent_of(7 + rng.randrange(2), extent.num_blocks if rng.random() < 0.7 else 2, group)
    kind.put(other)
    return kind.content(other)


def foreign(rng: Random, kind: Kind, extent: Extent, content: bytes) -> bytes:
    """For the same extent of another meaning, rank, model, encoding or secret."""
    others = [
        Kind(kind.codec, kind.secret, kind.encrypts, MEANING._replace(fingerprint=b"other".ljust(16))),
        Kind(kind.codec, kind.secret, kind.encrypts, MEANING._replace(rank=1, world=2)),
        Kind(kind.codec, kind.secret, kind.encrypts, MEANING._replace(namespace=b"other")),
        Kind("none" if kind.codec == "zstd" else "zstd", kind.secret, kind.encrypts),
        Kind(kind.codec, OTHER_SECRET, kind.encrypts),
        Kind(kind.codec, SECRET, not kind.encrypts),
    ]
    other = rng.choice(others)
    other.put(extent)
    return other.content(extent)


def spliced(rng: Random, kind: Kind, extent: Extent, content: bytes) -> bytes:
    """The blocks of one record and the trailer of another."""
    other = extent_of(9, extent.num_blocks)
    kind.put(other)
    if rng.random() < 0.5:
        return kind.content(other)[:-4096] + content[-4096:]
    return content[:-4096] + kind.content(other)[-4096:]


EVERY: list[Damage] = [bits, zeros, truncated, cut_in_front, extended, swapped, foreign, spliced]


@pytest.mark.parametrize("kind_name", KINDS)
def test_of_a_thousand_damaged_objects_none_is_loaded(kind_name: str, seed: int) -> None:
    rng = Random(f"{seed} {kind_name}")
    for _ in range(DAMAGES):
        kind, extent = KINDS[kind_name](), extent_of(1, rng.choice((1, 2, 4, 8)))
        kind.put(extent)
        damage, content = rng.choice(EVERY), kind.content(extent)
        bad = damage(rng, kind, extent, content)
        assert bad != content, damage.__name__
        for count in {1, extent.num_blocks // 2 or 1, extent.num_blocks}:
            kind.objects.put(kind.name_of(extent), bad)
            outcomes = get(kind.open(), last_of(extent, count))
            assert Outcome.OK not in outcomes, f"{damage.__name__}: {outcomes} of the last {count} blocks"
            assert set(outcomes) <= {Outcome.CORRUPT, Outcome.MISS, Outcome.INCOMPATIBLE}
            if damage is not foreign:
                assert not kind.is_there(extent), f"{damage.__name__}: it can be put anew"
            elif len(bad) == len(content):
                assert kind.is_there(extent), "somebody else's"


@pytest.mark.parametrize("kind_name", KINDS)
def test_an_engine_that_fails_in_every_way_never_brings_a_wrong_byte(kind_name: str, seed: int) -> None:
    rng = Random(f"{seed} {kind_name}")
    rates = dict.fromkeys(("fails", "loses", "claims", "flips", "truncates", "extends", "swaps"), 0.1)
    faults = EngineFaults(seed=seed, is_late=0.15, **rates)
    kind = KINDS[kind_name]()
    engine = MemoryEngine(faults, kind.objects)
    store = kind.open(engine)
    whole = [extent_of(number, size) for number in range(4) for size in (1, 4, 8)]
    kept: list[Memory] = []  # a late read may still write there
    counts = dict.fromkeys(Outcome, 0)
    for _ in range(tries(150, nightly=3_000)):
        extents = rng.sample(whole, rng.randrange(1, 5))
        if rng.random() < 0.4:
            ends = store.put_extents(extents, [_filled(extent) for extent in extents], deadline_s=LONG_S)
        else:
            parts = [last_of(extent, rng.randrange(extent.num_blocks) + 1) for extent in extents]
            targets: list[list[Memory]] = [[*buffers(len(part.keys), PAYLOAD_BYTES)] for part in parts]
            kept += [target for own in targets for target in own]
            outcomes = store.get_extents(parts, targets, deadline_s=LONG_S)
            ends = [end for own in outcomes for end in own]
            for part, own, found in zip(parts, targets, outcomes, strict=True):
                for key, target, end in zip(part.keys, own, found, strict=True):
                    is_right = content_in(target) == compressible(key, PAYLOAD_BYTES)
                    assert end is not Outcome.OK or is_right, "wrong bytes"
        for end in ends:
            counts[end] += 1
    assert counts[Outcome.OK] > 100 and counts[Outcome.CORRUPT] > 10, counts
    assert counts[Outcome.TIMED_OUT] and counts[Outcome.IO_ERROR] and not counts[Outcome.BUSY], counts
    engine.land()
    store.close()


def _filled(extent: Extent) -> list[Memory]:
    memory = buffers(len(extent.keys), PAYLOAD_BYTES)
    for key, own in zip(extent.keys, memory, strict=True):
        fill(own, compressible(key, PAYLOAD_BYTES))
    return [*memory]
