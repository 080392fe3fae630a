"""RecordStore: names, secret, encryption, compression, requests, memory, renewal; how a store is opened."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.storage.base import Memory
from kvbm_core.storage.extents import Extent
from kvbm_core.storage.late import LATE, ranges_of
from kvbm_core.storage.remote import renewals
from kvbm_core.storage.remote.encoding import Encoding
from kvbm_core.storage.remote.engine import EngineTraits
from kvbm_core.storage.remote.names import RecordNames
from kvbm_core.storage.remote.record_store import RecordStore
from kvbm_core.storage.remote.records import (
    RecordFields,
    digest_of,
    pack_trailer_into,
    trailer_bytes,
    unpack_trailer,
)
from kvbm_core.storage.remote.scratch import Scratch
from kvbm_core.storage.remote.secret import Secret
from kvbm_core.storage.stores import StoreOptions, StoreSpec, open_store
from kvbm_core.testing import memory_engine
from kvbm_core.testing.executor_bench import is_mapped
from kvbm_core.testing.extent_contract import extent_of, last_of
from kvbm_core.testing.memory_engine import GET, PUT, RENEW, EngineFaults, MemoryEngine
from kvbm_core.testing.store_contract import LONG_S, buffers, content_of, fill, key_of
from tests.unit.record_stores import (
    KINDS,
    MEANING,
    OTHER_SECRET,
    PAYLOAD_BYTES,
    SECRET,
    Kind,
    compressible,
    get,
)

NAME = re.compile(r"kvbm2/model-7b-[0-9a-f]{12}/[0-9a-f]{16}-0of1/([0-9a-f]{3})/([0-9a-f]{64})(.*)")


# ---------------------------------------------------------------- names and secrets


def test_names_tell_the_key_the_group_and_the_number_of_blocks() -> None:
    names = RecordNames(MEANING._replace(model="Model-7B"))
    for key, size, rest in (
        (key_of(1), 1, "-0x1"),
        (key_of(1), 64, "-0x64"),
        (key_of(1, group=255), 512, "-255x512"),
    ):
        name = names.name_of(key, size)
        found = NAME.fullmatch(name)
        assert found is not None and found[3] == rest and found[2] == key[:32].hex()
        assert found[2].startswith(found[1]) and name.startswith(names.folder)
        assert names.key_in(name) == (key if size == 1 else None)
    for strange in ("", "x", f"{'0' * 64}-256x1", f"{'0' * 64}-0", f"{'0' * 63}-0x1"):
        assert names.key_in(strange) is None


def test_the_longest_name_is_of_less_than_200_characters() -> None:
    meaning = MEANING._replace(model="m" * 300, rank=99_999, world=99_999)
    assert len(RecordNames(meaning).name_of(key_of(1, group=255), 512)) < 200


def test_with_a_secret_names_tell_nothing_and_two_secrets_share_nothing() -> None:
    plain, one, two = (RecordNames(MEANING, secret) for secret in (None, SECRET, OTHER_SECRET))
    keys = [key_of(number, group) for number in range(20) for group in (0, 1)]
    words = []
    for names in (plain, one, two):
        made = [names.name_of(key, size) for key in keys for size in (1, 4)]
        assert len(set(made)) == len(made)
        words.append({word for name in made for word in name.split("/")[2:] if len(word) > 3})
    assert not words[0] & words[1] and not words[0] & words[2] and not words[1] & words[2]
    assert all(re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{16}-0of1", word) for word in words[1])
    assert one.key_in(one.name_of(keys[0], 1)) is None
    other_folder = RecordNames(MEANING._replace(rank=1, world=2), SECRET)
    assert one.name_of(keys[0], 1)[-64:] != other_folder.name_of(keys[0], 1)[-64:]


@pytest.mark.parametrize("kind_name", ["secret", "encrypted", "zstd and encrypted"])
def test_with_a_secret_no_key_is_in_an_object(kind_name: str) -> None:
    kind, extent = KINDS[kind_name](), extent_of(1, 4)
    kind.put(extent)
    for key in extent.keys:
        assert key[:8] not in kind.content(extent) and key[-16:] not in kind.content(extent)
    plain = Kind()
    plain.put(extent)
    assert extent.keys[-1] in plain.content(extent), "or this test sees nothing"


def test_what_was_encrypted_cannot_be_read_and_is_never_the_same_twice() -> None:
    extent, contents = extent_of(1, 2), []
    for _ in range(2):
        kind = KINDS["encrypted"]()
        kind.put(extent)
        contents.append(kind.content(extent))
        for key in extent.keys:
            assert compressible(key, PAYLOAD_BYTES)[:16] not in contents[-1]
    stored_bytes = len(contents[0]) - trailer_bytes(2)
    assert stored_bytes == 2 * (PAYLOAD_BYTES + 16)
    assert contents[0][:stored_bytes] != contents[1][:stored_bytes]
    same = KINDS["encrypted"]()
    same.payload_bytes = 64
    keys = [key_of(1), key_of(2)]
    store = same.open()
    store.put_many(keys, [memoryview(bytes(64))] * 2, deadline_s=LONG_S)
    one, two = (content[:64] for content, _ in same.objects.objects.values())
    assert one != two, "the same bytes under two keys"


def test_who_can_write_to_the_store_cannot_forge_what_is_encrypted() -> None:
    """Checksums are no secret: whoever changes a record makes them anew."""
    kind, extent, other = KINDS["encrypted"](), extent_of(1, 2), extent_of(2, 2)
    kind.put(extent, other)
    size = PAYLOAD_BYTES + 16
    good, of_other = kind.content(extent), kind.content(other)
    one, two = good[:size], good[size : 2 * size]
    for forged, is_loaded in (
        ((one, two), True),
        ((one, bytes(size)), False),
        ((two, one), False),
        ((of_other[:size], of_other[size : 2 * size]), False),
    ):
        trailer = unpack_trailer(memoryview(good[2 * size :]))
        assert trailer is not None
        for fields in (trailer.fields, trailer.fields._replace(salt=bytes(16))):
            memory = memoryview(bytearray(trailer_bytes(2)))
            blocks = [
                entry._replace(digest=digest_of(memoryview(block)))
                for entry, block in zip(trailer.blocks, forged, strict=True)
            ]
            pack_trailer_into(memory, fields, blocks)
            kind.objects.put(kind.name_of(extent), b"".join((*forged, memory)))
            outcomes = get(kind.open(), extent)
            is_ours = is_loaded and fields is trailer.fields
            assert outcomes[1:] == [Outcome.OK if is_ours else Outcome.CORRUPT]


def test_only_who_has_the_secret_can_decrypt() -> None:
    fields = RecordFields(1, 0, 2, *[bytes(16)] * 4, PAYLOAD_BYTES, b"key")
    payload = memoryview(content_of(key_of(1), PAYLOAD_BYTES))
    stored, target = buffers(1, PAYLOAD_BYTES + 16)[0], buffers(1, PAYLOAD_BYTES)[0]
    assert Encoding(secret=SECRET).coder(fields).encode(0, payload, stored) == PAYLOAD_BYTES + 16
    assert not Encoding(secret=OTHER_SECRET).coder(fields).decode(0, stored, target)
    assert Encoding(secret=SECRET).coder(fields).decode(0, stored, target) and target == payload


def test_a_block_is_that_of_its_own_key_also_in_front_of_the_last() -> None:
    kind, extent = Kind(), extent_of(1, 4)
    kind.put(extent)
    keys = list(extent.keys)
    keys[1] = key_of(77)
    targets: list[Memory] = [*buffers(4, PAYLOAD_BYTES)]
    outcomes = kind.open().get_extents([Extent(4, tuple(keys))], [targets], deadline_s=LONG_S)
    assert outcomes == [[Outcome.OK, Outcome.CORRUPT, Outcome.OK, Outcome.OK]]


@pytest.mark.parametrize("encrypts", [False, True])
def test_with_another_secret_nothing_is_found_and_nothing_is_removed(encrypts: bool) -> None:
    """Neither where one looks, nor if somebody moves it there."""
    extent = extent_of(1, 4)
    ours = Kind(secret=SECRET, encrypts=encrypts)
    ours.put(extent)
    theirs = Kind(secret=OTHER_SECRET, encrypts=encrypts, objects=ours.objects)
    assert get(theirs.open(), extent) == [Outcome.MISS] * 4
    ours.objects.put(theirs.name_of(extent), ours.content(extent))
    assert get(theirs.open(), extent) == [Outcome.MISS] * 4
    assert theirs.is_there(extent) and get(ours.open(), extent) == [Outcome.OK] * 4


def test_a_newer_record_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, extent = Kind(), extent_of(1, 4)
    with monkeypatch.context() as newer:
        newer.setattr("kvbm_core.storage.remote.records.RECORD_VERSION", 3)
        kind.put(extent)
    assert get(kind.open(), extent) == [Outcome.INCOMPATIBLE] * 4
    assert kind.is_there(extent)


def test_a_secret_is_read_from_a_file_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("  0123456789abcdef\n")
    secret = Secret.read(str(path))
    assert secret is not None and "0123" not in repr(secret)
    assert secret.digest("name", b"x") == Secret(b"0123456789abcdef").digest("name", b"x")
    assert secret.digest("a", b"bc") != secret.digest("ab", b"c") != secret.digest("ab", b"", b"c")
    assert Secret.read("") is None


def test_a_secret_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    short, long, pipe = tmp_path / "short", tmp_path / "long", tmp_path / "pipe"
    short.write_text("hunter2\n")
    long.write_bytes(b"x" * 5000)
    os.mkfifo(pipe)
    for path, said in (
        (tmp_path / "absent", "No such file"),
        (tmp_path, "Is a directory|is not a file"),
        (pipe, "is not a file"),
        (short, "holds 7 bytes, not 16 to 4096"),
        (long, "not 16 to 4096"),
    ):
        with pytest.raises(ConfigError, match=said) as raised:
            Secret.read(str(path))
        line = str(raised.value)
        assert line.startswith(f"kvbm: KVBM_REMOTE_SECRET_FILE={path}: ") and "\n" not in line
        assert "openssl rand" in line and "hunter2" not in line


# ---------------------------------------------------------------- encodings


def test_what_cannot_be_compressed_is_stored_as_it_is() -> None:
    kind, extent = Kind("zstd"), extent_of(1, 2)
    kind.put(extent)
    assert len(kind.content(extent)) < trailer_bytes(2) + PAYLOAD_BYTES
    kind.open().put_many([key_of(5)], [memoryview(content_of(key_of(5), PAYLOAD_BYTES))], deadline_s=LONG_S)
    assert len(kind.content(Extent(1, (key_of(5),)))) == trailer_bytes(1) + PAYLOAD_BYTES


def test_another_encoding_is_another_folder() -> None:
    memory_engine.register()
    memory_engine.forget_all()
    options = [StoreOptions(), StoreOptions(codec="zstd"), StoreOptions(secret_file=__file__)]
    with pytest.MonkeyPatch.context() as larger:
        larger.setattr("kvbm_core.storage.remote.secret.MAX_BYTES", 1 << 20)
        options.append(StoreOptions(secret_file=__file__, encrypts=True))
        stores = [open_store(_spec("memory://one", option)) for option in options]
    payload = memoryview(compressible(key_of(1), PAYLOAD_BYTES))
    for store in stores:
        assert store.contains_many([key_of(1)], deadline_s=LONG_S) == [Outcome.MISS]
        assert store.put_many([key_of(1)], [payload], deadline_s=LONG_S) == [Outcome.OK]
    objects = memory_engine.OPENED[0].objects.objects
    assert len({name.split("/")[2] for name in objects}) == len(objects) == 4
    has_payload = [bytes(payload[:200]) in content for content, _ in objects.values()]
    assert has_payload == [True, False, True, False], "plain, compressed, with a secret, encrypted"
    has_key = [key_of(1) in content for content, _ in objects.values()]
    assert has_key == [True, True, False, False]


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        (
            "cryptography.hazmat.primitives.ciphers.aead",
            {"encrypts": True},
            "KVBM_REMOTE_ENCRYPT=1: needs the package cryptography; install kvbm with the extra crypto",
        ),
        (
            "zstandard",
            {"codec": "zstd"},
            "KVBM_REMOTE_CODEC=zstd: needs the package zstandard; install kvbm with the extra zstd",
        ),
    ],
)
def test_without_its_package_a_store_cannot_be_had(
    module: str, options: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_engine.register()
    memory_engine.forget_all()
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    monkeypatch.setitem(sys.modules, module, None)
    spec = _spec("memory://two", StoreOptions(secret_file=str(secret), **options))  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as raised:
        open_store(spec)
    assert str(raised.value) == f"kvbm: {said}"
    (engine,) = memory_engine.OPENED
    assert engine.exists(["x"], deadline_s=1.0) == [Outcome.REJECTED], "it is closed"


def test_without_heads_there_is_no_store_with_float8() -> None:
    """Of engines that do not know them: nothing is kept under a name that says fp8 and is not."""
    memory_engine.register()
    memory_engine.forget_all()
    with pytest.raises(ConfigError) as raised:
        open_store(_spec("memory://four", StoreOptions(codec="fp8")))
    why = "is for blocks that are kept by KV heads, which is not so here; set it to none or zstd"
    assert str(raised.value) == f"kvbm: KVBM_REMOTE_CODEC=fp8: {why}"
    (engine,) = memory_engine.OPENED
    assert engine.exists(["x"], deadline_s=1.0) == [Outcome.REJECTED], "it is closed"


def test_a_store_that_cannot_be_as_private_as_was_asked_is_refused(tmp_path: Path) -> None:
    memory_engine.register()
    with pytest.raises(ConfigError, match="KVBM_REMOTE_ENCRYPT=True: needs a secret"):
        open_store(_spec("memory://three", StoreOptions(encrypts=True)))
    for options, setting in (
        (StoreOptions(encrypts=True, secret_file="x"), "KVBM_REMOTE_ENCRYPT"),
        (StoreOptions(secret_file="x"), "KVBM_REMOTE_SECRET_FILE"),
        (StoreOptions(codec="zstd"), "KVBM_REMOTE_CODEC"),
        (StoreOptions(codec="fp8"), "KVBM_REMOTE_CODEC"),
    ):
        with pytest.raises(ConfigError, match=f"{setting}=.* is not for a shared directory"):
            open_store(_spec(f"file://{tmp_path}", options))


def _spec(url: str, options: StoreOptions) -> StoreSpec:
    return StoreSpec(url, PAYLOAD_BYTES, "meaning", "0of1", "model", options)


# ---------------------------------------------------------------- requests and memory


def test_an_extent_is_put_in_one_request_from_the_callers_memory() -> None:
    kind, extent, seen = Kind(), extent_of(1, 8), []

    class Looking(MemoryEngine):
        def put(self, items, *, deadline_s):  # type: ignore[no-untyped-def]
            seen.extend(items)
            return super().put(items, deadline_s=deadline_s)

    engine = Looking(objects=kind.objects)
    payloads = buffers(8, PAYLOAD_BYTES)
    threads = threading.active_count()
    store = kind.open(engine)
    assert store.put_extents([extent], [payloads], deadline_s=LONG_S) == [Outcome.OK]
    assert [call for call, _ in engine.calls] == [PUT]
    (item,) = seen
    assert [ranges_of(piece) for piece in item.pieces[:8]] == [ranges_of(payload) for payload in payloads]
    assert len(item.pieces) == 9 and item.pieces[8].nbytes == trailer_bytes(8)
    assert threading.active_count() == threads and store.concurrency == engine.traits.concurrency


@pytest.mark.parametrize("kind_name", KINDS)
def test_the_last_blocks_are_got_in_one_request_that_brings_no_others(kind_name: str) -> None:
    kind, extent = KINDS[kind_name](), extent_of(1, 16)
    kind.put(extent)
    brought: list[int] = []

    class Looking(MemoryEngine):
        def get(self, items, *, deadline_s):  # type: ignore[no-untyped-def]
            brought.extend(sum(piece.nbytes for piece in item.pieces) for item in items)
            return super().get(items, deadline_s=deadline_s)

    engine = Looking(objects=kind.objects)
    store = kind.open(engine)
    for count in (3, 12):
        assert get(store, last_of(extent, count)) == [Outcome.OK] * count
    assert [call for call, _ in engine.calls] == [GET] * 2
    if kind.codec == "none":
        per_block = PAYLOAD_BYTES + 16 * kind.encrypts
        assert brought == [count * per_block + trailer_bytes(16) + 1 for count in (3, 12)]


def test_memory_of_late_reads_is_not_used_again_before_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage that lands later is in nobody's record; without any memory left, calls are BUSY."""
    monkeypatch.setattr(memory_engine, "LATE_WRITE_CALLS", 1 << 60)
    monkeypatch.setattr("kvbm_core.storage.remote.record_store.ENCODED_BYTES", 0)
    kind, extent = KINDS["encrypted"](), extent_of(1, 8)
    kind.put(extent)
    engine = MemoryEngine(EngineFaults(is_late=1.0), kind.objects)
    store = kind.open(engine)
    room = store._scratch
    while max(map(len, room._free)) > room.num_bytes // 2:
        assert get(store, extent) == [Outcome.TIMED_OUT] * 8
    held = [pieces for _, pieces, *_ in engine._late]
    assert len(held) > 50 and all(LATE.holds(ranges_of(pieces)) for pieces in held)
    engine.faults = EngineFaults()
    for _ in range(3):
        assert get(store, extent) == [Outcome.OK] * 8, "from memory that nobody holds"
    spans = [span for pieces in held for span in ranges_of(pieces)]
    assert len({start for start, _ in spans}) == len(spans), "none was lent twice"
    engine.faults = EngineFaults(is_late=1.0)
    while get(store, extent, deadline_s=0.01) == [Outcome.TIMED_OUT] * 8:
        pass
    targets: list[list[Memory]] = [[*buffers(8, PAYLOAD_BYTES)]]
    assert store.get_extents([extent], targets, deadline_s=0.01) == [[Outcome.BUSY] * 8]
    assert store.put_extents([extent], targets, deadline_s=0.01) == [Outcome.BUSY]
    assert sum(map(len, room._free)) < 16 * 4096, "all of it was used"
    engine.land()
    engine.faults = EngineFaults()
    assert not any(LATE.holds(ranges_of(pieces)) for pieces in held)
    assert get(store, extent) == [Outcome.OK] * 8, "what has landed is free"


