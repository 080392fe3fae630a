"""How the blocks of a record are stored: as they are, compressed (zstd), encrypted (AES-256-GCM), or both.

With the codec fp8 they are head shards whose numbers were made smaller before (head_copies.py); a record only
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbm_core.errors import ConfigError
from kvbm_core.layout.heads import FP8, NO_CODEC
from kvbm_core.storage.base import Memory, plain_parts
from kvbm_core.storage.remote.records import RecordFields, pack_fields
from kvbm_core.storage.remote.secret import Secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PLAIN, COMPRESSED, ENCRYPTED, SMALLER = 0, 1, 2, 4
"""Bits of a record's ``codec``."""
CODECS = {NO_CODEC: PLAIN, "zstd": COMPRESSED, FP8: SMALLER}
ZSTD_LEVEL = 1
_TAG_BYTES = 16
_NONCE_BYTES = 12
_KEY_BYTES = 32


class Encoding:
    """``codec``: one of CODECS. With a ``secret`` blocks are encrypted. Safe to use from any thread.

    ConfigError, one line, if the package that is needed for it is not there.
    """

    def __init__(self, codec: str = NO_CODEC, secret: Secret | None = None) -> None:
        self._secret = secret
        self.number = CODECS[codec] | (ENCRYPTED if secret else PLAIN)
        if self.number & COMPRESSED:
            _need("zstandard", "zstd", "KVBM_REMOTE_CODEC", codec)
        if self.number & ENCRYPTED:
            _need("cryptography.hazmat.primitives.ciphers.aead", "crypto", "KVBM_REMOTE_ENCRYPT", 1)

    @property
    def is_plain(self) -> bool:
        """Whether blocks are stored as they are given."""
        return not self.number & (COMPRESSED | ENCRYPTED)

    @property
    def is_encrypted(self) -> bool:
        """Whether nobody without the secret can read them."""
        return bool(self.number & ENCRYPTED)

    @property
    def has_one_size(self) -> bool:
        """Whether each block takes exactly ``stored_bytes``."""
        return not self.number & COMPRESSED

    def stored_bytes(self, block_bytes: int) -> int:
        """What a block takes at most."""
        return block_bytes + (_TAG_BYTES if self.number & ENCRYPTED else 0)

    def coder(self, fields: RecordFields) -> BlockCoder:
        """For the blocks of the record with these fields."""
        packed = pack_fields(fields)
        cipher = None if self._secret is None else _cipher(self._secret, fields.salt, packed)
        return BlockCoder(fields.block_bytes, packed, cipher, compresses=bool(self.number & COMPRESSED))


def codec_of(number: int) -> str | None:
    """Of a record's ``codec``; None if this version knows no such."""
    return next((name for name, bit in CODECS.items() if bit == number & ~ENCRYPTED), None)


def words_of(number: int) -> str:
    """Of a record's ``codec``, for people."""
    return f"{codec_of(number) or 'of a newer version'}{', encrypted' if number & ENCRYPTED else ''}"


class BlockCoder:
    """Of one record, in one thread.

    Each record has a key of its own, made (HKDF-SHA256) of the secret, the record's random salt and its
    fields, which the last block's key, and so the request's salt, is part of. The number of a block is its
    nonce, and the fields are authenticated with it: a block is good in its place in its record alone.
    """

    def __init__(self, block_bytes: int, fields: bytes, cipher: AESGCM | None, *, compresses: bool) -> None:
        self._block_bytes = block_bytes
        self._fields = fields
        self._cipher = cipher
        self._compresses = compresses

    def encode(self, index: int, payload: Memory, out: memoryview) -> int:
        """Block ``index`` into the beginning of ``out``, which has room for ``stored_bytes``: the bytes it
        takes.
        """
        data = _joined(payload)
        if self._compresses:
            data = self._compressed(data)
        if self._cipher is None:
            out[: data.nbytes] = data
            return data.nbytes
        size = data.nbytes + _TAG_BYTES
        self._cipher.encrypt_into(_nonce(index), data, self._fields, out[:size])
        return size

    def decode(self, index: int, stored: memoryview, target: Memory) -> bool:
        """Fills ``target``. False, and garbage in it, if that is not what ``encode`` made of a block."""
        parts = plain_parts(target)
        data = stored
        if self._cipher is not None:
            room = parts[0] if len(parts) == 1 and stored.nbytes - _TAG_BYTES == parts[0].nbytes else None
            opened = self._opened(self._cipher, index, stored, room)
            if opened is None or opened is room:
                return opened is not None
            data = opened
        if self._compresses and data.nbytes < self._block_bytes:
            inflated = self._inflated(data)
            if inflated is None:
                return False
            data = inflated
        if data.nbytes != self._block_bytes:
            return False
        _spread(data, parts)
        return True

    def _opened(
        self, cipher: AESGCM, index: int, stored: memoryview, room: memoryview | None
    ) -> memoryview | None:
        from cryptography.exceptions import InvalidTag

        if not _TAG_BYTES < stored.nbytes <= self._block_bytes + _TAG_BYTES:
            return None
        if room is None:
            room = memoryview(bytearray(stored.nbytes - _TAG_BYTES))
        try:
            cipher.decrypt_into(_nonce(index), stored, self._fields, room)
        except InvalidTag:
            return None
        return room

    def _compressed(self, data: memoryview) -> memoryview:
        """Or as it is, if that is no smaller."""
        import zstandard

        smaller = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)
        return memoryview(smaller) if len(smaller) < data.nbytes else data

    def _inflated(self, data: memoryview) -> memoryview | None:
        import zstandard

        try:
            if zstandard.frame_content_size(data) != self._block_bytes:  # or it may need any memory
                return None
            return memoryview(zstandard.ZstdDecompressor().decompress(data))
        except zstandard.ZstdError:
            return None


def _need(module: str, extra: str, setting: str, value: object) -> None:
    try:
        found = __import__(module, fromlist=["AESGCM"])
    except ImportError:
        found = None
    is_old = extra == "crypto" and not hasattr(getattr(found, "AESGCM", None), "encrypt_into")
    if found is None or is_old:
        package = module.partition(".")[0]
        remedy = f"needs a newer {package}" if found is not None else f"needs the package {package}"
        raise ConfigError(setting, value, f"{remedy}; install kvbm with the extra {extra}")


def _cipher(secret: Secret, salt: bytes, fields: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    key = HKDF(SHA256(), _KEY_BYTES, salt, fields).derive(secret.digest("encryption"))
    return AESGCM(key)


def _nonce(index: int) -> bytes:
    return index.to_bytes(_NONCE_BYTES, "little")


def _joined(payload: Memory) -> memoryview:
    parts = plain_parts(payload)
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _spread(data: memoryview, parts: Sequence[memoryview]) -> None:
    at = 0
    for part in parts:
        part[:] = data[at : at + part.nbytes]
        at += part.nbytes
