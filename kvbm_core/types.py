"""Words that everything else is built from (see docs/architecture.md, "Words")."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NewType

SequenceHash = NewType("SequenceHash", bytes)
"""32 bytes: digest of the whole prefix up to and including a block, under a KeyNamespace."""

BlockKey = NewType("BlockKey", bytes)
"""SequenceHash, followed for every KV cache group of the engine but the first by one byte, the group's
number.
"""

SEQUENCE_HASH_BYTES = 32
MAX_GROUPS = 256


def block_key(sequence_hash: SequenceHash, group: int) -> BlockKey:
    """The registry's key of a block of ``group``. Raises OverflowError if ``group`` needs more than a
    byte.
    """
    # Most models have one group: the keys of a chain are then its hashes, without a copy.
    return BlockKey(sequence_hash + group.to_bytes(1, "big") if group else sequence_hash)


def is_block_key(key: bytes) -> bool:
    """Whether a registry takes it; a record may hold another one."""
    return len(key) == SEQUENCE_HASH_BYTES or (len(key) == SEQUENCE_HASH_BYTES + 1 and key[-1] != 0)


def group_of(key: BlockKey) -> int:
    """The KV cache group in a key."""
    return key[SEQUENCE_HASH_BYTES] if len(key) > SEQUENCE_HASH_BYTES else 0


class Tier(IntEnum):
    """Where a block can be, fastest first (G1 to G4)."""

    DEVICE = 1
    HOST = 2
    DISK = 3
    REMOTE = 4


class Direction(str, Enum):
    """Which way a TransferPlan moves blocks."""

    OFFLOAD = "offload"
    ONBOARD = "onboard"

    def __str__(self) -> str:
        return self.value
