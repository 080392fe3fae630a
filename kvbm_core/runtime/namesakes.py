"""Which configurations of this model have been served here before, so that a miss can name what differs.

A small private file for each: the engine's fields and how requests began, as digests. Nothing that is looked
up depends on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kvbm_core.identity.fields import Description
from kvbm_core.storage.disk.files import open_regular
from kvbm_core.tokens.hashing import encode_fields

log = logging.getLogger("kvbm")

FOLDER, SUFFIX = "namespaces", ".json"
FORMAT = 1
MAX_NOTES = 64
"""Files in one folder, of all models; the oldest go."""
MAX_COMPARED = 16
MAX_BEGINNINGS = 4096
MAX_NOTE_BYTES = 512 * 1024
MAX_FIELDS = 2000
MAX_VALUE_CHARS = 48
MAX_TOLD = 3
WRITE_EVERY_S = 30.0
CLOSE_TIMEOUT_S = 2.0
_DIGEST = "#"
"""Begins a value that is not told: too long, or a digest already (of an environment variable)."""
_HEX = re.compile(r"[0-9a-f]{32,}")
_KIND = re.compile(r"(?:str|bytes|int|float|bool|NoneType|dtype|device|path|name|fraction):(.*)", re.DOTALL)


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration. ``fields``: names and short values. ``beginnings``: see ``beginning_of``, the newest
    at the end.
    """

    format: int
    engine: str
    model: str
    block_tokens: int
    fields: dict[str, str]
    beginnings: tuple[int, ...]


def beginning_of(tokens: Sequence[int], num_tokens: int) -> int:
    """How a request begins: the same number in every process."""
    return hash(tuple(tokens[:num_tokens]))


class Namesakes:
    """Of one engine. ``folder``: None: nothing is known and nothing is kept. What cannot be read or written
    is as if it were not there; files are written on a thread of its own. An engine whose names mean nothing
    in another process leaves no note.
    """

    def __init__(
        self, folder: Path | None, engine: str, model: str, block_tokens: int, description: Description
    ) -> None:
        self._folder = folder
        self._own = Note(
            format=FORMAT,
            engine=engine,
            model=model,
            block_tokens=block_tokens,
            fields=short_fields(description, block_tokens),
            beginnings=(),
        )
        named = encode_fields(engine, model, block_tokens, description.digest)
        self._name = f"{hashlib.sha256(named).hexdigest()[:32]}{SUFFIX}"
        self._others: list[tuple[Note, frozenset[int]]] = []
        self._fresh: deque[int] = deque(maxlen=MAX_BEGINNINGS)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if folder is None:
            return
        self._others = [(note, frozenset(note.beginnings)) for note in self._read_others(folder)]
        if description.is_lasting:
            self._thread = threading.Thread(target=self._run, name="kvbm-namesakes", daemon=True)
            self._thread.start()

    def began(self, beginning: int) -> None:
        """A request under this configuration that began so. Any thread; does not wait."""
        if self._thread is not None:
            self._fresh.append(beginning)

    def elsewhere(self, tokens: Sequence[int]) -> str:
        """What differs in the nearest configuration under which a request began as ``tokens`` do; "" if none
        is known.
        """
        begins = {
            size: beginning_of(tokens, size)
            for size in {note.block_tokens for note, _ in self._others}
            if len(tokens) >= size
        }
        for note, beginnings in self._others:  # the nearest first
            if begins.get(note.block_tokens) in beginnings:
                return told_difference(note.fields, self._own.fields)
        return ""

    def close(self) -> None:
        """Writes what is new. May be called twice."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    # ---------------------------------------------------------------- files

    def _read_others(self, folder: Path) -> list[Note]:
        found: list[tuple[int, int, Note]] = []
        for path in _notes_in(folder)[:MAX_NOTES]:
            note = _read(path) if path.name != self._name else None
            if note is not None and (note.engine, note.model) == (self._own.engine, self._own.model):
                differing = differing_fields(note.fields, self._own.fields)
                if differing:
                    found.append((len(differing), len(found), note))
        found.sort(key=lambda one: one[:2])
        return [note for _, _, note in found[:MAX_COMPARED]]

    def _run(self) -> None:
        while not self._closing.wait(WRITE_EVERY_S):
            self._write()
        self._write()

    def _write(self) -> None:
        fresh = [self._fresh.popleft() for _ in range(len(self._fresh))]
        if self._folder is None or not fresh:
            return
        path = self._folder / self._name
        known = _read(path)
        beginnings = dict.fromkeys(known.beginnings if known is not None else ())
        for one in fresh:
            beginnings.pop(one, None)
            beginnings[one] = None
        note = msgspec.structs.replace(self._own, beginnings=tuple(beginnings)[-MAX_BEGINNINGS:])
        try:
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            draft = path.with_suffix(f".{secrets.token_hex(4)}")
            try:
                with open(open_regular(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                    file.write(msgspec.json.encode(note))
                draft.replace(path)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
            for old in _notes_in(self._folder)[MAX_NOTES:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.debug("kvbm: %s: %s; a later start will not know this configuration", path, error)


def _notes_in(folder: Path) -> list[Path]:
    """The newest first."""
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                found.append((path.lstat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def _read(path: Path) -> Note | None:
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            note = msgspec.json.decode(file.read(MAX_NOTE_BYTES), type=Note)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return note if note.format == FORMAT and note.block_tokens > 0 else None


# ---------------------------------------------------------------- what differs


def short_fields(description: Description, block_tokens: int) -> dict[str, str]:
    """The fields of a configuration for people: short values as they are, others as digests."""
    pairs = (("block_size_tokens", str(block_tokens)), *description.pairs)
    return {name: _short(text) for name, text in pairs[:MAX_FIELDS]}


def _short(text: str) -> str:
    found = _KIND.fullmatch(text)
    plain = found[1].strip("'\"") if found else text
    if len(plain) <= MAX_VALUE_CHARS and plain.isprintable() and not _HEX.search(plain):
        return plain
    return _DIGEST + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def differing_fields(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Names of the fields that differ."""
    return sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))


def told_difference(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """For a person: the fields that can be told in words first."""
    names = differing_fields(there, here)
    names.sort(key=lambda name: _is_digest(there.get(name), here.get(name)))
    words = [_told(name, there.get(name), here.get(name)) for name in names[:MAX_TOLD]]
    more = len(names) - len(words)
    return "; ".join(words) + (f"; and {more} more" if more else "")


def _told(name: str, there: str | None, here: str | None) -> str:
    if _is_digest(there, here) and there is not None and here is not None:
        return f"{name}: another value there"
    return f"{name}: {_value(there)} there, {_value(here)} here"


def _value(text: str | None) -> str:
    if text is None:
        return "not set"
    return "set" if text.startswith(_DIGEST) else text or "empty"


def _is_digest(*values: str | None) -> bool:
    return any(value is not None and value.startswith(_DIGEST) for value in values)
