"""NVIDIA Dynamo's 64 bit hashes, for events and routers that speak them.

They name blocks on the wire only. kvbm's own keys are SequenceHashes: 64 bits are too few to hand out
another request's bytes by.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from struct import Struct, error, pack

_PAIR = Struct("<QQ")


def salt_hash(salt: str | None = None, lora_name: str | None = None) -> int:
    """The seed of a request's block hashes; an absent key is left out of the JSON that is hashed."""
    from xxhash import xxh3_64_intdigest

    pairs = {"salt": salt, "lora_name": lora_name}
    given = {name: value for name, value in pairs.items() if value is not None}
    text = json.dumps(given, separators=(",", ":"), ensure_ascii=False)
    return xxh3_64_intdigest(text.encode(), seed=0)


def block_hash(tokens: Sequence[int], salt_hash: int) -> int:
    """The hash of one block by itself. Raises ValueError for a token that is no unsigned 32 bit integer."""
    from xxhash import xxh3_64_intdigest

    try:
        raw = pack(f"<{len(tokens)}I", *tokens)
    except error as reason:
        raise ValueError(f"a token is not an unsigned 32 bit integer: {reason}") from reason
    return xxh3_64_intdigest(raw, seed=salt_hash)


def sequence_hashes(tokens: Sequence[int], block_size_tokens: int, salt_hash: int) -> list[int]:
    """One hash per full block of ``tokens``, each of the whole prefix up to and including its block."""
    from xxhash import xxh3_64_intdigest

    hashes: list[int] = []
    for start in range(0, len(tokens) - block_size_tokens + 1, block_size_tokens):
        block = block_hash(tokens[start : start + block_size_tokens], salt_hash)
        hashes.append(xxh3_64_intdigest(_PAIR.pack(hashes[-1], block), seed=salt_hash) if hashes else block)
    return hashes
