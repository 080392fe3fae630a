"""Names in a store that machines share, as far as all kinds of store have the same.

There is a folder per model. In it, each rank has a folder, which holds 4096 folders of blocks or records. The
name of a block or a record differs: see directory/names.py and remote/names.py.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

FAN_DIGITS = 3
"""Of a block's or a record's name, in its folder's name: 4096 folders, so that none has too many files."""
FINGERPRINT_BYTES = 16
MAX_SLUG_CHARS = 48
_NAMESPACE_BYTES = 6

_NAMESPACE = re.compile(rf"[a-z0-9._-]{{1,{MAX_SLUG_CHARS}}}-[0-9a-f]{{12}}", re.ASCII)
_SHARD = re.compile(r"([0-9a-f]{16})-(\d{1,5})of(\d{1,5})", re.ASCII)
_FAN = re.compile(rf"[0-9a-f]{{{FAN_DIGITS}}}", re.ASCII)


class ObjectInfo(NamedTuple):
    """What a listing says of a name. ``changed_s``: when the object was written or last renewed, in seconds
    since 1970.
    """

    name: str
    num_bytes: int
    changed_s: float


class Meaning(NamedTuple):
    """What tells blocks of one rank of one model from all others.

    ``model``: readable, for the folder's name. ``namespace``: of what keys depend on besides tokens, as many
    bytes as you like. ``fingerprint``: 16 bytes, of what the bytes of a block mean.
    """

    model: str
    namespace: bytes
    fingerprint: bytes
    rank: int = 0
    world: int = 1

    @property
    def namespace_folder(self) -> str:
        """The folder of all ranks, which is bounded in size as a whole."""
        slug = re.sub(r"[^a-z0-9._-]+", "-", self.model.lower())[-MAX_SLUG_CHARS:].strip(".-") or "model"
        digest = hashlib.sha256(b"kvbm namespace\0" + self.namespace).hexdigest()
        return f"{slug}-{digest[: 2 * _NAMESPACE_BYTES]}"

    @property
    def shard_folder(self) -> str:
        """This rank's folder in it."""
        return f"{self.fingerprint.hex()[:16]}-{self.rank}of{self.world}"

    @property
    def life(self) -> bytes:
        """See life_of."""
        return life_of(self.namespace_folder, self.shard_folder)


def life_of(namespace_folder: str, shard_folder: str) -> bytes:
    """What records of this folder have in place of a block file's life: one that was put into another
    rank's or model's folder does not count there.
    """
    return hashlib.sha256(f"kvbm directory\0{namespace_folder}/{shard_folder}".encode()).digest()[:16]


def fan_folder(name: str) -> str:
    """The folder of a block's file or of a record, below the rank's."""
    return name[:FAN_DIGITS]


def is_namespace(name: str) -> bool:
    """Whether it is the name of a model's folder."""
    return _NAMESPACE.fullmatch(name) is not None


def is_shard(name: str) -> bool:
    """Whether it is the name of a rank's folder."""
    return _SHARD.fullmatch(name) is not None


def is_fan(name: str) -> bool:
    """Whether it is the name of a folder of files."""
    return _FAN.fullmatch(name) is not None
