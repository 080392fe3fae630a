"""The digests that name blocks: SHA-256 over encodings that no two different inputs share.

The formats are versioned by their tags. A change to either makes every stored block a miss, so the golden
vectors in the tests have to change with it.
"""

from __future__ import annotations

import hashlib
from struct import Struct

from kvbm_core.types import SEQUENCE_HASH_BYTES, SequenceHash

_BLOCK_TAG = b"kvbm/b1\0"
_LENGTHS = Struct("<II")
_FIELD_LENGTH = Struct("<Q")


def block_header(tokens_nbytes: int, extra_nbytes: int = 0) -> bytes:
    """What the digest of a block with so many bytes of tokens and extra begins with."""
    return _BLOCK_TAG + _LENGTHS.pack(tokens_nbytes, extra_nbytes)


def hash_block(parent: SequenceHash, tokens_le_u32: bytes, extra: bytes = b"") -> SequenceHash:
    """The SequenceHash of the block that follows ``parent`` (a block, or a namespace's root).

    ``extra`` is what the block's bytes depend on besides its tokens (see ``encode_fields``); both lengths are
    part of the digest, so tokens and extra cannot pass for each other. Raises ValueError for a parent that is
    no SequenceHash or for tokens that are not whole 32 bit numbers.
    """
    if len(parent) != SEQUENCE_HASH_BYTES:
        raise ValueError(f"a parent has {SEQUENCE_HASH_BYTES} bytes, not {len(parent)}")
    if len(tokens_le_u32) % 4:
        raise ValueError(f"{len(tokens_le_u32)} bytes are not whole 32 bit tokens")
    header = block_header(len(tokens_le_u32), len(extra))
    return SequenceHash(hashlib.sha256(header + parent + tokens_le_u32 + extra).digest())


def encode_fields(*fields: bytes | str | int | None) -> bytes:
    """Fields as bytes, injectively: the type, value and order of all fields can be told from the result.

    Strings are not normalised; a lone surrogate, which a request's JSON may hold, is a character like any
    other. Raises TypeError for any other type.
    """
    return b"".join(_encode_field(field) for field in fields)


def _encode_field(field: bytes | str | int | None) -> bytes:
    if field is None:
        tag, payload = b"n", b""
    elif isinstance(field, bytes):
        tag, payload = b"b", field
    elif isinstance(field, str):
        tag, payload = b"s", field.encode("utf-8", "surrogatepass")
    elif isinstance(field, int):
        tag, payload = b"i", b"%d" % field
    else:
        raise TypeError(f"a field is bytes, str, int or None, not {type(field).__name__}")
    return tag + _FIELD_LENGTH.pack(len(payload)) + payload
