"""Blocks of which every byte says whose it is: payloads made of a key's number and a version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from random import Random

import numpy as np

from kvbm_core.errors import Outcome
from kvbm_core.storage.base import BlockStore
from kvbm_core.testing.file_io_contract import memory_of
from kvbm_core.testing.store_contract import LONG_S, key_of
from kvbm_core.types import BlockKey

STAMP_BYTES = 16
Words = np.ndarray[tuple[int], np.dtype[np.uint64]]


@lru_cache(maxsize=8)
def _noise(num_words: int) -> Words:
    return np.frombuffer(Random(7).randbytes(8 * num_words), np.uint64)


def payload_of(number: int, version: int, num_bytes: int) -> bytes:
    """The stamp in front can be read; after it no eight bytes are those of another number or version."""
    word = np.frombuffer(Random(number << 64 | version).randbytes(8), np.uint64)
    stamp = number.to_bytes(8, "little") + version.to_bytes(8, "little")
    body: bytes = (_noise(-(-num_bytes // 8)) ^ word).tobytes()
    return (stamp + body)[:num_bytes]


def version_in(payload: bytes | memoryview) -> int:
    """What the stamp says."""
    return int.from_bytes(payload[8:STAMP_BYTES], "little")


def aligned(payload: bytes) -> memoryview:
    """A copy that the disk can read as it is."""
    memory = memory_of(len(payload)).data
    memory[:] = payload
    return memory


def put_versions(
    store: BlockStore,
    versions: Mapping[int, int],
    num_bytes: int,
    on_ready: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Puts key number -> version in one call, in place of what is there; ``on_ready`` just before the
    call.
    """
    keys: list[BlockKey] = [key_of(number) for number in versions]
    store.remove_many(keys, deadline_s=LONG_S)
    payloads = [aligned(payload_of(number, version, num_bytes)) for number, version in versions.items()]
    on_ready()
    return store.put_many(keys, payloads, deadline_s=LONG_S)


def read_all(store: BlockStore, num_keys: int, num_bytes: int) -> tuple[list[Outcome], list[int | None]]:
    """Gets key numbers 0 .. num_keys-1: outcomes, and the version of each that is OK.

    AssertionError for an OK whose bytes are not all those of one version of that very key.
    """
    keys = [key_of(number) for number in range(num_keys)]
    memory = memory_of(num_keys * -(-num_bytes // 4096) * 4096).data
    step_bytes = len(memory) // num_keys
    targets = [memory[start : start + num_bytes] for start in range(0, len(memory), step_bytes)]
    outcomes = store.get_many(keys, targets, deadline_s=LONG_S)
    versions: list[int | None] = [None] * num_keys
    for number, (outcome, target) in enumerate(zip(outcomes, targets, strict=True)):
        if outcome is Outcome.OK:
            versions[number] = version = version_in(target)
            assert target == payload_of(number, version, num_bytes), f"wrong bytes for key {number}"
    return outcomes, versions
