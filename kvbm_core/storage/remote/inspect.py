"""``kvbm remote`` for records on any ObjectEngine: counts, checks and removes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from kvbm_core.clock import SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.base import HoldsLate, Memory
from kvbm_core.storage.disk.inspect import OnProgress
from kvbm_core.storage.extents import MAX_EXTENT_BLOCKS
from kvbm_core.storage.inspection import Checked, Counted, Model, OnCount, Removed, Shard
from kvbm_core.storage.names import ObjectInfo, is_namespace, life_of
from kvbm_core.storage.remote.encoding import ENCRYPTED, Encoding, codec_of, words_of
from kvbm_core.storage.remote.engine import GetItem, Got, ObjectEngine, TakesMemory
from kvbm_core.storage.remote.names import TOP, Place, place_of, plain_name, secret_id_of
from kvbm_core.storage.remote.record_store import (
    BAD_BLOCK,
    DAMAGED,
    FOREIGN,
    LIST_DEADLINE_S,
    NEWER,
    OF_ANOTHER_SECRET,
    OF_ANOTHER_SIZE,
    OURS,
    SWAPPED,
    Verdict,
)
from kvbm_core.storage.remote.records import (
    TAIL_BYTES,
    RecordFields,
    RecordTrailer,
    digest_of,
    trailer_bytes,
    trailer_in,
    unpack_trailer,
    version_of,
)
from kvbm_core.storage.remote.scratch import Scratch
from kvbm_core.storage.remote.secret import Secret
from kvbm_core.types import BlockKey, group_of, is_block_key

READ_TOGETHER_BYTES = 64 << 20
MAX_RECORD_BYTES = 512 << 20
CALL_S = 60.0
"""The deadline of a call for several records. It is long: only the user of the command waits."""
REMOVED_TOGETHER = 256
CODECS_TOGETHER = 16
END_BYTES = trailer_bytes(MAX_EXTENT_BLOCKS)
"""The trailer of any record is in so much of its end."""


class RecordInspection:
    """A StoreInspection. It closes ``engine``. Without the ``secret`` that records were made with it counts
    them, but cannot check them. ConfigError, one line, for a package that a record needs.
    """

    top = TOP

    def __init__(self, engine: ObjectEngine, where: str, secret: Secret | None = None) -> None:
        self.where = where
        self.evicts_itself = engine.traits.has_capacity
        self._engine = engine
        self._secret = secret
        self._scratch: Scratch | None = None
        self._taken: list[Scratch] = []

    def models(self) -> list[str]:
        """See StoreInspection."""
        places = (place_of(info.name) for info in self._scan(()))
        return sorted({place.namespace for place in places if place is not None})

    def count(self, now_ns: int, on_count: OnCount) -> Counted:
        """See StoreInspection."""
        shards: dict[tuple[str, str], Shard] = {}
        any_record: dict[tuple[str, str], ObjectInfo] = {}
        models: dict[str, Model] = {}
        strange = 0
        for seen, info in enumerate(self._scan(()), 1):
            place = place_of(info.name)
            if place is None:
                strange += 1
            elif not place.shard:
                models[place.namespace] = Model(strange=models.get(place.namespace, Model()).strange + 1)
            else:
                key = place.namespace, place.shard
                models.setdefault(place.namespace, Model())
                _count_record(shards.setdefault(key, Shard(*key)), place, info, now_ns)
                if place.stem and not place.is_beside:
                    any_record.setdefault(key, info)
            on_count(seen, None)
        for key, codec in zip(any_record, self._codecs_of([*any_record.values()]), strict=True):
            shards[key].codec = codec
        return Counted(sorted(shards.values(), key=attrgetter("namespace", "name")), models, strange)

    def verify(self, models: Sequence[str] = (), *, removes_damaged: bool = False) -> Iterator[Checked]:
        """See StoreInspection."""
        for window in self._windows(models):
            checked = self._check(window)
            yield from checked
            damaged = [one.name for one in checked if one.what and not (one.is_unreadable or one.is_foreign)]
            if removes_damaged and damaged:
                self._remove_or_raise(damaged)

    def remove_model(self, namespace: str, on_records: OnProgress) -> Removed:
        """See StoreInspection."""
        names, removed, removed_bytes, strange = list[str](), 0, 0, 0
        for info in self._scan([namespace]):
            place = place_of(info.name)
            if place is None or not place.stem:
                strange += 1
                continue
            names.append(info.name)
            removed, removed_bytes = removed + (not place.is_beside), removed_bytes + info.num_bytes
            if len(names) == REMOVED_TOGETHER:
                self._remove_or_raise(names)
                on_records(len(names))
                names = []
        self._remove_or_raise(names)
        return Removed(removed, removed_bytes, strange)

    def objects(self, models: Sequence[str] = ()) -> Iterator[ObjectInfo]:
        """See StoreInspection."""
        for info in self._scan(models):
            place = place_of(info.name)
            if place is not None and place.stem:
                yield info

    def remove(self, names: Sequence[str]) -> list[Outcome]:
        """See StoreInspection."""
        return self._engine.remove(names, deadline_s=CALL_S) if names else []

    def close(self) -> None:
        """See StoreInspection."""
        self._engine.close()
        for scratch in self._taken:
            scratch.close()

    # ---------------------------------------------------------------- inside

    def _memory(self) -> Scratch:
        """Memory to read records into. Made at the first use, as some engines pin it."""
        if self._scratch is None:
            self._scratch = self._new_memory(MAX_RECORD_BYTES + READ_TOGETHER_BYTES)
        return self._scratch

    def _new_memory(self, num_bytes: int) -> Scratch:
        made = Scratch(num_bytes, self._holds, SystemClock())
        if isinstance(self._engine, TakesMemory):
            self._engine.register(*made.place)
        self._taken.append(made)
        return made

    def _codecs_of(self, infos: Sequence[ObjectInfo]) -> list[str]:
        """By the ends of these records, each of another folder: all of a folder have one codec."""
        codecs: list[str] = []
        memory = self._new_memory(CODECS_TOGETHER * END_BYTES)
        for start in range(0, len(infos), CODECS_TOGETHER):
            lent = memory.take(memory.num_bytes, CALL_S)
            if lent is None:
                break
            items = list[GetItem]()
            for at, info in enumerate(infos[start : start + CODECS_TOGETHER]):
                piece = lent.memory[at * END_BYTES :][: min(END_BYTES, info.num_bytes)]
                items.append(GetItem(info.name, [piece], info.num_bytes - piece.nbytes))
            gots = self._engine.get(items, deadline_s=CALL_S)
            codecs += [_codec_in(item.pieces[0], got) for item, got in zip(items, gots, strict=True)]
            memory.give_back(lent)
        return codecs + [""] * (len(infos) - len(codecs))

    def _holds(self, memory: Memory) -> bool:
        return isinstance(self._engine, HoldsLate) and self._engine.holds(memory)

    def _scan(self, models: Sequence[str]) -> Iterator[ObjectInfo]:
        prefixes = [f"{TOP}/{model}/" for model in models if is_namespace(model)] if models else [f"{TOP}/"]
        for prefix in prefixes:
            yield from self._engine.scan(prefix, deadline_s=LIST_DEADLINE_S)

    def _remove_or_raise(self, names: Sequence[str]) -> None:
        for name, outcome in zip(names, self.remove(names), strict=True):
            if outcome not in (Outcome.OK, Outcome.MISS):
                raise OSError(f"{name} cannot be removed: {outcome}")

    def _windows(self, models: Sequence[str]) -> Iterator[list[ObjectInfo]]:
        """Lists of records to read in one call each."""
        window, num_bytes = list[ObjectInfo](), 0
        most = max(self._engine.traits.batch_items, self._engine.traits.concurrency)
        for info in self.objects(models):
            place = place_of(info.name)
            if place is None or place.is_beside:
                continue
            if window and (len(window) == most or num_bytes + info.num_bytes > READ_TOGETHER_BYTES):
                yield window
                window, num_bytes = [], 0
            window.append(info)
            num_bytes += info.num_bytes
        if window:
            yield window

    def _check(self, infos: Sequence[ObjectInfo]) -> list[Checked]:
        small = [info for info in infos if info.num_bytes < MAX_RECORD_BYTES]
        unread = [
            Checked(i.name, "too large to be read here", is_unreadable=True) for i in infos if i not in small
        ]
        sizes = [info.num_bytes + 1 for info in small]  # one more, which tells that there is more
        memory = self._memory()
        lent = memory.take(max(1, sum(sizes)), CALL_S)
        if lent is None:
            return [Checked(info.name, str(Outcome.BUSY), is_unreadable=True) for info in infos]
        try:
            ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
            pieces = [lent.memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]
            items = [GetItem(info.name, [piece]) for info, piece in zip(small, pieces, strict=True)]
            gots = self._engine.get(items, deadline_s=CALL_S) if items else []
            found = zip(small, pieces, gots, strict=True)
            return unread + [self._checked(info.name, piece, got) for info, piece, got in found]
        finally:
            memory.give_back(lent)

    def _checked(self, name: str, memory: memoryview, got: Got) -> Checked:
        place = place_of(name)
        if got.outcome is Outcome.MISS or place is None:
            return Checked(name, is_gone=True)
        if got.outcome is Outcome.CORRUPT:
            return Checked(name, OF_ANOTHER_SIZE.flaw)
        if got.outcome is not Outcome.OK:
            return Checked(name, f"it could not be read: {got.outcome}", is_unreadable=True)
        verdict = check_record(place, memory[: got.num_bytes], self._secret)
        is_foreign = bool(verdict.flaw) and not verdict.is_bad
        return Checked(name, verdict.flaw, got.num_bytes, is_foreign=is_foreign)


def check_record(place: Place, record: memoryview, secret: Secret | None) -> Verdict:
    """Checks all bytes of a record, and that it belongs to ``place``; no key has to be known. A record that
    engines with another secret or version may be able to use is not bad. ConfigError, one line, for a package
    that is needed.
    """
    end = trailer_in(record)
    trailer = unpack_trailer(end)
    if trailer is None:
        return DAMAGED if version_of(end) is None else NEWER
    fields = trailer.fields
    if fields.secret_id == secret_id_of(None):
        secret = None
    codec = codec_of(fields.codec)
    if codec is None:
        return NEWER
    verdict = _judge(place, fields, secret)
    if verdict is not OURS:
        return verdict
    encoding = Encoding(codec, secret if fields.codec & ENCRYPTED else None)
    if not _fits(trailer, record.nbytes - end.nbytes, encoding):
        return OF_ANOTHER_SIZE
    return OURS if _are_good(trailer, record, encoding) else BAD_BLOCK


# -------------------------------------------------------------------- inside


def _codec_in(end: memoryview, got: Got) -> str:
    """Empty if it is no end of a record of this version."""
    is_whole = got.outcome is Outcome.OK and got.num_bytes == end.nbytes
    trailer = unpack_trailer(trailer_in(end)) if is_whole else None
    return words_of(trailer.fields.codec) if trailer is not None else ""


def _count_record(seen: Shard, place: Place, info: ObjectInfo, now_ns: int) -> None:
    if not place.stem:
        seen.strange += 1
        return
    seen.num_bytes += info.num_bytes
    if place.is_beside:
        seen.temporary += 1
        return
    seen.contents.add(int(info.changed_s * 1e9), now_ns)
    seen.num_blocks += place.num_blocks or 0
    seen.untold += place.num_blocks is None


def _judge(place: Place, fields: RecordFields, secret: Secret | None) -> Verdict:
    """Whose record it is, by its own fields."""
    if fields.secret_id != secret_id_of(secret) or (secret is None and fields.codec & ENCRYPTED):
        return OF_ANOTHER_SECRET
    is_at_home = fields.life == life_of(place.namespace, place.shard)
    if not is_at_home or fields.fingerprint.hex()[:16] != place.shard[:16]:
        return FOREIGN
    return OURS if _is_named(place, fields, has_secret=secret is not None) else SWAPPED


def _is_named(place: Place, fields: RecordFields, *, has_secret: bool) -> bool:
    """Whether the record has the name that its fields ask for. With a secret only an engine can check that:
    the name is made from the key, which is not in the store.
    """
    if has_secret:
        return place.num_blocks is None
    key = BlockKey(fields.mark)
    is_key = is_block_key(key) and group_of(key) == fields.group
    return is_key and place.stem == plain_name(key, fields.group, fields.num_blocks)


def _fits(trailer: RecordTrailer, blocks_bytes: int, encoding: Encoding) -> bool:
    """Whether each block has a possible length, and all of them end where the trailer begins."""
    sizes = [block.num_bytes for block in trailer.blocks]
    most = encoding.stored_bytes(trailer.fields.block_bytes)
    is_right = all(size == most if encoding.has_one_size else size <= most for size in sizes)
    fills = sizes and sum(sizes) == blocks_bytes
    return bool(fills) and is_right and 0 < trailer.fields.block_bytes <= MAX_RECORD_BYTES


def _are_good(trailer: RecordTrailer, record: memoryview, encoding: Encoding) -> bool:
    coder = None if encoding.is_plain else encoding.coder(trailer.fields)
    target = memoryview(bytearray(0 if coder is None else trailer.fields.block_bytes))
    if trailer.blocks[-1].tail != trailer.fields.mark[-TAIL_BYTES:]:
        return False
    at = 0
    for index, block in enumerate(trailer.blocks):
        stored = record[at : at + block.num_bytes]
        if digest_of(stored) != block.digest:
            return False
        if coder is not None and not coder.decode(index, stored, target):
            return False
        at += block.num_bytes
    return True
