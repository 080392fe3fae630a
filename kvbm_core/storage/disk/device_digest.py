"""A checksum of a block's bytes that a GPU can compute with plain products and sums.

Multilinear hashing, twice, in two steps. The bytes are taken as signed 32-bit words. A sector's hash is the
sum, modulo 2**64, of its words, each times a factor of its own; a block's is the same sum over the 32-bit
halves of its sectors' hashes. All of that is done with two sets of factors: 128 bits.

The factors are odd, and as good as random. So one changed word always changes its sector's hash. Words have
32 bits, not 64, because of changes that are many: with 64 the top bits of any two words would cancel each
other (2**63 * (odd + odd) is 0). As it is, what changes more than one word escapes one set of factors with a
probability of 2**-32 at most in each step, whatever the change, and both sets with that squared.

This is no format for itself: it stands in a record's header beside the payload's xxh3_128 (see record.py).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvbm_core.native import Bytes
from kvbm_core.storage.disk.record import SECTOR_BYTES

Factors = npt.NDArray[np.int64]

SECTOR_WORDS = SECTOR_BYTES // 4
_STEP_SECTORS = 16
"""So many at a time: what is in between stays in the CPU's cache."""


@lru_cache(maxsize=1)
def sector_factors() -> Factors:
    """``[set, word]``: of the words of a sector."""
    factors = _factors("sector", SECTOR_WORDS)
    factors.flags.writeable = False
    return factors


@lru_cache(maxsize=4)
def block_factors(num_sectors: int) -> Factors:
    """``[set, half]``: of the halves of ``num_sectors`` hashes, low half first. And, in a column of its own
    at the end, what is added to the sum.
    """
    factors: Factors = np.concatenate((_factors("block", 2 * num_sectors), _factors("start", 1)), axis=1)
    factors.flags.writeable = False
    return factors


def _factors(what: str, count: int) -> Factors:
    rows = [
        np.frombuffer(hashlib.shake_256(f"kvbm device digest 1 {what} {i}".encode()).digest(8 * count), "<i8")
        for i in range(2)
    ]
    factors: Factors = np.stack(rows).astype(np.int64) | 1
    return factors


def device_digest(payload: Bytes) -> bytes:
    """Of whole sectors. ValueError for anything else."""
    if payload.ndim != 1 or not payload.nbytes or payload.nbytes % SECTOR_BYTES:
        raise ValueError(f"{payload.nbytes} bytes are no whole sectors")
    words = payload.view("<i4").reshape(-1, SECTOR_WORDS)
    num_sectors, factors = len(words), sector_factors()
    hashes = np.empty((2, num_sectors), np.int64)
    wide = np.empty((_STEP_SECTORS, SECTOR_WORDS), np.int64)
    for start in range(0, num_sectors, _STEP_SECTORS):
        some = slice(start, min(start + _STEP_SECTORS, num_sectors))
        part = wide[: some.stop - start]
        np.copyto(part, words[some])
        for i in range(2):
            np.einsum("sw,w->s", part, factors[i], out=hashes[i, some])
    halves = hashes.view("<i4").astype(np.int64)
    own = block_factors(num_sectors)
    sums = np.add.reduce(halves * own[:, :-1], axis=1) + own[:, -1]
    return bytes(sums.astype("<i8").data)