def test_targets_of_late_reads_are_held() -> None:
    kind, extent = Kind(), extent_of(1, 2)
    kind.put(extent)
    engine = MemoryEngine(EngineFaults(is_late=1.0), kind.objects)
    store = kind.open(engine)
    targets = buffers(2, PAYLOAD_BYTES)
    assert store.get_extents([extent], [targets], deadline_s=LONG_S) == [[Outcome.TIMED_OUT] * 2]
    assert all(LATE.holds(ranges_of(target)) for target in targets)
    assert not LATE.holds(ranges_of(buffers(1, PAYLOAD_BYTES)[0]))
    own, _ = store._scratch.place
    engine._late = [(number, [], b"", token) for number, _, _, token in engine._late]  # as if by addresses
    store.close()
    del store
    gc.collect()
    assert is_mapped(own), "what may still be written to is not given back"
    engine.land()
    gc.collect()
    assert not LATE.holds(ranges_of(targets)) and not is_mapped(own)


def test_an_engine_that_wants_to_know_memory_is_told_of_all() -> None:
    class Registering(MemoryEngine):
        def __init__(self) -> None:
            super().__init__()
            self.known: list[tuple[int, int]] = []

        def register(self, address: int, num_bytes: int) -> None:
            self.known.append((address, address + num_bytes))

        def get(self, items, *, deadline_s):  # type: ignore[no-untyped-def]
            spans = [span for item in items for piece in item.pieces for span in ranges_of(piece)]
            assert all(any(a <= start and end <= b for a, b in self.known) for start, end in spans)
            return super().get(items, deadline_s=deadline_s)

    kind, extent, engine = KINDS["encrypted"](), extent_of(1, 4), Registering()
    kind.objects = engine.objects
    kind.put(extent)
    assert get(kind.open(engine), extent) == [Outcome.OK] * 4
    plain = Kind(objects=engine.objects)
    plain.put(extent)
    store = plain.open(engine)
    targets = buffers(4, PAYLOAD_BYTES)
    for target in targets:
        ((start, end),) = ranges_of(target)
        store.register(start, end - start)
    assert store.get_extents([extent], [targets], deadline_s=LONG_S) == [[Outcome.OK] * 4]


