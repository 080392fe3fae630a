"""What a block of a cache is, and the names of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from kvbm_core.errors import ConfigError
from kvbm_core.tokens.chain import TokenChain
from kvbm_core.tokens.hashing import encode_fields, hash_block
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.types import BlockKey

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Names: TypeAlias = "Sequence[int] | Sequence[bytes] | Sequence[str] | npt.NDArray[np.integer[Any]]"
"""Tokens (each from 0 to 2**32 - 1; every full block of them has a name), or keys that the caller has
made up, one for each block."""

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
}
"""NumPy's and torch's own names."""
LAYOUT = "library/1"


@dataclass(frozen=True)
class BlockSpec:
    """What one block is. Two caches share blocks only if all of this is the same.

    ``model``: a name that stands for these weights; name another one, or another ``revision``, when they
    change. ``shape``: of one block, such as ``(layers, 2, tokens, heads, head_size)``; kvbm does not look
    inside. ``dtype``: of its numbers, as NumPy and torch call it: "float16", "bfloat16", "uint8".
    ``tokens``: how many tokens a block stands for. ``layout``: whatever else makes the bytes of two blocks
    mean different things, such as the order of the axes or the rank.

    ConfigError, one line, for what cannot be.
    """

    model: str
    shape: tuple[int, ...]
    dtype: str
    tokens: int
    revision: str = ""
    layout: str = ""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model", repr(self.model), "give the weights a name")
        shape = tuple(self.shape)
        if not shape or not all(isinstance(size, int) and size > 0 for size in shape):
            raise ConfigError("shape", self.shape, "write the sizes of one block, each at least 1")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError("dtype", repr(self.dtype), f"is not known; there are {', '.join(ITEM_BYTES)}")
        if not isinstance(self.tokens, int) or self.tokens < 1:
            raise ConfigError("tokens", self.tokens, "a block stands for at least one token")
        object.__setattr__(self, "shape", shape)

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def namespace(self) -> KeyNamespace:
        """What all names of blocks begin with."""
        layout = encode_fields(LAYOUT, self.layout, *self.shape).hex()
        return KeyNamespace(self.model, self.revision, self.dtype, layout, self.tokens)

    def keys(self, names: Names, salt: str | None) -> list[BlockKey]:
        """The keys of the blocks that ``names`` stand for. TypeError, ValueError."""
        if isinstance(names, bytes | str):
            raise TypeError("kvbm: one key is not a list of keys; write [key]")
        items: list[Any] = names.tolist() if hasattr(names, "tolist") else list(names)
        root = self.namespace.with_request(adapter="", salt=salt).root()
        if items and isinstance(items[0], bytes | str):
            if not all(isinstance(item, bytes | str) for item in items):
                raise TypeError("kvbm: keys and tokens are mixed; pass one or the other")
            keys = [BlockKey(hash_block(root, b"", encode_fields("key", item))) for item in items]
            if len(set(keys)) < len(keys):
                raise ValueError("kvbm: a key is there twice; pass each one once")
            return keys
        chain = TokenChain(root, self.tokens)
        try:
            chain.extend(items)
        except ValueError as error:
            raise ValueError(f"kvbm: {error}; pass a flat list of tokens, or of keys") from None
        return [BlockKey(one) for one in chain.hashes]
