"""The hash chain of one request."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256

from kvbm_core.native import native
from kvbm_core.tokens.hashing import block_header, hash_block
from kvbm_core.types import SEQUENCE_HASH_BYTES, SequenceHash


class TokenChain:
    """SequenceHashes of the full blocks of one request; grows with the request, never changes what it has.

    ``extra_of_block(i)`` is what block i depends on besides its tokens, b"" for nothing. One thread only.
    """

    def __init__(
        self,
        root: SequenceHash,
        block_size_tokens: int,
        extra_of_block: Callable[[int], bytes] | None = None,
    ) -> None:
        if len(root) != SEQUENCE_HASH_BYTES:
            raise ValueError(f"a root has {SEQUENCE_HASH_BYTES} bytes, not {len(root)}")
        if block_size_tokens < 1:
            raise ValueError(f"a block has at least one token, not {block_size_tokens}")
        self.hashes: list[SequenceHash] = []
        self.root = root
        self._block_size_tokens = block_size_tokens
        self._extra_of_block = extra_of_block
        self._header = block_header(4 * block_size_tokens)

    def extend(self, tokens: Sequence[int], total_tokens: int | None = None) -> None:
        """Adds the hashes of blocks that have become full.

        ``tokens`` is the whole sequence so far; only its first ``total_tokens`` count, all of it by default.
        Blocks hashed before are not looked at again. Raises ValueError, and adds nothing, for a token that is
        no unsigned 32 bit integer.
        """
        size_tokens = self._block_size_tokens
        if total_tokens is None or total_tokens > len(tokens):
            total_tokens = len(tokens)
        first_block, end_block = len(self.hashes), total_tokens // size_tokens
        if end_block > first_block:
            self._append(_le_u32(tokens[first_block * size_tokens : end_block * size_tokens]))

    def _append(self, raw: bytes) -> None:
        step = 4 * self._block_size_tokens
        parent = self.hashes[-1] if self.hashes else self.root
        if self._extra_of_block is None:
            self.hashes += _chain(parent, self._header, raw, step)
            return
        for start in range(0, len(raw), step):
            parent = hash_block(parent, raw[start : start + step], self._extra_of_block(len(self.hashes)))
            self.hashes.append(parent)


def chain_in_python(parent: bytes, header: bytes, tokens: bytes, step: int) -> list[SequenceHash]:
    """``hash_block`` for each ``step`` bytes of ``tokens``, without its checks; see Native.chain."""
    hashes: list[SequenceHash] = []
    for start in range(0, len(tokens), step):
        parent = sha256(header + parent + tokens[start : start + step]).digest()
        hashes.append(SequenceHash(parent))
    return hashes


def pack_in_python(tokens: Sequence[int]) -> bytes:
    """See Native.pack_u32. array: three times faster than numpy on a list of ints, and it refuses what does
    not fit.
    """
    packed = array("I", list(tokens))
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


_chain = chain_in_python if native is None else native.chain
_pack = pack_in_python if native is None else native.pack_u32


def _le_u32(tokens: Sequence[int]) -> bytes:
    try:
        return _pack(tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a token is not an unsigned 32 bit integer: {error}") from error