def test_scratch_memory_is_bounded_waited_for_and_in_one_piece_again() -> None:
    scratch = Scratch(16 * 4096, ManualClock())
    assert scratch.take(17 * 4096, LONG_S) is None, "it never fits, so it is not waited for"
    lent = [scratch.take(4096, 0.0) for _ in range(16)]
    assert scratch.take(1, 0.0) is None
    for number in (3, 5, 4, 0, 15, 1):
        scratch.give_back(lent[number])  # type: ignore[arg-type]
    assert scratch._free == [range(0, 2 * 4096), range(3 * 4096, 6 * 4096), range(15 * 4096, 16 * 4096)]
    middle = scratch.take(3 * 4096 - 10, 0.0)
    assert middle is not None and middle.start == 3 * 4096
    got: list[object] = []
    waiting = threading.Thread(target=lambda: got.append(scratch.take(16 * 4096, LONG_S)))
    waiting.start()
    for one in (lent[number] for number in (2, *range(6, 15))):
        scratch.give_back(one)  # type: ignore[arg-type]
    scratch.give_back(middle)
    waiting.join(LONG_S)
    assert got and got[0] is not None and scratch._free == []


# ---------------------------------------------------------------- renewal


class Renewing:
    """A store with a clock of its own, over an engine whose renewals wait for ``gate`` and then answer
    ``answer``, if there is one.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(renewals, "PAUSE_S", 0.0)
        self.clock, self.engine, self.kind = ManualClock(), MemoryEngine(), Kind()
        self.kind.objects = self.engine.objects
        self.gate, self.begun = threading.Event(), threading.Event()
        self.answer: Outcome | None = None
        self.gate.set()
        monkeypatch.setattr(self.engine, "renew", self._renew)
        self.store = RecordStore(self.engine, RecordNames(MEANING), PAYLOAD_BYTES, clock=self.clock)

    @property
    def timer(self) -> threading.Timer | None:
        """The thread that renews, while there is one."""
        assert self.store._renewals is not None
        return self.store._renewals._timer

    def _renew(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        self.begun.set()
        assert self.gate.wait(LONG_S)
        outcomes = MemoryEngine.renew(self.engine, names, deadline_s=deadline_s)
        return [self.answer or outcome for outcome in outcomes]

    def renewed(self) -> list[str]:
        """What was to be renewed, when nothing is due any more."""
        timer = self.timer
        if timer is not None:
            timer.join(LONG_S)
            assert not timer.is_alive()
        return [name for call, names in self.engine.calls if call == RENEW for name in names]

    def put(self, extent: Extent) -> None:
        """By this store."""
        payloads = buffers(len(extent.keys), PAYLOAD_BYTES)
        for key, payload in zip(extent.keys, payloads, strict=True):
            fill(payload, compressible(key, PAYLOAD_BYTES))
        assert self.store.put_extents([extent], [payloads], deadline_s=LONG_S) == [Outcome.OK]


def test_what_is_read_is_renewed_at_most_once_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an engine that only reads, too."""
    bench = Renewing(monkeypatch)
    old, missing, name = extent_of(0, 2), extent_of(9, 2), bench.kind.name_of(extent_of(0, 2))
    bench.put(old)
    for _ in range(2):
        assert get(bench.store, old) == [Outcome.OK] * 2
    assert bench.renewed() == [], "it was just written"
    bench.clock.advance(3700)
    bench.gate.clear()
    for _ in range(3):
        assert get(bench.store, old) == [Outcome.OK] * 2, "nobody who reads waits for it"
        assert bench.begun.wait(LONG_S)
    assert get(bench.store, missing) == [Outcome.MISS] * 2
    bench.gate.set()
    assert bench.renewed() == [name]
    bench.clock.advance(3500)
    get(bench.store, old)
    bench.put(extent_of(1, 2))
    assert bench.renewed() == [name]
    bench.clock.advance(200)
    get(bench.store, old)
    assert bench.renewed() == [name] * 2
    bench.store.close()


