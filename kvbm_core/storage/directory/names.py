"""Names below a shared directory: the folders of every shared store (see storage/names.py), a file per block.

``{path}/kvbm1/{model}-{12 hex}/{fingerprint, 16 hex}-{rank}of{world}/{3 hex}/{key}-{group}.kv``. The number
in ``kvbm1`` is the record's version: what another version of kvbm writes is in a folder of its own, which
this one never looks into.
"""

from __future__ import annotations

import re

from kvbm_core.storage.disk.record import FORMAT_VERSION
from kvbm_core.types import SEQUENCE_HASH_BYTES, BlockKey, SequenceHash, block_key, group_of

TOP = f"kvbm{FORMAT_VERSION}"

_BLOCK = re.compile(r"([0-9a-f]{64})-(0|[1-9]\d{0,2})\.kv", re.ASCII)
_TEMPORARY = re.compile(r"\.[0-9a-z-]+(\.kv)?\.[0-9a-f]{16}", re.ASCII)


def file_name(key: BlockKey) -> str:
    """Of a block's file."""
    return f"{key[:SEQUENCE_HASH_BYTES].hex()}-{group_of(key)}.kv"


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
