"""``kvbm remote`` for records on any ObjectEngine: counts, checks and removes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from kvbm_core.clock import SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.inspect import OnProgress
from kvbm_core.storage.extents import MAX_EXTENT_BLOCKS
from kvbm_core.storage.inspection import Checked, Counted, Model, OnCount, Removed, Shard
from kvbm_core.storage.names import ObjectInfo, is_namespace, life_of
from kvbm_core.storage.remote.encoding import ENCRYPTED, Encoding, codec_of, words_of
from kvbm_core.storage.remote.engine import GetItem, Got, ObjectEngine, TakesMemory
from kvbm_core.storage.remote.judge import (
    BAD_BLOCK,
    NEWER,
    OF_ANOTHER_SECRET,
    OF_ANOTHER_SIZE,
    OURS,
    Verdict,
    cut,
    judge_blocks,
    judge_fields,
    open_trailer,
    stored_sizes,
)
from kvbm_core.storage.remote.names import TOP, Place, place_of, plain_name, secret_id_of
from kvbm_core.storage.remote.record_store import LIST_DEADLINE_S
from kvbm_core.storage.remote.records import (
    TAIL_BYTES,
    RecordFields,
    trailer_bytes,
    trailer_in,
    unpack_trailer,
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

    # ---------------------------------------------------------------- inside

    def _memory(self) -> Scratch:
        """Memory to read records into. Made at the first use, as some engines pin it."""
        if self._scratch is None:
            self._scratch = self._new_memory(MAX_RECORD_BYTES + READ_TOGETHER_BYTES)
        return self._scratch

    def _new_memory(self, num_bytes: int) -> Scratch:
        made = Scratch(num_bytes, SystemClock())
        if isinstance(self._engine, TakesMemory):
            self._engine.register(*made.place)
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
    trailer = open_trailer(end)
    if isinstance(trailer, Verdict):
        return trailer
    fields, blocks = trailer
    if (codec := codec_of(fields.codec)) is None:
        return NEWER
    if fields.secret_id == secret_id_of(None):
        secret = None
    verdict = judge_fields(fields, _expected(place, fields, secret))
    if verdict is not OURS:
        return verdict
    if secret is None and fields.codec & ENCRYPTED:
        return OF_ANOTHER_SECRET
    encoding = Encoding(codec, secret if fields.codec & ENCRYPTED else None)
    sizes = stored_sizes(trailer, encoding, len(blocks), record.nbytes - end.nbytes)
    if sizes is None or not 0 < fields.block_bytes <= MAX_RECORD_BYTES:
        return OF_ANOTHER_SIZE
    tails = [*(block.tail for block in blocks[:-1]), fields.mark[-TAIL_BYTES:]]
    target = memoryview(bytearray(0 if encoding.is_plain else fields.block_bytes))
    stored = cut(record[: -end.nbytes], sizes)
    verdicts = judge_blocks(trailer, encoding, tails, stored, [target] * len(blocks))
    return BAD_BLOCK if BAD_BLOCK in verdicts else OURS


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


def _expected(place: Place, found: RecordFields, secret: Secret | None) -> RecordFields:
    """The fields that a record with this name has, as far as a name tells them. With a secret only an engine
    knows its mark: the name is made from the key, which is not in the store.
    """
    is_named = place.num_blocks is None
    if secret is None:
        key = BlockKey(found.mark)
        is_key = is_block_key(key) and group_of(key) == found.group
        is_named = is_key and place.stem == plain_name(key, found.group, found.num_blocks)
    return found._replace(
        secret_id=secret_id_of(secret),
        life=life_of(place.namespace, place.shard),
        fingerprint=bytes.fromhex(place.shard[:16]) + found.fingerprint[8:],
        mark=found.mark if is_named else b"",
    )
