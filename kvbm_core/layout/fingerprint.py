"""A short name for everything that two processes must agree on to exchange the bytes of a block."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from kvbm_core.tokens.hashing import encode_fields

FINGERPRINT_VERSION = 2


class LayerIdentity(NamedTuple):
    """What the bytes of one layer mean. ``order``: how they lie within its page."""

    dtype: str
    page_bytes: int
    order: str


@dataclass(frozen=True, kw_only=True)
class LayoutIdentity:
    """What the bytes of a block mean."""

    layers: tuple[LayerIdentity, ...]
    block_size_tokens: int
    kv_heads_local: int
    head_size: int
    rank: int = 0
    world_size: int = 1
    extra: tuple[tuple[str, str], ...] = ()

    def fingerprint(self) -> str:
        """32 hex digits; equal for equal identities, different for different ones (128 bits of sha256)."""
        encoded = encode_fields(
            "kvbm-layout",
            FINGERPRINT_VERSION,
            self.block_size_tokens,
            len(self.layers),
            *(field for layer in self.layers for field in layer),
            self.kv_heads_local,
            self.head_size,
            self.rank,
            self.world_size,
            len(self.extra),
            *(text for pair in self.extra for text in pair),
        )
        return hashlib.sha256(encoded).hexdigest()[:32]
