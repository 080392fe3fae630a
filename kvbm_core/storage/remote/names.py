"""Names of records: ``kvbm2/{model}-{12 hex}/{fingerprint, 16 hex}-{rank}of{world}/{3 hex}/{name}``.

The folders are those of every shared store (see storage/names.py). The name is ``{key}-{group}x{blocks}``:
the key and the group of the extent's last block, and the number of its blocks. With a secret, name and
fingerprint are digests that nobody can make without it. Then a listing tells nothing about prompts, and
engines with different secrets share nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from kvbm_core.native import native
from kvbm_core.storage.names import FINGERPRINT_BYTES, Meaning, fan_folder, is_namespace, is_shard
from kvbm_core.storage.remote.records import RECORD_VERSION, SECRET_ID_BYTES
from kvbm_core.storage.remote.secret import Secret
from kvbm_core.types import SEQUENCE_HASH_BYTES, BlockKey, SequenceHash, block_key, group_of

TOP = f"kvbm{RECORD_VERSION}"
BESIDE = ".renewed"
"""Ends the name of a copy that an engine makes of a record for a moment, to renew the record."""

_NAME = re.compile(r"([0-9a-f]{64})-(0|[1-9]\d{0,2})x1", re.ASCII)
_ANY_NAME = re.compile(r"[0-9a-f]{64}(?:-(?:0|[1-9]\d{0,2})x([1-9]\d{0,2}))?", re.ASCII)


class Place(NamedTuple):
    """A name, taken apart. ``stem``: its last part; empty if kvbm makes no such names. ``num_blocks``: of the
    record; None if the name was made with a secret, and does not tell. ``is_beside``: see BESIDE.
    """

    namespace: str
    shard: str = ""
    stem: str = ""
    num_blocks: int | None = None
    is_beside: bool = False


def place_of(name: str) -> Place | None:
    """None for a name that is in no model's folder."""
    top, _, rest = name.partition("/")
    namespace, _, rest = rest.partition("/")
    if top != TOP or not is_namespace(namespace):
        return None
    shard, _, rest = rest.partition("/")
    if not is_shard(shard):
        return Place(namespace)
    fan, _, stem = rest.partition("/")
    is_beside = stem.endswith(BESIDE)
    found = _ANY_NAME.fullmatch(stem.removesuffix(BESIDE))
    if found is None or fan != fan_folder(stem):
        return Place(namespace, shard)
    num_blocks = int(found[1]) if found[1] else None
    return Place(namespace, shard, found[0], num_blocks, is_beside)


def secret_id_of(secret: Secret | None) -> bytes:
    """What records have to tell which secret made them; zeros for none."""
    return bytes(SECRET_ID_BYTES) if secret is None else secret.digest("id")[:SECRET_ID_BYTES]


def plain_name(mark: bytes, group: int, num_blocks: int) -> str:
    """The last part of a record's name where there is no secret. ``mark``: the last block's key."""
    return f"{mark[:SEQUENCE_HASH_BYTES].hex()}-{group}x{num_blocks}"


def plain_names(last_keys: Sequence[BlockKey], folder: str, num_blocks: int) -> list[str]:
    """The names in ``folder``, which ends with "/", of extents of ``num_blocks`` blocks each, where there is
    no secret.
    """
    stems = (plain_name(key, group_of(key), num_blocks) for key in last_keys)
    return [f"{folder}{fan_folder(stem)}/{stem}" for stem in stems]


class RecordNames:
    """Names of one rank's records of one model."""

    def __init__(self, meaning: Meaning, secret: Secret | None = None) -> None:
        self._secret = secret
        self.secret_id = secret_id_of(secret)
        if secret is not None:
            fingerprint = secret.digest("fingerprint", meaning.fingerprint)
            meaning = meaning._replace(fingerprint=fingerprint[:FINGERPRINT_BYTES])
        self.fingerprint = meaning.fingerprint
        self.life = meaning.life
        self.folder = f"{TOP}/{meaning.namespace_folder}/{meaning.shard_folder}/"

    def name_of(self, last_key: BlockKey, num_blocks: int) -> str:
        """The name of the extent of ``num_blocks`` blocks that ends with ``last_key``."""
        return self.names_of((last_key,), num_blocks)[0]

    def names_of(self, last_keys: Sequence[BlockKey], num_blocks: int) -> list[str]:
        """The names of extents of ``num_blocks`` blocks each, by their last keys."""
        if self._secret is None:
            make = plain_names if native is None else native.record_names
            return make(last_keys, self.folder, num_blocks)
        names = (plain_name(key, group_of(key), num_blocks) for key in last_keys)
        stems = [self._secret.digest("name", self.life, name.encode()).hex() for name in names]
        return [f"{self.folder}{fan_folder(stem)}/{stem}" for stem in stems]

    def mark_of(self, key: BlockKey) -> bytes:
        """What a record has in place of a key."""
        return bytes(key) if self._secret is None else self._secret.digest("key", self.life, key)

    def key_in(self, name: str) -> BlockKey | None:
        """The key of the block, if this is the name of a record of one block without a secret; else None."""
        found = _NAME.fullmatch(name.rpartition("/")[2])
        if found is None or (group := int(found[2])) > 255:
            return None
        return block_key(SequenceHash(bytes.fromhex(found[1])), group)
