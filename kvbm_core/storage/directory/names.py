"""Names below a shared directory: folders per model and per meaning of the bytes, one file per block.

``{path}/kvbm1/{model}-{12 hex}/{fingerprint, 16 hex}-{rank}of{world}/{3 hex}/{key}-{group}.kv``. The number
in ``kvbm1`` is the record's version: what another version of kvbm writes is in a folder of its own, which
this one never looks into.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from kvbm_core.storage.disk.record import FORMAT_VERSION
from kvbm_core.types import SEQUENCE_HASH_BYTES, BlockKey, SequenceHash, block_key, group_of

TOP = f"kvbm{FORMAT_VERSION}"
FAN_DIGITS = 3
"""Of a block's name, in the name of its folder: 4096 folders, so that none has too many files."""
FINGERPRINT_BYTES = 16
MAX_SLUG_CHARS = 48
_NAMESPACE_BYTES = 6

_NAMESPACE = re.compile(rf"[a-z0-9._-]{{1,{MAX_SLUG_CHARS}}}-[0-9a-f]{{12}}", re.ASCII)
_SHARD = re.compile(r"([0-9a-f]{16})-(\d{1,5})of(\d{1,5})", re.ASCII)
_FAN = re.compile(rf"[0-9a-f]{{{FAN_DIGITS}}}", re.ASCII)
_BLOCK = re.compile(r"([0-9a-f]{64})-(0|[1-9]\d{0,2})\.kv", re.ASCII)
_TEMPORARY = re.compile(r"\.[0-9a-z-]+(\.kv)?\.[0-9a-f]{16}", re.ASCII)


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


def file_name(key: BlockKey) -> str:
    """Of a block's file."""
    return f"{key[:SEQUENCE_HASH_BYTES].hex()}-{group_of(key)}.kv"


def fan_folder(name: str) -> str:
    """The folder of a block's file, below the shard's."""
    return name[:FAN_DIGITS]


def key_in(name: str) -> BlockKey | None:
    """The key of the block with this file name; None for any other name."""
    found = _BLOCK.fullmatch(name)
    if found is None or (group := int(found[2])) > 255:
        return None
    return block_key(SequenceHash(bytes.fromhex(found[1])), group)


def temporary_name(name: str, token: str) -> str:
    """What the file ``name`` is called while it is written; ``token``: 16 hex digits of the writer's own."""
    return f".{name}.{token}"


def is_temporary(name: str) -> bool:
    """Whether it is the name of a file that is being written, or was."""
    return _TEMPORARY.fullmatch(name) is not None


def is_namespace(name: str) -> bool:
    """Whether it is the name of a model's folder."""
    return _NAMESPACE.fullmatch(name) is not None


def is_shard(name: str) -> bool:
    """Whether it is the name of a rank's folder."""
    return _SHARD.fullmatch(name) is not None


def is_fan(name: str) -> bool:
    """Whether it is the name of a folder of files."""
    return _FAN.fullmatch(name) is not None
