"""The one judge of records, for engines and for ``kvbm remote``. No I/O here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvbm_core.errors import Outcome
from kvbm_core.storage.base import Memory, plain_parts
from kvbm_core.storage.remote.encoding import Encoding
from kvbm_core.storage.remote.records import (
    RecordFields,
    RecordTrailer,
    digest_of,
    unpack_trailer,
    version_of,
)


class Verdict(NamedTuple):
    """What reading a record has shown. ``flaw``: what is wrong with it, for people; empty for nothing.
    ``is_bad``: no engine can use it under this name, so it is removed and can be written anew.
    """

    outcome: Outcome
    flaw: str = ""
    is_bad: bool = False


OURS = Verdict(Outcome.OK)
DAMAGED = Verdict(Outcome.CORRUPT, "it does not verify", is_bad=True)
OF_ANOTHER_SIZE = Verdict(Outcome.CORRUPT, "its length is not what it has to be", is_bad=True)
SWAPPED = Verdict(Outcome.MISS, "it is another block's", is_bad=True)
BAD_BLOCK = Verdict(Outcome.CORRUPT, "a block of it does not verify", is_bad=True)
OF_ANOTHER_SECRET = Verdict(Outcome.MISS, "it was made with another secret")
NEWER = Verdict(Outcome.INCOMPATIBLE, "it is of another version of kvbm")
FOREIGN = Verdict(Outcome.INCOMPATIBLE, "its blocks mean something else")


def open_trailer(end: memoryview) -> RecordTrailer | Verdict:
    """The trailer that ``end`` is, or what is wrong with it."""
    trailer = unpack_trailer(end)
    if trailer is None:
        return DAMAGED if version_of(end) is None else NEWER
    return trailer


def judge_fields(found: RecordFields, ours: RecordFields) -> Verdict:
    """Whose record it is. ``ours``: the fields that a record of ours has under this name, with any salt."""
    if found.secret_id != ours.secret_id:
        return OF_ANOTHER_SECRET
    if found._replace(salt=ours.salt) == ours:
        return OURS
    is_of_this_folder = (found.life, found.fingerprint, found.codec, found.block_bytes) == (
        ours.life,
        ours.fingerprint,
        ours.codec,
        ours.block_bytes,
    )
    return SWAPPED if is_of_this_folder else FOREIGN


def stored_sizes(
    trailer: RecordTrailer, encoding: Encoding, num_wanted: int, blocks_bytes: int
) -> list[int] | None:
    """The bytes that each of the last ``num_wanted`` blocks takes. ``blocks_bytes``: what was read before the
    trailer: these blocks, or all of the record if blocks do not have one size. None if it is not that,
    or a block takes nothing.
    """
    sizes = [block.num_bytes for block in trailer.blocks]
    if not all(sizes):
        return None
    if encoding.has_one_size:
        sizes = sizes[-num_wanted:]
        if set(sizes) != {encoding.stored_bytes(trailer.fields.block_bytes)}:
            return None
    return sizes[-num_wanted:] if sum(sizes) == blocks_bytes else None


def cut(memory: memoryview, sizes: Sequence[int]) -> list[Memory]:
    """Pieces of these sizes; the last one ends where ``memory`` does."""
    at, pieces = memory.nbytes - sum(sizes), list[Memory]()
    for size in sizes:
        pieces.append(memory[at : at + size])
        at += size
    return pieces


def judge_blocks(
    trailer: RecordTrailer,
    encoding: Encoding,
    tails: Sequence[bytes],
    stored: Sequence[Memory],
    targets: Sequence[Memory],
) -> list[Verdict]:
    """One verdict per target, of the last blocks of the record; a target whose verdict is OURS is filled.
    ``tails``: of the marks of the keys that these blocks have to have.
    """
    coder = None if encoding.is_plain else encoding.coder(trailer.fields)
    first, verdicts = len(trailer.blocks) - len(stored), list[Verdict]()
    for index, (tail, own, target) in enumerate(zip(tails, stored, targets, strict=True), first):
        block = trailer.blocks[index]
        is_good = block.tail == tail and block.digest == digest_of(own)
        if is_good and coder is not None:
            (data,) = plain_parts(own)
            is_good = coder.decode(index, data, target)
        verdicts.append(OURS if is_good else BAD_BLOCK)
    return verdicts