def test_many_are_renewed_in_turn_and_a_store_that_fails_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Renewing(monkeypatch)
    extents = [extent_of(number, 1) for number in range(150)]
    bench.kind.put(*extents)
    bench.gate.clear()
    bench.answer = Outcome.IO_ERROR
    for extent in extents:
        assert get(bench.store, extent) == [Outcome.OK]
    bench.gate.set()
    assert 0 < len(bench.renewed()) <= renewals.MAX_TOGETHER
    bench.engine.calls.clear()
    bench.answer = None
    bench.gate.clear()
    for extent in extents:
        assert get(bench.store, extent) == [Outcome.OK]
    bench.gate.set()
    assert sorted(bench.renewed()) == sorted(map(bench.kind.name_of, extents)), "each once"
    assert max(len(names) for _, names in bench.engine.calls) <= renewals.MAX_TOGETHER
    bench.store.close()


def test_a_read_ends_well_where_no_thread_can_be_had_and_the_next_use_renews(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    engine, begin = MemoryEngine(), threading.Timer.start
    asked = threading.Event()
    monkeypatch.setattr(renewals, "PAUSE_S", 0.0)
    monkeypatch.setattr(
        engine, "renew", lambda names, *, deadline_s: asked.set() or [Outcome.OK] * len(names)
    )
    made = renewals.Renewals(engine, ManualClock())
    monkeypatch.setattr(threading.Timer, "start", refuse)
    made.used(["one"])
    monkeypatch.setattr(threading.Timer, "start", begin)
    made.used(["one"])
    assert asked.wait(LONG_S)
    made.close()


def test_an_engine_whose_renewal_raises_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, extent = Renewing(monkeypatch), extent_of(0, 1)
    bench.kind.put(extent)
    works = bench.engine.renew
    monkeypatch.setattr(bench.engine, "renew", lambda names, *, deadline_s: names[len(names)])
    get(bench.store, extent)
    assert bench.renewed() == []
    monkeypatch.setattr(bench.engine, "renew", works)
    get(bench.store, extent)
    assert bench.renewed() == [bench.kind.name_of(extent)]
    bench.store.close()


def test_a_store_that_is_closed_renews_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, extent = Renewing(monkeypatch), extent_of(0, 1)
    monkeypatch.setattr(renewals, "PAUSE_S", LONG_S)
    bench.kind.put(extent)
    assert get(bench.store, extent) == [Outcome.OK]
    timer = bench.timer
    bench.store.close()
    assert timer is not None and not timer.is_alive()
    assert bench.renewed() == []


def test_an_engine_that_evicts_by_itself_is_told_of_no_use() -> None:
    clock, engine = ManualClock(), MemoryEngine(traits=EngineTraits(1, 1, has_capacity=True))
    store = RecordStore(engine, RecordNames(MEANING), PAYLOAD_BYTES, clock=clock)
    payload = memoryview(bytes(PAYLOAD_BYTES))
    for number in range(2):
        store.put_many([key_of(number)], [payload], deadline_s=LONG_S)
        clock.advance(3700)
        store.get_many([key_of(number)], buffers(1, PAYLOAD_BYTES), deadline_s=LONG_S)
    assert {call for call, _ in engine.calls} == {PUT, GET}
